// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page of `vcpufreq rt report` and `rt compare`: the histograms of wake-up latencies as SVG,
//! those of one test above one another on one scale. From the reports' JSON.

use std::cmp::Reverse;
use std::fmt::Write as _;

use serde_json::Value;

use crate::chart::{LINES, escaped};
use crate::page::{conditions, head};

/// In the SVG's own units.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 930.0;
const TOP: f64 = 24.0;
/// Of a histogram, and of the space below it.
const HEIGHT: f64 = 110.0;
const SPACE: f64 = 36.0;
/// The scale of latencies ends here at least, µs.
const TOP_US_MIN: u64 = 10;
/// Single latencies of a run, the longest of those in the report.
const SPIKES: usize = 20;
/// Between two marks of the scale, µs.
const STEPS: [u64; 12] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000];

/// A page of these reports, each with its name.
#[must_use]
pub fn latency_page(reports: &[(String, Value)]) -> String {
    let mut page = head("vcpufreq rt report");
    let runs = runs(reports);
    let mut names: Vec<&str> = Vec::new();
    for run in &runs {
        if !names.contains(&run.test.as_str()) {
            names.push(&run.test);
        }
    }
    if names.is_empty() {
        page.push_str("<p>No test is complete yet.</p>\n");
    }
    for name in names {
        let own: Vec<&LatencyRun> = runs.iter().filter(|run| run.test == name).collect();
        let _ = writeln!(
            page,
            "<h2>{}</h2>\n<div class=\"chart\">{}</div>",
            escaped(name),
            histograms(&own)
        );
        page.push_str(&figures(&own));
        for run in own {
            page.push_str(&spikes(run));
        }
    }
    for (name, report) in reports {
        let _ = writeln!(page, "<h2>{}</h2>", escaped(name));
        page.push_str(&conditions(&report["conditions"]));
    }
    page + "</html>\n"
}

/// One run of a test.
struct LatencyRun<'a> {
    /// Place and load.
    test: String,
    /// Its report, and which of the test's runs in it.
    name: String,
    emulated: bool,
    latencies: &'a [Value],
    /// Null without a bound.
    spikes: &'a Value,
}

fn runs(reports: &[(String, Value)]) -> Vec<LatencyRun<'_>> {
    let mut found: Vec<LatencyRun> = Vec::new();
    for (name, report) in reports {
        for run in report["runs"].as_array().into_iter().flatten() {
            let word = |key: &str| run[key].as_str().unwrap_or("?");
            let test = format!("{}, {}", word("place"), word("load"));
            let latencies = run["latencies"].as_array();
            let Some(latencies) = latencies.filter(|all| !all.is_empty()) else {
                continue;
            };
            let prefix = format!("{name}, run ");
            let of = |one: &&LatencyRun| one.test == test && one.name.starts_with(&prefix);
            let number = found.iter().filter(of).count() + 1;
            found.push(LatencyRun {
                test,
                name: format!("{prefix}{number}"),
                emulated: !report["conditions"]["emulated"].is_null(),
                latencies,
                spikes: &run["spikes"],
            });
        }
    }
    found
}

/// µs and counts.
fn bins(latencies: &Value) -> Vec<(u64, u64)> {
    let bins = latencies["histogram"].as_object().into_iter().flatten();
    let mut bins: Vec<(u64, u64)> = bins
        .filter_map(|(us, count)| Some((us.parse().ok()?, count.as_u64()?)))
        .collect();
    bins.sort_unstable();
    bins
}

/// Where latencies and counts lie: the counts' scale is logarithmic.
struct HistogramScale {
    top_us: f64,
    top_log: f64,
}

impl HistogramScale {
    fn of(runs: &[&LatencyRun]) -> Self {
        let all = runs.iter().flat_map(|run| run.latencies).flat_map(bins);
        let (us, count) = all.fold((TOP_US_MIN, 10), |(us, count), (own_us, own)| {
            (us.max(own_us.saturating_add(1)), count.max(own))
        });
        Self {
            top_us: float(us),
            top_log: float(count).log10(),
        }
    }

    fn x(&self, us: u64) -> f64 {
        LEFT + float(us) / self.top_us * (RIGHT - LEFT)
    }

