// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as one page that needs nothing else: the verdict, for each scenario its ramps as
//! pictures, its charts and its figures, and the conditions. From the report's JSON.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use crate::chart::{self, chart, titles};
use crate::picture::escaped;
use crate::report_json::{cell, find, metrics, number, rows, scenarios, variants, with_unit};
use crate::spread::{LEGEND, ramps};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;\
padding:0 1em;color:#222}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;\
border-bottom:1px solid #ddd;vertical-align:top}td:first-child,th:first-child{text-align:left}\
.wide{overflow-x:auto}pre{white-space:pre-wrap;overflow-wrap:anywhere}.facts td{text-align:left;overflow-wrap:anywhere}.verdict{font-size:1.3em;border-left:.3em solid #2563eb;\
padding-left:.8em}svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;\
fill:#222}.axis{stroke:#bbb}.bars{fill:#93c5fd;stroke:#1e3a8a}.draw{fill:#fff;fill-opacity:.6;stroke:#222;stroke-width:1.5}\
.phone{display:none}\
.range{white-space:nowrap}\
@media(max-width:600px){body{margin:1em auto;font-size:14px}td,th{padding:.2em;font-size:12px}\
td .range{display:block;font-size:.85em}td:first-child{overflow-wrap:anywhere;min-width:6em}\
h3,li,p{overflow-wrap:anywhere}.page{display:none}.phone{display:inline}}\
@media print{body{max-width:none;margin:0}h2,h3{break-after:avoid}p,svg,tr,.chart{break-inside:avoid}}";

/// A part of a report: its title, its text, and whether it has findings.
pub type ReportPart<'a> = (&'a str, &'a str, bool);

/// The bench's page.
pub fn bench(report: &Value) -> String {
    let title = "vcpufreq bench";
    let conditions = conditions(&report["conditions"]);
    let parts = [head(title), verdict(report), body(report), conditions];
    parts.concat() + "</html>\n"
}

/// A page of the bench, if there is one, and of parts. What the figures hold for comes last: the last
/// part, and the bench's conditions.
#[must_use]
pub fn report(parts: &[ReportPart<'_>], bench: Option<&Value>) -> String {
    let mut page = head("vcpufreq report");
    page.push_str(&bench.map_or_else(
        || verdict_line("Not measured", "the bench has no figures"),
        verdict,
    ));
    for (title, _, findings) in parts {
        if *findings {
            let _ = writeln!(page, "<p><b>{}</b> has findings.</p>", escaped(title));
        }
    }
    page.push_str(&bench.map(body).unwrap_or_default());
    for (title, text, _) in parts {
        let (title, text) = (escaped(title), escaped(text.trim_matches('\n')));
        let _ = writeln!(page, "<h2>{title}</h2>\n<pre>{text}</pre>");
    }
    let conditions = bench.map(|bench| conditions(&bench["conditions"]));
    page + &conditions.unwrap_or_default() + "</html>\n"
}

/// A page's start.
pub fn head(title: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style>\n<h1>{title}</h1>\n"
    )
}

/// What a page opens with: a word, and how that comes.
pub fn verdict_line(word: &str, why: &str) -> String {
    let (word, why) = (escaped(word), escaped(why));
    format!("<p class=\"verdict\"><b>{word}</b>: {why}.</p>\n")
}

/// How many bounds hold, and those that do not; what could not be measured.
fn verdict(report: &Value) -> String {
    let count = |held: bool| {
        rows(report, "bounds")
            .filter(|bound| bound["held"] == held)
            .count()
    };
    let (held, broken) = (count(true), count(false));
    let (all, failed) = (held + broken, rows(report, "failures").count());
    let mut text = match (all, broken, failed) {
        (_, 1.., _) => verdict_line("Not held", &format!("{broken} of {all} bounds do not hold")),
        (_, _, 1..) => {
            let parts = if failed == 1 { "part" } else { "parts" };
            let why =
                format!("{failed} {parts} failed; of the others, {held} of {all} bounds hold");
            verdict_line("Not complete", &why)
        }
        (0, ..) => verdict_line("No bound", "this run has no figures that one is set for"),
        _ => verdict_line("Held", &format!("{held} of {all} bounds hold")),
    };
    let broken = bounds(report, Some(false), "does not hold");
    if !broken.is_empty() {
        let _ = writeln!(text, "<ul>{broken}</ul>");
    }
    for failure in rows(report, "failures") {
        let word = |key: &str| escaped(failure[key].as_str().unwrap_or("?"));
        let _ = writeln!(
            text,
            "<p><b>Failed:</b> {} on {}: {}</p>",
            word("scenario"),
            word("variant"),
            word("error")
        );
    }
    text
}

