// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A report as one page that needs nothing else: each test's histogram as a picture, the figures
//! below it. Counts are on a logarithmic scale: one late wake-up of a million has to be seen.

use std::fmt::Write as _;

use super::{
    cyclictest::Latencies,
    report::{Report, Run, Worst},
};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;\
padding:0 1em;color:#222}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;\
border-bottom:1px solid #ddd}code{font-size:13px}svg{width:100%;height:auto}\
svg text{font:12px system-ui,sans-serif;fill:#444}.axis{stroke:#bbb}.budget{stroke:#b91c1c;\
stroke-dasharray:6 4}";
/// One for each CPU, in turn.
const COLOURS: [&str; 4] = ["#2563eb", "#d97706", "#059669", "#7c3aed"];
/// In the picture's own units.
const LEFT: u64 = 60;
const WIDTH: u64 = 880;
const TOP: u64 = 10;
const HEIGHT: u64 = 220;
/// A budget beyond this isn't drawn; no histogram has as many bins.
const WIDEST_US: u64 = 1_000_000;

/// The whole page.
#[must_use]
pub fn page(report: &Report) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <title>vcpufreq rt report</title><style>{STYLE}</style>\n<h1>Wake-up latency{}</h1>\n",
        report.mark()
    );
    let _ = writeln!(
        page,
        "<p><b>{}</b></p>\n<p>{}</p>",
        escaped(&report.verdict_line()),
        conditions(report)
    );
    for run in &report.runs {
        let (place, load) = (run.place.name(), run.load.name());
        let _ = writeln!(page, "<h2>{place}, {load}</h2>");
        page += &picture(run, report.budget_us);
        page += &figures(run, report.mark());
        let _ = writeln!(page, "<p><code>{}</code></p>", escaped(&run.command));
        let worst = run.worst.iter().map(Worst::line);
        for line in worst.chain(run.remarks()) {
            let _ = writeln!(page, "<p>{}</p>", escaped(&line));
        }
    }
    page + "</html>\n"
}

fn conditions(report: &Report) -> String {
    let conditions = &report.conditions;
    let mut words = vec![
        format!("kernel {}", conditions.machine.kernel),
        conditions.machine.board.clone(),
        format!(
            "CPUs {} measured, {} loaded",
            conditions.cpus, conditions.others
        ),
        format!("stress-ng at {} %", conditions.load_percent),
        format!(
            "hackbench of {} × 2 × {} threads",
            conditions.hackbench.groups, conditions.hackbench.fds
        ),
        match &conditions.profile {
            Some(profile) => format!("profile {profile} applied"),
            None => "nothing applied".to_owned(),
        },
        format!("governor {}", conditions.governors.join(", ")),
        format!("command line: {}", conditions.machine.cmdline),
    ];
    if conditions.traced {
        words.push("traced, which lengthens latencies".to_owned());
    }
    words.extend(conditions.machine.emulated.clone());
    escaped(&words.join(" · "))
}

fn figures(run: &Run, mark: &str) -> String {
    let mut text = "<table><tr><th>CPU</th><th>samples</th><th>min µs</th><th>avg µs</th>\
                    <th>p99.99 µs</th><th>max µs</th></tr>\n"
        .to_owned();
    for one in &run.latencies {
        let p9999 = one
            .p9999_us
            .map_or("beyond".to_owned(), |us| us.to_string());
        let _ = writeln!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}{mark}</td><td>{}{mark}</td><td>{p9999}{mark}</td>\
             <td>{}{mark}</td></tr>",
            one.cpu, one.samples, one.min_us, one.avg_us, one.max_us
        );
    }
    text + "</table>\n"
}

/// A bar for each bin that has samples; those beyond the last bin are in the table's max.
fn picture(run: &Run, budget_us: Option<u64>) -> String {
    let bins = run.latencies.iter().flat_map(|one| one.histogram.keys());
    let budget_us = budget_us.filter(|budget| *budget <= WIDEST_US);
    let longest = bins.copied().chain(budget_us).max().unwrap_or(0);
    let longest = longest.min(WIDEST_US);
    // Room for the last bar, and for round labels.
    let span = (longest + 1).next_multiple_of(10);
    let counts = run.latencies.iter().flat_map(|one| one.histogram.values());
    let decades = u64::from(counts.copied().max().unwrap_or(1).ilog10()) + 1;
    let x = |us: u64| LEFT + WIDTH * us / span;
    let bottom = TOP + HEIGHT;
    let label = format!(
        "histogram of latencies, {}, {}",
        run.place.name(),
        run.load.name()
    );
    let mut svg = format!(
        "<svg viewBox=\"0 0 960 {}\" role=\"img\" aria-label=\"{label}\">\n",
        bottom + 40
    );
    for decade in 0..=decades {
        let y = bottom - HEIGHT * decade / decades;
        let _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\">10^{decade}</text>",
            LEFT + WIDTH,
            LEFT - 6,
            y + 4
        );
    }
    for tenth in 0..=10 {
        let us = span * tenth / 10;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{us}</text>",
            x(us),
            bottom + 18
        );
    }
    for (row, one) in run.latencies.iter().enumerate() {
        let colour = COLOURS[row % COLOURS.len()];
        svg += &bars(one, colour, &|us| (x(us), x(us + 1)), decades);
    }
    if let Some(budget) = budget_us {
        let at = x(budget);
        let _ = writeln!(
            svg,
            "<line class=\"budget\" x1=\"{at}\" x2=\"{at}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">µs</text>\n</svg>",
        LEFT + WIDTH / 2,
        bottom + 36
    );
    svg
}

fn bars(one: &Latencies, colour: &str, range: &dyn Fn(u64) -> (u64, u64), decades: u64) -> String {
    let mut svg = String::new();
    for (us, count) in &one.histogram {
        let (from, to) = range(*us);
        // A single sample is a tenth of a decade high, or it couldn't be seen.
        let share = (*count as f64).log10().max(0.1) / decades as f64;
        let height = HEIGHT as f64 * share;
        let _ = writeln!(
            svg,
            "<rect x=\"{from}\" y=\"{:.1}\" width=\"{}\" height=\"{height:.1}\" fill=\"{colour}\" \
             fill-opacity=\"0.6\"><title>CPU {}: {us} µs, {count}</title></rect>",
            (TOP + HEIGHT) as f64 - height,
            (to - from).max(2),
            one.cpu
        );
    }
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
