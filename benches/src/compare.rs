// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What differs between two reports.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// Scenario, variant, metric.
type Key = (String, String, String);

/// The differences, a line each, and the count of what is the same.
#[derive(Debug, Default)]
pub struct Changes {
    lines: Vec<String>,
    same: usize,
}

impl Changes {
    /// Whether there is a difference.
    pub fn any(&self) -> bool {
        !self.lines.is_empty()
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            let _ = writeln!(text, "{line}");
        }
        let _ = writeln!(
            text,
            "{} figures differ, {} are the same",
            self.lines.len(),
            self.same
        );
        text
    }
}

/// Compares two reports that `bench --out` wrote.
///
/// # Errors
/// A file that isn't one.
pub fn files(first: &Path, second: &Path) -> Result<Changes> {
    Ok(between(&read(first)?, &read(second)?))
}

fn read(path: &Path) -> Result<Value> {
    let wrong = || {
        format!(
            "{} is not a report of vcpufreq bench; name a file that --out wrote",
            path.display()
        )
    };
    let text = std::fs::read_to_string(path).with_context(wrong)?;
    let report: Value = serde_json::from_str(&text).with_context(wrong)?;
    report["results"].as_array().with_context(wrong)?;
    Ok(report)
}

/// Compares conditions, values of every repeat and failures.
pub fn between(first: &Value, second: &Value) -> Changes {
    let mut changes = Changes::default();
    let empty = serde_json::Map::new();
    let conditions = |report: &'_ Value| report["conditions"].as_object().unwrap_or(&empty).clone();
    let (one, two) = (conditions(first), conditions(second));
    for name in one
        .keys()
        .chain(two.keys().filter(|name| !one.contains_key(*name)))
    {
        if one.get(name) != two.get(name) {
            let shown = |value: Option<&Value>| value.map_or("-".to_owned(), Value::to_string);
            changes.lines.push(format!(
                "condition {name}: {} -> {}",
                shown(one.get(name)),
                shown(two.get(name))
            ));
        }
    }
    let (one, two) = (rows(first), rows(second));
    for (key, old) in &one {
        match two.get(key) {
            Some(new) if new == old => changes.same += 1,
            new => changes.lines.push(line(key, Some(old), new)),
        }
    }
    let news = two.iter().filter(|(key, _)| !one.contains_key(*key));
    changes
        .lines
        .extend(news.map(|(key, new)| line(key, None, Some(new))));
    changes
}

fn rows(report: &Value) -> BTreeMap<Key, Value> {
    let word = |row: &Value, name: &str| row[name].as_str().unwrap_or("?").to_owned();
    let key = |row: &Value| {
        (
            word(row, "scenario"),
            word(row, "variant"),
            word(row, "metric"),
        )
    };
    let rows = report["results"].as_array().into_iter().flatten();
    rows.map(|row| (key(row), row.clone())).collect()
}

fn line((scenario, variant, metric): &Key, old: Option<&Value>, new: Option<&Value>) -> String {
    let shown = |row: Option<&Value>| match row {
        None => "not measured".to_owned(),
        Some(row) if row["median"].is_null() => "never".to_owned(),
        Some(row) => format!(
            "{} {} ({}..{}, n {})",
            row["median"],
            row["unit"].as_str().unwrap_or("?"),
            row["min"],
            row["max"],
            row["n"]
        ),
    };
    let median = |row: Option<&Value>| row.and_then(|row| row["median"].as_f64());
    let by = match (median(old), median(new)) {
        (Some(old), Some(new)) if old > 0.0 => format!(", {:+.1} %", (new / old - 1.0) * 100.0),
        _ => String::new(),
    };
    format!(
        "{scenario} {variant} {metric}: {} -> {}{by}",
        shown(old),
        shown(new)
    )
}

#[cfg(test)]
mod tests {
    //! Equal reports have no changes; each kind of change is one line.

    use serde_json::json;

    use super::*;

    fn report(median: Value, kernel: &str) -> Value {
        json!({
            "conditions": { "host_kernel": kernel },
            "results": [{ "scenario": "big-ramp", "variant": "host", "metric": "to_fmax",
                "unit": "us", "n": 1, "median": median, "min": median, "max": median }],
        })
    }

    #[test]
    fn equal_reports_have_no_changes() {
        let changes = between(&report(json!(100), "a"), &report(json!(100), "a"));
        assert!(!changes.any());
        assert_eq!(changes.text(), "0 figures differ, 1 are the same\n");
    }

    #[test]
    fn each_change_is_a_line() {
        let changes = between(&report(json!(100), "a"), &report(json!(110), "b"));
        assert_eq!(changes.lines[0], "condition host_kernel: \"a\" -> \"b\"");
        assert_eq!(
            changes.lines[1],
            "big-ramp host to_fmax: 100 us (100..100, n 1) -> 110 us (110..110, n 1), +10.0 %"
        );
        let gone = between(
            &report(json!(null), "a"),
            &json!({ "conditions": { "host_kernel": "a" }, "results": [] }),
        );
        assert_eq!(gone.lines, ["big-ramp host to_fmax: never -> not measured"]);
    }
}