/// Each scenario's ramps, charts and figures, then what holds.
fn body(report: &Value) -> String {
    let mut page = LEGEND.to_owned() + chart::LEGEND;
    for name in scenarios(report) {
        let _ = writeln!(page, "<h2>{}</h2>", escaped(name));
        page.push_str(&ramps(report, name));
        for title in titles(report, name) {
            let _ = writeln!(page, "<h3>{}, over time</h3>", escaped(title));
            page.push_str(&chart(report, title));
            page.push_str(&residency(report, title));
            page.push_str(&loads(report, title));
        }
        page.push_str(&figures(report, name));
    }
    let others = bounds(report, Some(true), "holds") + &bounds(report, None, "no bound");
    if !others.is_empty() {
        let _ = writeln!(page, "<h2>What holds</h2>\n<ul>{others}</ul>");
    }
    page
}

/// The bounds of which this is so, a line each.
fn bounds(report: &Value, held: Option<bool>, word: &str) -> String {
    let own = rows(report, "bounds").filter(|bound| bound["held"].as_bool() == held);
    let line = |bound: &Value| {
        let text = escaped(bound["text"].as_str().unwrap_or("?"));
        format!("<li><b>{word}</b>: {text}\n")
    };
    own.map(line).collect()
}

/// What the figures hold for, a row each.
pub fn conditions(conditions: &Value) -> String {
    let mut text = "<h2>Conditions</h2>\n<div class=\"wide\"><table class=\"facts\">\n".to_owned();
    for (name, value) in conditions.as_object().into_iter().flatten() {
        let shown = match value {
            Value::Array(clusters) if name == "clusters" => clusters
                .iter()
                .map(cluster)
                .collect::<Vec<_>>()
                .join("<br>"),
            value => plain(value),
        };
        let _ = writeln!(
            text,
            "<tr><th>{}</th><td>{shown}</td></tr>",
            escaped(&name.replace('_', " "))
        );
    }
    text + "</table></div>\n"
}

fn cluster(cluster: &Value) -> String {
    let ghz = |key: &str| cluster[key].as_f64().unwrap_or_default() / 1e6;
    format!(
        "CPUs {}: capacity {}, {:.2} to {:.2} GHz",
        plain(&cluster["cpus"]),
        plain(&cluster["capacity"]),
        ghz("min_khz"),
        ghz("max_khz")
    )
}

/// A value as a person writes it.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::String(text) => escaped(text),
        Value::Array(values) if values.is_empty() => "none".to_owned(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(", "),
        Value::Object(entries) => {
            let line =
                |(name, value): (&String, &Value)| format!("{}: {}", escaped(name), plain(value));
            let lines: Vec<_> = entries.iter().map(line).collect();
            format!(
                "<details><summary>show</summary>{}</details>",
                lines.join("<br>")
            )
        }
        Value::Number(number) => number.to_string(),
    }
}

/// A row for each frequency, with its part of the load's time; a column for the pCPU of each variant,
/// and for the requests of guests.
fn residency(report: &Value, title: &str) -> String {
    let own = rows(report, "residency").filter(|one| one["title"] == title);
    let columns: Vec<_> = own
        .flat_map(|one| {
            let variant = escaped(one["variant"].as_str().unwrap_or("?"));
            [("ran_us", "pCPU"), ("requested_us", "requests")]
                .map(|(key, of)| (format!("{variant}, {of}"), pairs(&one["times"][key])))
        })
        .filter(|(_, times)| !times.is_empty())
        .collect();
    let all = columns.iter().flat_map(|(_, times)| times);
    let khz: BTreeSet<u64> = all.map(|(khz, _)| *khz).collect();
    if khz.is_empty() {
        return String::new();
    }
    let heads: Vec<String> = columns
        .iter()
        .map(|(of, _)| format!("<th>{of}</th>"))
        .collect();
    let heads = heads.concat();
    let mut text = format!(
        "<details><summary>Time at each OPP</summary><div class=\"wide\"><table>\
         <tr><th>MHz, % of the load's time</th>{heads}</tr>\n"
    );
    for khz in khz {
        let name = match khz {
            0 => "none".to_owned(),
            khz => number(&khz.into(), "kHz"),
        };
        let cells: String = columns.iter().map(|(_, times)| share(times, khz)).collect();
        let _ = writeln!(text, "<tr><td>{name}</td>{cells}</tr>");
    }
    text + "</table></div></details>\n"
}

