// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two reports beside each other: which latencies became longer than the spread of their tests.
//!
//! A test that was measured several times has a spread: the distance of its largest and smallest
//! figure. A difference of two medians within the larger spread of both is chance.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a comparison needs of a report: the JSON that `rt report` prints.
#[derive(Clone, Debug, Deserialize)]
pub struct ComparedReport {
    conditions: Map<String, Value>,
    runs: Vec<ComparedRun>,
}

#[derive(Clone, Debug, Deserialize)]
struct ComparedRun {
    place: String,
    load: String,
    latencies: Vec<ComparedLatencies>,
}

#[derive(Clone, Debug, Deserialize)]
struct ComparedLatencies {
    cpu: u32,
    max_us: u64,
    p9999_us: Option<u64>,
}

/// Place, load and CPU.
type ComparedTest = (String, String, u32);

/// What is beyond the histogram has no 99.99th percentile.
type TestFigures = BTreeMap<(ComparedTest, LatencyFigure), Vec<u64>>;

/// A figure that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum LatencyFigure {
    P9999,
    Max,
}

/// How a figure changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum LatencyChange {
    /// By more than the spread.
    Worse,
    /// By more than the spread.
    Better,
    /// Within the spread.
    Within,
    /// A single draw has no spread.
    Unknown,
}

/// One figure of both reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct ComparedFigure {
    place: String,
    load: String,
    cpu: u32,
    figure: LatencyFigure,
    first_us: Vec<u64>,
    second_us: Vec<u64>,
    spread_us: u64,
    change: LatencyChange,
}

/// Two reports compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReportComparison {
    /// Conditions that differ, and both values.
    differences: BTreeMap<String, [Value; 2]>,
    /// Why there is no verdict.
    emulated: bool,
    figures: Vec<ComparedFigure>,
    /// Tests that one of the reports lacks.
    not_in_both: Vec<String>,
}

impl ComparedReport {
    fn figures(&self) -> TestFigures {
        let mut figures = TestFigures::new();
        for run in &self.runs {
            for one in &run.latencies {
                let test = (run.place.clone(), run.load.clone(), one.cpu);
                let of = [
                    (LatencyFigure::Max, Some(one.max_us)),
                    (LatencyFigure::P9999, one.p9999_us),
                ];
                for (figure, us) in of {
                    let values = figures.entry((test.clone(), figure)).or_default();
                    values.extend(us);
                }
            }
        }
        figures.retain(|_, values| !values.is_empty());
        figures
    }

    fn is_emulated(&self) -> bool {
        self.conditions
            .get("emulated")
            .is_some_and(|why| !why.is_null())
    }
}

impl ReportComparison {
    /// Compares.
    #[must_use]
    pub fn new(first: &ComparedReport, second: &ComparedReport) -> Self {
        let (a, b) = (first.figures(), second.figures());
        let figures = a.iter().filter_map(|(key, first_us)| {
            let ((place, load, cpu), figure) = key.clone();
            let second_us = b.get(key)?.clone();
            let spread_us = range(first_us).max(range(&second_us));
            Some(ComparedFigure {
                place,
                load,
                cpu,
                figure,
                spread_us,
                change: change(first_us, &second_us, spread_us),
                first_us: first_us.clone(),
                second_us,
            })
        });
        let figures = figures.collect();
        let alone = |of: &TestFigures, other: &TestFigures, whose: &str| {
            let keys = of.keys().filter(|key| !other.contains_key(*key));
            let maxima = keys.filter(|(_, figure)| *figure == LatencyFigure::Max);
            let names = maxima.map(|((place, load, cpu), _)| {
                format!("{place}, {load}, CPU {cpu}: only in the {whose} report")
            });
            names.collect::<Vec<_>>()
        };
        Self {
            differences: differences(&first.conditions, &second.conditions),
            emulated: first.is_emulated() || second.is_emulated(),
            figures,
            not_in_both: [alone(&a, &b, "first"), alone(&b, &a, "second")].concat(),
        }
    }

    /// Whether they have a test in common.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.figures.is_empty()
    }

    /// Whether a latency got worse; none did on an emulated machine, as far as can be said.
    #[must_use]
    pub fn is_worse(&self) -> bool {
        let worse = |one: &ComparedFigure| one.change == LatencyChange::Worse;
        !self.emulated && self.figures.iter().any(worse)
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mark = if self.emulated { " (emulated)" } else { "" };
        let mut text = format!(
            "{:<6}{:<10}{:>4}  {:<7}{:>10}{:>10}{:>8}  µs, medians{mark}\n",
            "where", "load", "CPU", "figure", "first", "second", "spread"
        );
        for one in &self.figures {
            let (figure, change) = (one.figure.name(), one.change.text());
            let [first, second] = [&one.first_us, &one.second_us].map(|values| median(values));
            let _ = writeln!(
                text,
                "{:<6}{:<10}{:>4}  {figure:<7}{first:>10}{second:>10}{:>8}  {change}",
                one.place, one.load, one.cpu, one.spread_us
            );
        }
        text += "\n";
        for (name, [first, second]) in &self.differences {
            let _ = writeln!(text, "differs: {name}: {first} → {second}");
        }
        for line in &self.not_in_both {
            let _ = writeln!(text, "{line}");
        }
        text + self.verdict_line() + "\n"
    }

    fn verdict_line(&self) -> &'static str {
        let unknown = |one: &ComparedFigure| one.change == LatencyChange::Unknown;
        match (self.emulated, self.is_worse()) {
            (true, _) => "no verdict: figures are no hardware's; measure on the hardware",
            (_, true) => "worse: a latency became longer by more than the spread",
            _ if self.figures.iter().all(unknown) => {
                "no verdict: one draw has no spread; measure each test several times"
            }
            _ => "no latency became longer by more than the spread",
        }
    }
}