    /// Above the base line of a histogram; a single one shows too.
    fn height(&self, count: u64) -> f64 {
        (float(count).max(1.0).log10() + 0.3) / (self.top_log + 0.3) * HEIGHT
    }
}

/// What is beyond 32 bits is off each scale.
fn float(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

fn histograms(runs: &[&LatencyRun]) -> String {
    let scale = HistogramScale::of(runs);
    let rows = u64::try_from(runs.len()).map_or(0.0, float);
    let height = TOP + rows * (HEIGHT + SPACE) + 20.0;
    let mut svg = format!(
        "<svg viewBox=\"0 0 960 {height:.0}\" role=\"img\" aria-label=\"latencies, {}\">\n",
        escaped(runs.first().map_or("", |run| &run.test))
    );
    let mut base = TOP;
    for run in runs {
        base += HEIGHT;
        svg.push_str(&axis(&scale, base));
        let mark = if run.emulated { " (emulated)" } else { "" };
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT:.0}\" y=\"{:.0}\">{}{mark}</text>",
            base - HEIGHT - 6.0,
            escaped(&run.name)
        );
        for (latencies, (_, colour, _)) in run.latencies.iter().zip(LINES.iter().cycle()) {
            svg.push_str(&histogram(&scale, base, latencies, colour));
        }
        base += SPACE;
    }
    svg + "</svg>\n"
}

/// The base line with its marks.
fn axis(scale: &HistogramScale, base: f64) -> String {
    let mut svg = format!(
        "<line class=\"axis\" x1=\"{LEFT:.0}\" y1=\"{base:.0}\" x2=\"{RIGHT:.0}\" y2=\"{base:.0}\"/>\n"
    );
    let step = STEPS
        .into_iter()
        .find(|step| scale.top_us / float(*step) <= 12.0);
    let step = step.unwrap_or(100_000);
    let mut us = 0;
    while float(us) <= scale.top_us {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{us} µs</text>",
            scale.x(us),
            base + 14.0
        );
        us += step;
    }
    svg
}

/// The bars of one CPU, and its longest latency: off the scale it is at the right edge.
fn histogram(scale: &HistogramScale, base: f64, latencies: &Value, colour: &str) -> String {
    let mut path = String::new();
    for (us, count) in bins(latencies) {
        let (x, to) = (scale.x(us), scale.x(us.saturating_add(1)));
        let _ = write!(
            path,
            "M{x:.1} {base:.1}V{:.1}H{to:.1}V{base:.1}",
            base - scale.height(count)
        );
    }
    let (cpu, max) = (&latencies["cpu"], latencies["max_us"].as_u64().unwrap_or(0));
    let x = scale.x(max).min(RIGHT);
    format!(
        "<path d=\"{path}\" fill=\"{colour}\" fill-opacity=\"0.35\" stroke=\"{colour}\"><title>CPU {cpu}</title></path>\n\
         <line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{base:.1}\" stroke=\"{colour}\" stroke-dasharray=\"2 2\"><title>CPU {cpu}: at most {max} µs</title></line>\n",
        base - HEIGHT
    )
}

/// A row for each run and CPU.
fn figures(runs: &[&LatencyRun]) -> String {
    let mut text = "<div class=\"wide\"><table><tr><th>run, CPU</th><th>wake-ups</th>\
                    <th>shortest, µs</th><th>mean</th><th>99.99 %</th><th>longest</th></tr>\n"
        .to_owned();
    for run in runs {
        let mark = if run.emulated { " (emulated)" } else { "" };
        for one in run.latencies {
            let number = |key: &str| {
                one[key]
                    .as_u64()
                    .map_or("-".to_owned(), |us| us.to_string())
            };
            let cells = ["samples", "min_us", "avg_us", "p9999_us", "max_us"].map(number);
            let _ = writeln!(
                text,
                "<tr><td>{}{mark}, CPU {}</td><td>{}</td></tr>",
                escaped(&run.name),
                number("cpu"),
                cells.join("</td><td>")
            );
        }
    }
    text + "</table></div>\n"
}