/// A row for each variant: what the pCPU that the load begins on was busy with, in % of the load's
/// time, and what was added to its utilization for vCPUs.
fn loads(report: &Value, title: &str) -> String {
    let own = rows(report, "residency").filter(|one| one["title"] == title);
    let lines: String = own
        .filter_map(|one| {
            let variant = escaped(one["variant"].as_str()?);
            let times = &one["times"];
            let all: u64 = pairs(&times["ran_us"]).iter().map(|(_, us)| us).sum();
            let cells = [times["own_us"].as_u64()?, times["others_us"].as_u64()?]
                .map(|us| cell_of(Some(us), all));
            let added = ["target_sum", "target"].map(|key| match times[key].as_u64() {
                Some(mean) => format!("<td>{mean}</td>"),
                None => "<td>-</td>".to_owned(),
            });
            let (cells, added) = (cells.concat(), added.concat());
            Some(format!("<tr><td>{variant}</td>{cells}{added}</tr>\n"))
        })
        .collect();
    match lines.is_empty() {
        true => lines,
        false => format!(
            "<details><summary>Load of the pCPU</summary><div class=\"wide\"><table>\
             <tr><th>% of the load's time</th><th>the load, or its vCPU</th><th>other threads</th>\
             <th>mean sum of vCPUs' targets (in 1/1024)</th><th>in force of it</th></tr>\n\
             {lines}</table></div></details>\n"
        ),
    }
}

fn share(times: &[(u64, u64)], khz: u64) -> String {
    let own = times.iter().find(|(of, _)| *of == khz);
    let all = times.iter().map(|(_, us)| us).sum();
    cell_of(own.map(|(_, us)| *us), all)
}

fn cell_of(us: Option<u64>, all_us: u64) -> String {
    let permille = us.map(|us| us * 1000 / all_us.max(1));
    let cell = permille.map_or("-".to_owned(), |share| number(&share.into(), "permille"));
    format!("<td>{cell}</td>")
}

/// kHz and µs.
fn pairs(times: &Value) -> Vec<(u64, u64)> {
    let times = times.as_array().into_iter().flatten();
    let pairs = times.filter_map(|pair| Some((pair[0].as_u64()?, pair[1].as_u64()?)));
    pairs.collect()
}

/// A row for each metric, a column for each variant.
fn figures(report: &Value, scenario: &str) -> String {
    let mut text = "<div class=\"wide\"><table><tr><th>metric, median (min–max)</th>".to_owned();
    for name in variants(report) {
        let _ = write!(text, "<th>{name}</th>");
    }
    text.push_str("</tr>\n");
    for metric in metrics(report, scenario) {
        let name = escaped(&with_unit(report, (scenario, metric)));
        let name = name.replace('.', ".<wbr>").replace('_', "_<wbr>");
        let _ = write!(text, "<tr><td>{name}</td>");
        for variant in variants(report) {
            let cell = find(report, (scenario, metric), variant).map_or("-".to_owned(), cell);
            // On a phone the range is below the median.
            let cell = cell
                .replace('(', "<span class=\"range\">(")
                .replace(')', ")</span>");
            let _ = write!(text, "<td>{cell}</td>");
        }
        text.push_str("</tr>\n");
    }
    text + "</table></div>\n"
}

#[cfg(test)]
mod tests {
    //! The page shows what the report has, begins with the verdict, and fetches nothing.

    use serde_json::json;

    use super::*;

    fn row(variant: &str, median: Option<u64>) -> Value {
        json!({ "scenario": "big-ramp", "variant": variant, "metric": "to_fmax",
            "unit": "us", "n": 1, "median": median, "min": median, "max": null })
    }