impl LatencyFigure {
    const fn name(self) -> &'static str {
        match self {
            Self::Max => "max",
            Self::P9999 => "p99.99",
        }
    }
}

impl LatencyChange {
    const fn text(self) -> &'static str {
        match self {
            Self::Worse => "worse",
            Self::Better => "better",
            Self::Within => "within the spread",
            Self::Unknown => "one draw: no spread",
        }
    }
}

fn change(first: &[u64], second: &[u64], spread_us: u64) -> LatencyChange {
    if first.len() < 2 || second.len() < 2 {
        return LatencyChange::Unknown;
    }
    // cyclictest counts whole µs: one more or less is none.
    let within = spread_us.max(1);
    let [first, second] = [first, second].map(median);
    match first.abs_diff(second) > within {
        false => LatencyChange::Within,
        true if second > first => LatencyChange::Worse,
        true => LatencyChange::Better,
    }
}

fn range(values: &[u64]) -> u64 {
    let (min, max) = (values.iter().min(), values.iter().max());
    max.zip(min).map_or(0, |(max, min)| max - min)
}

/// Of an even number, the larger of the two in the middle.
fn median(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// What has another value in both, but for what the profile only bears.
fn differences(
    first: &Map<String, Value>,
    second: &Map<String, Value>,
) -> BTreeMap<String, [Value; 2]> {
    let names = first.keys().chain(second.keys());
    let value = |of: &Map<String, Value>, name: &str| of.get(name).cloned().unwrap_or_default();
    names
        .filter(|name| *name != "published")
        .map(|name| (name.clone(), [value(first, name), value(second, name)]))
        .filter(|(_, [first, second])| first != second)
        .collect()
}

#[cfg(test)]
mod tests {
    //! Promise: a figure is worse by more than the spread alone, on hardware alone, and with more
    //! than one draw; what the reports don't share is named.
    use serde_json::json;

    use super::*;

    fn report(maxima: &[u64], kernel: &str, emulated: Option<&str>) -> ComparedReport {
        let run = |max: &u64| {
            json!({ "place": "host", "load": "idle",
                "latencies": [{ "cpu": 3, "max_us": max, "p9999_us": 5, "samples": 9 }] })
        };
        let runs: Vec<Value> = maxima.iter().map(run).collect();
        let conditions = json!({ "kernel": kernel, "emulated": emulated, "published": maxima });
        let report = json!({ "conditions": conditions, "runs": runs });
        serde_json::from_value(report).unwrap()
    }

    #[test]
    fn worse_is_beyond_the_spread() {
        for (first, second, change, worse) in [
            (&[10, 12, 11][..], &[14, 15, 16][..], "worse", true),
            (&[10, 12, 11], &[12, 13, 14], "within the spread", false),
            (&[10, 30, 11], &[14, 15, 16], "within the spread", false),
            (&[10, 12, 11], &[4, 5, 6], "better", false),
            // cyclictest's own step.
            (&[10, 10], &[11, 11], "within the spread", false),
            (&[10, 10], &[12, 12], "worse", true),
            (&[10], &[100], "one draw: no spread", false),
            (&[10, 11], &[100], "one draw: no spread", false),
        ] {
            let of = |values: &[u64]| report(values, "7.2", None);
            let compared = ReportComparison::new(&of(first), &of(second));
            assert_eq!(compared.is_worse(), worse, "{first:?} {second:?}");
            let text = compared.text();
            let row = text.lines().find(|line| line.contains(" max ")).unwrap();
            assert!(row.ends_with(change), "{text}");
            assert!(!text.contains("differs"), "{text}");
        }
    }

    #[test]
    fn an_emulated_machine_has_no_verdict() {
        let slow = report(&[90, 91], "7.3", Some("it is the lab"));
        let compared = ReportComparison::new(&report(&[1, 2], "7.2", None), &slow);
        assert!(!compared.is_worse());
        let text = compared.text();
        assert!(
            text.contains("(emulated)") && text.contains("no verdict"),
            "{text}"
        );
        assert!(
            text.contains("differs: kernel: \"7.2\" → \"7.3\"\n"),
            "{text}"
        );
    }

    #[test]
    fn what_one_report_lacks_is_named() {
        let one = report(&[1, 2], "7.2", None);
        let mut other = one.clone();
        other.runs[0].load = "stress".to_owned();
        let text = ReportComparison::new(&one, &other).text();
        let line = "host, stress, CPU 3: only in the second report\n";
        assert!(text.contains(line), "{text}");
        other.runs[1].load = "stress".to_owned();
        assert!(ReportComparison::new(&one, &other).is_empty());
    }
}
