// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What each ingredient of the bridge buys, in work and in joules: a page of its own.

use serde_json::Value;

use super::markdown::{head, row};
use vcpufreq_bench::report_json::{find, metrics, number, rows, scenarios};

/// The variants, and what each has that the one before it has not.
const INGREDIENTS: [(&str, &str); 10] = [
    ("plain", "a guest as QEMU starts it"),
    ("pinned", "+ pinned by hand"),
    ("vm", "+ capacities, topology"),
    ("opps", "+ OPPs, energy model"),
    ("cur_perf", "+ cur_perf"),
    ("exit", "+ requests by exit"),
    ("no_exit", "+ requests without exits"),
    ("sum", "+ sums"),
    ("scx", "scx in their place"),
    ("vm+bridge", "sums + ceilings"),
];
/// What work is read off: frames' time, or a score.
const WORK: [(&str, &str); 2] = [("frame_p95", "p95"), ("score", "work")];

/// The page of reports with ablations; `None` without figures.
pub fn page(reports: &[Value], build: &str) -> Option<String> {
    let tables: Vec<String> = reports.iter().filter_map(table).collect();
    if tables.is_empty() {
        return None;
    }
    Some(format!(
        "# What each ingredient buys\n\nMedians in % of the host's, of work or of the p95 of frames' \
         times, and of energy. All guests have the host's cycles. Each row has one ingredient more than \
         the row above it.\n\n{}Build {build}.\n",
        tables.join("\n")
    ))
}

/// A report's table: a row for each ingredient, a column for each workload.
fn table(report: &Value) -> Option<String> {
    let workloads = workloads(report);
    if workloads.is_empty() {
        return None;
    }
    let kind = match report["conditions"]["emulated"].as_bool() {
        Some(true) => " (emulated)",
        _ => "",
    };
    let ingredient = format!("ingredient{kind}");
    let named = workloads
        .iter()
        .map(|one| format!("{}: {}, energy", one.case, one.name));
    let named: Vec<String> = std::iter::once(ingredient).chain(named).collect();
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let conditions = &report["conditions"];
    let place = conditions["topology"]
        .as_str()
        .or(conditions["board"].as_str());
    let n = rows(report, "results")
        .filter_map(|row| row["n"].as_u64())
        .max();
    let title = format!("`{}`, n = {}:\n\n", place.unwrap_or("?"), n.unwrap_or(0));
    let measured = INGREDIENTS
        .iter()
        .filter(|(variant, _)| rows(report, "results").any(|row| row["variant"] == **variant));
    let lines = measured.map(|(variant, what)| {
        let cells = workloads.iter().map(|one| one.cell(report, variant));
        row(std::iter::once((*what).to_owned()).chain(cells))
    });
    Some(title + &head(&named) + &lines.collect::<String>() + "\n")
}

/// A workload that the report has.
struct WorkloadColumn<'a> {
    scenario: &'a str,
    case: &'a str,
    metric: &'static str,
    name: &'static str,
}

impl WorkloadColumn<'_> {
    /// `101.2; 98.3`, of work and energy.
    fn cell(&self, report: &Value, variant: &str) -> String {
        let of = |metric: &str| {
            let metric = format!("{}.{metric}_to_host", self.case);
            let found = find(report, (self.scenario, &metric), variant);
            found.map_or("-".to_owned(), |row| number(&row["median"], "permille"))
        };
        format!("{}; {}", of(self.metric), of("energy"))
    }
}

fn workloads(report: &Value) -> Vec<WorkloadColumn<'_>> {
    let mut found = Vec::new();
    for scenario in scenarios(report) {
        for metric in metrics(report, scenario) {
            let work = WORK.iter().find_map(|(end, name)| {
                let case = metric.strip_suffix(&format!(".{end}_to_host"))?;
                Some((case, *end, *name))
            });
            let Some((case, metric, name)) = work else {
                continue;
            };
            found.push(WorkloadColumn {
                scenario,
                case,
                metric,
                name,
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    //! Each variant of an ablation has its row, each workload its column, in the order of the report.

    use serde_json::json;

    use super::*;
    use vcpufreq_bench::Variant;

    #[test]
    fn each_ingredient_is_one_of_the_ablation() {
        let names: Vec<_> = INGREDIENTS.iter().map(|(variant, _)| *variant).collect();
        let of: Vec<_> = Variant::ABLATION[1..]
            .iter()
            .map(|one| one.name())
            .collect();
        assert_eq!(names, of);
    }

    #[test]
    fn a_row_has_work_and_energy_of_each_workload() {
        let figure = |metric: &str, variant: &str, median: u64| {
            json!({ "scenario": "demand", "metric": metric, "variant": variant,
                "unit": "permille", "median": median, "n": 5 })
        };
        let report = json!({ "conditions": { "topology": "2+2", "emulated": true }, "results": [
            figure("d90.frame_p95", "host", 15_000),
            figure("d90.frame_p95_to_host", "plain", 1_213),
            figure("d90.energy_to_host", "plain", 983),
            figure("d90.frame_p95_to_host", "vm+bridge", 1_001),
            figure("build.score_to_host", "plain", 900),
        ] });
        let page = page(&[report], "abc").unwrap();
        for line in [
            "`2+2`, n = 5:",
            "| ingredient (emulated) | d90: p95, energy | build: work, energy |",
            "| a guest as QEMU starts it | 121.3; 98.3 | 90.0; - |",
            "| sums + ceilings | 100.1; - | -; - |",
            "Build abc.",
        ] {
            assert!(page.lines().any(|one| one == line), "{line}: {page}");
        }
        assert!(!page.contains("pinned"), "it was not measured");
        assert_eq!(super::page(&[json!({ "results": [] })], "abc"), None);
    }
}