/// The single latencies of a run above a bound, as far as they are there.
fn spikes(run: &LatencyRun) -> String {
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    if run.spikes.is_null() {
        return String::new();
    }
    let mark = if run.emulated { " (emulated)" } else { "" };
    let mut text = format!(
        "<p>{}{mark}: {} above {} µs",
        escaped(&run.name),
        number(&run.spikes["count"]),
        number(&run.spikes["above_us"])
    );
    let mut longest: Vec<&Value> = run.spikes["recorded"]
        .as_array()
        .into_iter()
        .flatten()
        .collect();
    if longest.is_empty() {
        return text + "</p>\n";
    }
    longest.sort_by_key(|one| Reverse(number(&one["latency_us"])));
    longest.truncate(SPIKES);
    text.push_str(
        ", the longest:</p>\n<div class=\"wide\"><table><tr><th>at, s</th><th>CPU</th>\
         <th>latency, µs</th></tr>\n",
    );
    for one in longest {
        let at_us = number(&one["at_us"]);
        let _ = writeln!(
            text,
            "<tr><td>{}.{:06}</td><td>{}</td><td>{}</td></tr>",
            at_us / 1_000_000,
            at_us % 1_000_000,
            number(&one["cpu"]),
            number(&one["latency_us"])
        );
    }
    text + "</table></div>\n"
}

#[cfg(test)]
mod tests {
    //! The page has a histogram of each run, those of one test above one another on one scale, and
    //! fetches nothing.

    use serde_json::json;

    use super::*;

    fn report(load: &str, max: u64) -> Value {
        json!({
            "conditions": { "kernel": "7<", "emulated": null, "published": [] },
            "runs": [{ "place": "host", "load": load, "latencies": [
                { "cpu": 3, "samples": 1001, "min_us": 1, "avg_us": 2, "p9999_us": null, "max_us": max,
                  "histogram": { "1": 1000, "19": 1 } }] }],
        })
    }

    #[test]
    fn runs_of_a_test_are_above_one_another() {
        let named = |name: &str, report| (name.to_owned(), report);
        let page = latency_page(&[
            named("a<b", report("idle", 19)),
            named("c", report("idle", 400)),
        ]);
        for part in [
            "<h2>host, idle</h2>",
            "a&lt;b, run 1</text>",
            "c, run 1</text>",
            // From 1 µs on a scale of 20; the second one 146 below the first.
            "M126.3 134.0V24.0H168.6V134.0",
            "M126.3 280.0V170.0H168.6V280.0",
            "CPU 3: at most 19 µs",
            // Off the scale.
            "<line x1=\"930.0\"",
            "<td>a&lt;b, run 1, CPU 3</td><td>1001</td><td>1</td><td>2</td><td>-</td><td>19</td>",
            "7&lt;",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert_eq!(page.matches("<svg").count(), 1);
        assert!(!page.contains("http"), "{page}");
        let other = latency_page(&[
            named("a", report("idle", 19)),
            named("b", report("net", 19)),
        ]);
        assert_eq!(other.matches("<svg").count(), 2);
        let none = latency_page(&[named("a", json!({ "conditions": {}, "runs": [] }))]);
        assert!(none.contains("No test is complete yet"), "{none}");
    }

    #[test]
    fn single_latencies_are_below_their_run() {
        let mut long = report("idle", 19);
        let spike = |us: u64| json!({ "at_us": us * 1_000_001, "cpu": 3, "latency_us": us });
        let recorded: Vec<Value> = (100..130).map(spike).collect();
        long["runs"][0]["spikes"] = json!({ "above_us": 99, "count": 40, "recorded": recorded });
        let page = latency_page(&[("a<b".to_owned(), long)]);
        let first = "<p>a&lt;b, run 1: 40 above 99 µs, the longest:</p>";
        assert!(page.contains(first), "{page}");
        let longest = "<tr><td>129.000129</td><td>3</td><td>129</td></tr>";
        assert!(page.contains(longest), "{page}");
        assert!(
            page.contains("<td>110</td>") && !page.contains("<td>109</td>"),
            "{page}"
        );
        let none = latency_page(&[("a".to_owned(), report("idle", 19))]);
        assert!(!none.contains("<p>"), "{none}");
    }
}
