// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page of `vcpufreq rt report` and `rt compare`: the verdict, the histograms of wake-up latencies,
//! those of one test's runs above one another on one scale, and the conditions. From the reports' JSON.

use std::cmp::Reverse;
use std::fmt::Write as _;

use serde_json::Value;

use crate::page::{conditions, head, verdict_line};
use crate::picture::{Anchor, Drawing, MARGIN, Scale, Spread, escaped, pictures};

/// In the SVG's own units: of a row's bars, of the text above them, and of the marks below.
const BARS: f64 = 96.0;
const TEXT: f64 = 22.0;
const FOOT: f64 = 32.0;
/// The height of a spread above the bars' base line.
const ABOVE: f64 = 12.0;
/// The scale of latencies ends here at least, µs.
const TOP_US_MIN: u64 = 10;
/// Single latencies of a run, the longest of those in the report.
const SPIKES: usize = 20;

/// A page of these reports, each with its name.
#[must_use]
pub fn latency_page(reports: &[(String, Value)]) -> String {
    let mut page = head("vcpufreq rt report");
    for (name, report) in reports {
        let (word, why) = verdict(report);
        page.push_str(&verdict_line(&format!("{word}, {name}"), &why));
    }
    page.push_str(LEGEND);
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
        let _ = writeln!(page, "<h2>{}</h2>", escaped(name));
        for run in &own {
            page.push_str(&histograms(run, &own));
        }
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

/// A word, and how many of the longest latencies, one of each CPU in each run, are within the budget.
fn verdict(report: &Value) -> (&'static str, String) {
    let runs = report["runs"].as_array().into_iter().flatten();
    let all = runs.flat_map(|run| run["latencies"].as_array().into_iter().flatten());
    let longest: Vec<u64> = all.filter_map(|one| one["max_us"].as_u64()).collect();
    let why = || report["why"].as_str().unwrap_or("?").to_owned();
    let Some(budget) = report["budget_us"].as_u64() else {
        return ("No bound", "no budget was given".to_owned());
    };
    let within = longest.iter().filter(|us| **us <= budget).count();
    let counted = format!(
        "{within} of {} longest latencies are within the budget of {budget} µs",
        longest.len()
    );
    match report["verdict"].as_str() {
        Some("kept") => ("Held", counted),
        Some("exceeded") => ("Not held", counted),
        _ => ("No verdict", why()),
    }
}

/// How a picture is read.
const LEGEND: &str = "<p>In a picture each bar is the number of wake-ups with that latency, on a \
    logarithmic scale. The line above reaches from the shortest to the longest, and its bar is the \
    median.</p>\n";
/// The counts that have a line and a label, as far as there are so many.
const COUNTS: [(u64, &str); 2] = [(1_000, "1,000"), (1_000_000, "1,000,000")];

/// Where latencies and counts lie: the counts' scale is logarithmic.
struct HistogramScale {
    us: Scale,
    top_log: f64,
}

impl HistogramScale {
    fn new(runs: &[&LatencyRun], width: f64) -> Self {
        let all = runs.iter().flat_map(|run| run.latencies).flat_map(bins);
        let (us, count) = all.fold((TOP_US_MIN, 10), |(us, count), (own_us, own)| {
            (us.max(own_us.saturating_add(1)), count.max(own))
        });
        Self {
            us: Scale {
                values: (0.0, float(us)),
                ends: (MARGIN, width - MARGIN),
            },
            top_log: float(count).log10(),
        }
    }

    /// Above the base line of a histogram; a single one shows too.
    fn height(&self, count: u64) -> f64 {
        (float(count).max(1.0).log10() + 0.3) / (self.top_log + 0.3) * (BARS - 2.0 * ABOVE)
    }
}

/// What is beyond 32 bits is off each scale.
fn float(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

/// A row for each CPU of a run, on the scale of all `runs`.
fn histograms(run: &LatencyRun, runs: &[&LatencyRun]) -> String {
    let name = escaped(&run.name);
    let label = format!("latencies, {}, {}", run.test, run.name);
    format!("<h3>{name}</h3>\n")
        + &pictures(&label, |picture| {
            let scale = HistogramScale::new(runs, picture.width);
            run.latencies.iter().fold(0.0, |top, latencies| {
                histogram(picture, &scale, (run, latencies), top);
                top + TEXT + BARS + FOOT
            })
        })
}

/// The bars of one CPU, and its spread: what is off the scale is at the right edge.
fn histogram(
    picture: &mut Drawing,
    scale: &HistogramScale,
    (run, latencies): (&LatencyRun, &Value),
    top: f64,
) {
    let number = |key: &str| latencies[key].as_u64();
    let (max, median) = (number("max_us").unwrap_or(0), median(latencies));
    let mark = if run.emulated { " (emulated)" } else { "" };
    let median_text = median.map_or("-".to_owned(), |us| us.to_string());
    let text = format!(
        "CPU {}{mark}: median {median_text}, longest {max} µs",
        latencies["cpu"]
    );
    picture.text((MARGIN, top + TEXT - 8.0), Anchor::Start, &text);
    let base = top + TEXT + BARS;
    scale.us.marks(picture, (base, base + 4.0), ("µs", 1.0));
    let right = scale.us.ends.1;
    for (count, label) in COUNTS {
        let y = base - scale.height(count);
        if y >= top + TEXT + 2.0 * ABOVE {
            picture.line((MARGIN, y), (right, y), "class=\"axis\"");
            picture.text((right, y + 12.0), Anchor::End, label);
        }
    }
    let mut path = String::new();
    for (us, count) in bins(latencies) {
        let [x, to] = [us, us.saturating_add(1)].map(|us| scale.us.x(float(us)));
        let _ = write!(
            path,
            "M{x:.1} {base:.1}V{:.1}H{to:.1}V{base:.1}",
            base - scale.height(count)
        );
    }
    picture.add(&format!("<path d=\"{path}\" class=\"bars\"/>"));
    picture.line((MARGIN, base), (right, base), "class=\"axis\"");
    let spread = Spread {
        least: number("min_us").map_or(0.0, float),
        median: median.map_or(0.0, float),
        most: float(max),
    };
    picture.spread(scale.us, spread, top + TEXT + ABOVE);
}

/// The latency that half of the wake-ups have at most, of those in the histogram.
fn median(latencies: &Value) -> Option<u64> {
    let bins = bins(latencies);
    let all: u64 = bins.iter().map(|(_, count)| count).sum();
    let mut seen = 0;
    let mut below = bins.into_iter().skip_while(|(_, count)| {
        seen += count;
        seen * 2 < all
    });
    below.next().map(|(us, _)| us)
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
    //! The page opens with the verdict. It has a histogram of each run, those of one test above one
    //! another on one scale, and fetches nothing.

    use serde_json::json;

    use super::*;

    fn report(load: &str, max: u64) -> Value {
        json!({
            "conditions": { "kernel": "7<", "emulated": null, "published": [] },
            "budget_us": 100, "verdict": if max > 100 { "exceeded" } else { "kept" },
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
            "<b>Held, a&lt;b</b>: 1 of 1 longest latencies are within the budget of 100 µs.",
            "<b>Not held, c</b>: 0 of 1 ",
            "<h3>a&lt;b, run 1</h3>",
            "<h3>c, run 1</h3>",
            ">CPU 3: median 1, longest 19 µs</text>",
            ">CPU 3: median 1, longest 400 µs</text>",
            // Off the scale.
            "<line x1=\"874.0\" y1=\"30.0\"",
            "<td>a&lt;b, run 1, CPU 3</td><td>1001</td><td>1</td><td>2</td><td>-</td><td>19</td>",
            "7&lt;",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        // From 1 µs on a scale of 20, for a page, of both.
        assert_eq!(page.matches("M68.4 118.0V46.0H110.8V118.0").count(), 2);
        // For a page and for a phone, of both; not 1,000,000.
        assert_eq!(page.matches(">1,000</text>").count(), 4, "{page}");
        assert!(!page.contains(">1,000,000</text>"), "{page}");
        assert_eq!(page.matches("<svg").count(), 4);
        assert!(!page.contains("http"), "{page}");
        assert!(page.find("class=\"verdict\"") < page.find("<svg"), "{page}");
        let other = latency_page(&[
            named("a", report("idle", 19)),
            named("b", report("net", 19)),
        ]);
        assert_eq!(other.matches("<svg").count(), 4);
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
        assert!(!none.contains("above 99"), "{none}");
    }
}
