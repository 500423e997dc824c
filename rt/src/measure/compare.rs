// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two reports beside each other: which latencies became longer than the spread of their tests.
//!
//! A test that was measured several times has a spread: the distance of its largest and smallest
//! figure. A difference of two medians within the larger spread of both is chance. Runs that were
//! cut short are left out. Tests that measured in another way get no verdict: the longer of two finds
//! longer latencies.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

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
    due: Vec<u64>,
}

#[derive(Clone, Debug, Deserialize)]
struct ComparedLatencies {
    cpu: u32,
    samples: u64,
    max_us: u64,
    p9999_us: Option<u64>,
}

/// Place, load and CPU.
type ComparedTest = (String, String, u32);

/// The figures of all runs of a test. A percentile beyond the histogram counts as the histogram's
/// end, which is above all others.
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
    /// Both are beyond the histogram.
    Beyond,
}

/// Whether latencies became longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
enum ComparisonVerdict {
    /// One did.
    Worse,
    /// None did.
    NotWorse,
    /// The figures don't tell.
    Refused {
        /// Why, and what to do.
        why: String,
    },
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
    /// Whether the median of either is beyond its histogram.
    beyond: [bool; 2],
    spread_us: u64,
    change: LatencyChange,
}

/// Two reports compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReportComparison {
    #[serde(flatten)]
    verdict: ComparisonVerdict,
    /// Conditions that differ, and both values.
    differences: BTreeMap<String, [Value; 2]>,
    /// Whether figures of either are no hardware's.
    emulated: bool,
    figures: Vec<ComparedFigure>,
    /// Tests that one of the reports lacks, and runs that were cut short.
    not_compared: Vec<String>,
}

impl ComparedRun {
    /// Whether each CPU has the wake-ups that were due.
    fn is_complete(&self) -> bool {
        let mut pairs = self.latencies.iter().zip(&self.due);
        !self.latencies.is_empty()
            && self.latencies.len() == self.due.len()
            && pairs.all(|(one, due)| one.samples > 0 && one.samples >= *due)
    }
}

impl ComparedReport {
    fn figures(&self) -> TestFigures {
        let mut figures = TestFigures::new();
        for run in self.runs.iter().filter(|run| run.is_complete()) {
            for one in &run.latencies {
                let test = (run.place.clone(), run.load.clone(), one.cpu);
                let beyond = self.histogram_end().unwrap_or(one.max_us);
                let of = [
                    (LatencyFigure::Max, one.max_us),
                    (LatencyFigure::P9999, one.p9999_us.unwrap_or(beyond)),
                ];
                for (figure, us) in of {
                    let values = figures.entry((test.clone(), figure)).or_default();
                    values.push(us);
                }
            }
        }
        figures
    }

    fn histogram_end(&self) -> Option<u64> {
        self.conditions.get(TEST)?.get("bins_us")?.as_u64()
    }

    /// Whether a percentile of this report's is beyond its histogram.
    fn is_beyond(&self, figure: LatencyFigure, us: u64) -> bool {
        figure == LatencyFigure::P9999 && self.histogram_end().is_some_and(|end| us >= end)
    }

    /// The tests with a run that was cut short, each once.
    fn incomplete(&self, whose: &str) -> BTreeSet<String> {
        let cut = self.runs.iter().filter(|run| !run.is_complete());
        let lines = cut.map(|ComparedRun { place, load, .. }| {
            format!("{place}, {load}: a run of the {whose} report was cut short, and is left out")
        });
        lines.collect()
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
            let beyond = [(first, first_us), (second, &second_us)];
            let beyond = beyond.map(|(report, us)| report.is_beyond(figure, median(us)));
            Some(ComparedFigure {
                place,
                load,
                cpu,
                figure,
                spread_us,
                beyond,
                change: match beyond {
                    [true, true] => LatencyChange::Beyond,
                    _ => change(first_us, &second_us, spread_us),
                },
                first_us: first_us.clone(),
                second_us,
            })
        });
        let figures: Vec<ComparedFigure> = figures.collect();
        let alone = |of: &TestFigures, other: &TestFigures, whose: &str| {
            let keys = of.keys().filter(|key| !other.contains_key(*key));
            let maxima = keys.filter(|(_, figure)| *figure == LatencyFigure::Max);
            let names = maxima.map(|((place, load, cpu), _)| {
                format!("{place}, {load}, CPU {cpu}: only in the {whose} report")
            });
            names.collect::<Vec<_>>()
        };
        let lines = [alone(&a, &b, "first"), alone(&b, &a, "second")].concat();
        let cut = [first.incomplete("first"), second.incomplete("second")];
        let differences = differences(&first.conditions, &second.conditions);
        let emulated = first.is_emulated() || second.is_emulated();
        Self {
            verdict: verdict(emulated, &differences, &figures),
            differences,
            emulated,
            figures,
            not_compared: lines.into_iter().chain(cut.into_iter().flatten()).collect(),
        }
    }

    /// Whether they have a test in common.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.figures.is_empty()
    }

    /// Whether a latency became longer.
    #[must_use]
    pub fn is_worse(&self) -> bool {
        self.verdict == ComparisonVerdict::Worse
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
            let [first, second] =
                [(&one.first_us, 0), (&one.second_us, 1)].map(|(us, at)| match one.beyond[at] {
                    true => "beyond".to_owned(),
                    false => median(us).to_string(),
                });
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
        for line in &self.not_compared {
            let _ = writeln!(text, "{line}");
        }
        text + &self.verdict_line() + "\n"
    }

    fn verdict_line(&self) -> String {
        match &self.verdict {
            ComparisonVerdict::Worse => {
                "worse: a latency became longer by more than the spread".to_owned()
            }
            ComparisonVerdict::NotWorse => {
                "no latency became longer by more than the spread".to_owned()
            }
            ComparisonVerdict::Refused { why } => format!("no verdict: {why}"),
        }
    }
}

