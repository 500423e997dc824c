// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a report is read: rows of its JSON, and figures as people write them.

use serde_json::Value;

/// Each variant's name in reports, in the order of columns.
pub const VARIANTS: [&str; 3] = ["host", "vm", "vm+bridge"];

/// The names of the variants that the report has, in the order of columns.
pub fn variants(report: &Value) -> Vec<&str> {
    distinct(rows(report, "results").map(|row| &row["variant"]))
}

/// The elements of the array `key`; none where there is no such array.
pub fn rows<'a>(report: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    report[key].as_array().into_iter().flatten()
}

/// Each text once, in order.
pub fn distinct<'a>(values: impl Iterator<Item = &'a Value>) -> Vec<&'a str> {
    let mut found = Vec::new();
    for text in values.filter_map(Value::as_str) {
        if !found.contains(&text) {
            found.push(text);
        }
    }
    found
}

/// The scenarios, in the report's order.
pub fn scenarios(report: &Value) -> Vec<&str> {
    distinct(rows(report, "results").map(|row| &row["scenario"]))
}

/// The metrics of a scenario, in the report's order.
pub fn metrics<'a>(report: &'a Value, scenario: &str) -> Vec<&'a str> {
    let own = rows(report, "results").filter(|row| row["scenario"] == scenario);
    distinct(own.map(|row| &row["metric"]))
}

/// `to_fmax [ms]`.
pub fn with_unit(report: &Value, (scenario, metric): (&str, &str)) -> String {
    let mut own = variants(report)
        .into_iter()
        .filter_map(|of| find(report, (scenario, metric), of));
    let row = own
        .next()
        .map(|row| row["unit"].as_str().unwrap_or_default());
    match row.map_or("", |of| unit(of).0) {
        "" => metric.to_owned(),
        unit => format!("{metric} [{unit}]"),
    }
}

/// The row of a scenario's metric on a variant.
pub fn find<'a>(
    report: &'a Value,
    (scenario, metric): (&str, &str),
    variant: &str,
) -> Option<&'a Value> {
    rows(report, "results").find(|row| {
        row["scenario"] == scenario && row["metric"] == metric && row["variant"] == variant
    })
}

/// The unit that people read a unit of reports in, how many of the report's
/// are one, and digits behind the point.
pub fn unit(of: &str) -> (&str, f64, usize) {
    match of {
        "us" => ("ms", 1e3, 1),
        "permille" => ("%", 10.0, 1),
        "kHz" => ("MHz", 1e3, 0),
        "uJ" => ("mJ", 1e3, 1),
        "turns" => ("10⁶ turns", 1e6, 1),
        "1/ks" => ("1/s", 1e3, 1),
        "1/kJ" => ("1/J", 1e3, 1),
        "share" => ("", 1.0, 0),
        other => (other, 1.0, 0),
    }
}

/// A figure in the unit that people read, without its name.
pub fn number(value: &Value, of: &str) -> String {
    let (_, divisor, digits) = unit(of);
    match value.as_f64() {
        Some(value) => format!("{:.digits$}", value / divisor),
        None => "never".to_owned(),
    }
}

/// `103.2 (99.1–103.2)`, and `!` where a repeat wasn't settled; the median alone if all are it.
pub fn cell(row: &Value) -> String {
    let shown = |key: &str| number(&row[key], row["unit"].as_str().unwrap_or_default());
    let [median, min, max] = ["median", "min", "max"].map(shown);
    let unsettled = row["unsettled"].as_array();
    let mark = if unsettled.is_some_and(|all| !all.is_empty()) {
        " !"
    } else {
        ""
    };
    if min == max {
        return format!("{median}{mark}");
    }
    format!("{median} ({min}–{max}){mark}")
}