    fn bench_report(results: &[Value]) -> Value {
        json!({
            "conditions": { "host_kernel": "7<", "speed_model": true, "qemu": null, "clusters": [
                { "cpus": [0, 1], "capacity": 1024, "min_khz": 1_000_000, "max_khz": 2_000_000 }] },
            "results": results,
            "series": [{ "scenario": "big-ramp", "title": "big-ramp", "variant": "host", "lines": {
                "placement": [[0, 0]], "frequency": [[0, 1_000_000], [1000, 2_000_000]],
                "requests": [[500, 2_000_000]], "end_us": 2000 } }],
            "residency": [{ "title": "big-ramp", "variant": "host", "times": {
                "ran_us": [[1_000_000, 250], [2_000_000, 750]],
                "requested_us": [[0, 10], [2_000_000, 30]],
                "own_us": 620, "others_us": 300, "target_sum": 1300, "target": 1024 } }],
            "failures": [{ "scenario": "x", "variant": "vm", "error": "why" }],
        })
    }

    #[test]
    fn a_page_has_a_chart_and_needs_no_network() {
        let page = bench(&bench_report(&[row("host", Some(1000))]));
        for part in [
            "<svg",
            "M78.0 135.7",
            "H476.0V21.4",
            "<circle",
            "to_<wbr>fmax [ms]",
            "never",
            "7&lt;",
            "why",
            "<th>speed model</th><td>yes</td>",
            "<th>qemu</th><td>none</td>",
            // The stroke is with its name.
            ">host</text>\n<line x1=\"26.0\" y1=\"299.0\" x2=\"72.0\"",
            "vm is a guest without the bridge",
            "CPUs 0, 1: capacity 1024, 1.00 to 2.00 GHz",
            "<b>Not complete</b>: 1 part failed",
            "<h3>to_fmax</h3>",
            "<th>host, pCPU</th><th>host, requests</th>",
            "<tr><td>none</td><td>-</td><td>25.0</td></tr>",
            "<tr><td>2000</td><td>75.0</td><td>75.0</td></tr>",
            "<tr><td>host</td><td>62.0</td><td>30.0</td><td>1300</td><td>1024</td></tr>",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("http") && !page.contains("[{"), "{page}");
        let order = [
            "class=\"verdict\"",
            "<h2>big-ramp</h2>",
            "<h2>Conditions</h2>",
        ];
        let at = order.map(|part| page.find(part).expect(part));
        assert!(at.is_sorted(), "{at:?}");
    }

    #[test]
    fn a_report_has_its_parts_and_the_bench_and_needs_no_network() {
        let bench = bench_report(&[row("host", Some(1000))]);
        let parts = [("demo", "a < b", true), ("host", "c", false)];
        let page = report(&parts, Some(&bench));
        let demo = "<h2>demo</h2>\n<pre>a &lt; b</pre>";
        let found = "<b>demo</b> has findings";
        for part in [demo, found, "<svg", "</html>"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("http"), "{page}");
        assert!(!page.contains("<b>host</b> has"), "{page}");
        let order = [
            "class=\"verdict\"",
            "<svg",
            "<h2>demo",
            "<h2>host",
            "<h2>Conditions",
        ];
        let at = order.map(|part| page.find(part).expect(part));
        assert!(at.is_sorted(), "{at:?}");
        let none = report(&parts, None);
        assert!(none.contains("<b>Not measured</b>"), "{none}");
    }

    #[test]
    fn the_verdict_counts_the_parts_that_failed() {
        let mut report = bench_report(&[row("host", Some(1))]);
        let failure = report["failures"][0].clone();
        report["failures"] = json!([failure, failure]);
        let page = bench(&report);
        assert!(
            page.contains("<b>Not complete</b>: 2 parts failed"),
            "{page}"
        );
    }

    #[test]
    fn the_verdict_counts_the_bounds() {
        for (held, wanted) in [
            (
                &[Some(true), None, Some(true)][..],
                "<b>Held</b>: 2 of 2 bounds hold.",
            ),
            (
                &[Some(true), Some(false)],
                "<b>Not held</b>: 1 of 2 bounds do not hold.",
            ),
            (&[None], "<b>No bound</b>: "),
        ] {
            let mut report = bench_report(&[row("host", Some(1))]);
            let bound = |held: &Option<bool>| json!({ "text": "a < b", "held": held });
            report["bounds"] = held.iter().map(bound).collect();
            report["failures"] = json!([]);
            let page = bench(&report);
            let at = page.find(wanted);
            assert!(
                at.is_some_and(|at| at < page.find("<ul>").expect("a list")),
                "{wanted}: {page}"
            );
            let line = "<li><b>does not hold</b>: a &lt; b";
            assert_eq!(page.contains(line), held.contains(&Some(false)), "{page}");
        }
    }
}