fn verdict(
    emulated: bool,
    differences: &BTreeMap<String, [Value; 2]>,
    figures: &[ComparedFigure],
) -> ComparisonVerdict {
    let refused = |why: &str| ComparisonVerdict::Refused {
        why: why.to_owned(),
    };
    let changed = |change: LatencyChange| figures.iter().any(|one| one.change == change);
    let of_test = differences.keys().filter(|name| name.starts_with(TEST_IN));
    let of_test: Vec<&str> = of_test.map(String::as_str).collect();
    if emulated {
        return refused("figures are no hardware's; measure on the hardware");
    }
    if !of_test.is_empty() {
        let names = of_test.join(", ");
        return refused(&format!(
            "the tests differ in {names}; measure both in the same way"
        ));
    }
    if changed(LatencyChange::Worse) {
        return ComparisonVerdict::Worse;
    }
    if changed(LatencyChange::Unknown) {
        return refused("one draw has no spread; measure each test several times");
    }
    ComparisonVerdict::NotWorse
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
            Self::Beyond => "both beyond the histogram",
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
    let (first, second) = (single(first), single(second));
    let names = first.keys().chain(second.keys());
    let value = |of: &Map<String, Value>, name: &str| of.get(name).cloned().unwrap_or_default();
    names
        .filter(|name| *name != "published")
        .map(|name| (name.clone(), [value(&first, name), value(&second, name)]))
        .filter(|(_, [first, second])| first != second)
        .collect()
}

/// The condition that has the test's own, and how these begin.
const TEST: &str = "test";
const TEST_IN: &str = "test.";

/// Conditions of which each has a single value.
fn single(conditions: &Map<String, Value>) -> Map<String, Value> {
    let mut all = conditions.clone();
    if let Some(Value::Object(own)) = all.remove(TEST) {
        let own = own.into_iter();
        all.extend(own.map(|(name, value)| (format!("{TEST_IN}{name}"), value)));
    }
    all
}

#[cfg(test)]
mod tests {
    //! Promise: a figure is worse by more than the spread alone, on hardware alone, and with more
    //! than one draw; what the reports don't share is named.
    use serde_json::json;

    use super::*;

    fn report(maxima: &[u64], kernel: &str, emulated: Option<&str>) -> ComparedReport {
        let run = |max: &u64| {
            json!({ "place": "host", "load": "idle", "due": [9],
                "latencies": [{ "cpu": 3, "max_us": max, "p9999_us": 5, "samples": 9 }] })
        };
        let runs: Vec<Value> = maxima.iter().map(run).collect();
        let conditions = json!({ "kernel": kernel, "emulated": emulated, "published": maxima,
            "test": { "seconds": 10, "bins_us": 400 } });
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

    #[test]
    fn tests_that_measured_in_another_way_get_no_verdict() {
        let short = report(&[1, 2], "7.2", None);
        let mut long = report(&[90, 91], "7.2", None);
        long.conditions["test"]["seconds"] = 86_400.into();
        let compared = ReportComparison::new(&short, &long);
        assert!(!compared.is_worse());
        let text = compared.text();
        let differs = "differs: test.seconds: 10 → 86400\nno verdict: the tests differ in \
                       test.seconds; measure both in the same way\n";
        assert!(text.ends_with(differs), "{text}");
        let json = serde_json::to_value(&compared).unwrap();
        assert_eq!(json["verdict"], "refused");
    }

    #[test]
    fn a_run_that_was_cut_short_is_left_out() {
        let one = report(&[10, 11, 12], "7.2", None);
        let mut cut = report(&[90, 10, 11], "7.2", None);
        cut.runs[0].latencies[0].samples = 8;
        let compared = ReportComparison::new(&one, &cut);
        for figure in compared
            .figures
            .iter()
            .filter(|one| one.figure == LatencyFigure::Max)
        {
            assert_eq!(
                (&*figure.first_us, &*figure.second_us),
                (&[10, 11, 12][..], &[10, 11][..])
            );
        }
        let text = compared.text();
        let line = "host, idle: a run of the second report was cut short, and is left out\n";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("no latency became longer"), "{text}");
        for run in &mut cut.runs {
            run.latencies.clear();
        }
        assert!(ReportComparison::new(&one, &cut).is_empty());
    }

    #[test]
    fn beyond_the_histogram_is_above_all_of_it() {
        let of = |p9999: [Option<u64>; 3]| {
            let mut report = report(&[900, 900, 900], "7.2", None);
            for (run, us) in report.runs.iter_mut().zip(p9999) {
                run.latencies[0].p9999_us = us;
            }
            report
        };
        let inside = of([Some(50), Some(50), Some(52)]);
        for (first, second, row) in [
            (
                &inside,
                of([Some(50), None, None]),
                "50    beyond     350  within the spread",
            ),
            (&inside, of([None; 3]), "50    beyond       2  worse"),
            (
                &of([None; 3]),
                of([None; 3]),
                "beyond    beyond       0  both beyond the histogram",
            ),
        ] {
            let text = ReportComparison::new(first, &second).text();
            let line = text.lines().find(|line| line.contains(" p99.99 ")).unwrap();
            assert!(line.ends_with(row), "{text}");
        }
    }
}
