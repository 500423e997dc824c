// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as text: a line for each scenario and metric, a column for each
//! variant; what was wrong; and what has to hold. From the report's JSON.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use crate::guest::LIMITS;
use crate::report_json::{cell, find, metrics, rows, scenarios, variants, with_unit};

/// All of it.
pub fn text(report: &Value) -> String {
    let has_guest = variants(report).iter().any(|variant| *variant != "host");
    let limits = if has_guest { LIMITS } else { "" };
    let mut text = format!(
        "{limits}{:<14} {:<34}",
        "scenario", "metric, median (min–max)"
    );
    for variant in variants(report) {
        let _ = write!(text, " {variant:>22}");
    }
    text.push('\n');
    for scenario in scenarios(report) {
        for metric in metrics(report, scenario) {
            let of = (scenario, metric);
            let _ = write!(text, "{scenario:<14} {:<34}", with_unit(report, of));
            for variant in variants(report) {
                let cell = find(report, of, variant).map_or("-".to_owned(), cell);
                let _ = write!(text, " {cell:>22}");
            }
            text.push('\n');
        }
    }
    text + &wrong(report) + &bounds(report)
}

fn wrong(report: &Value) -> String {
    let mut text = String::new();
    for rest in rows(&report["conditions"], "rests_above_lowest") {
        let _ = writeln!(
            text,
            "rests above its lowest: {}",
            rest.as_str().unwrap_or("?")
        );
    }
    let mut said = BTreeSet::new();
    let rows_of = |key| rows(report, key);
    let word = |row: &Value, key: &str| row[key].as_str().unwrap_or("?").to_owned();
    for row in rows_of("results") {
        for why in rows(row, "unsettled") {
            let (scenario, variant) = (word(row, "scenario"), word(row, "variant"));
            let line = format!("! {scenario} on {variant}: {}", why.as_str().unwrap_or("?"));
            if said.insert(line.clone()) {
                let _ = writeln!(text, "{line}");
            }
        }
    }
    for failure in rows_of("failures") {
        let [scenario, variant, error] =
            ["scenario", "variant", "error"].map(|key| word(failure, key));
        let _ = writeln!(text, "FAILED {scenario} on {variant}: {error}");
    }
    text
}

fn bounds(report: &Value) -> String {
    let mut text = String::new();
    for bound in rows(report, "bounds") {
        let verdict = match bound["held"].as_bool() {
            Some(true) => "holds   ",
            Some(false) => "DOESN'T ",
            None => "no bound",
        };
        let _ = writeln!(text, "{verdict}  {}", bound["text"].as_str().unwrap_or("?"));
    }
    match text.is_empty() {
        true => text,
        false => format!("\nWhat has to hold:\n{text}"),
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what a guest can't have is above the figures of guests alone.
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_are_above_the_figures_of_guests() {
        let head = |variant: &str| {
            let row = json!({ "scenario": "a", "metric": "b", "unit": "us", "variant": variant });
            let text = text(&json!({ "results": [row] }));
            text.lines().next().unwrap_or_default().to_owned()
        };
        assert!(head("host").starts_with("scenario"));
        let first = LIMITS.lines().next().unwrap_or("scenario");
        assert!(head("vm").starts_with(first));
    }
}
