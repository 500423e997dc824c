// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The charts of the report's page: frequency, requests and placement over
//! time as SVG, which is written by hand. From the report's JSON.

use std::fmt::Write as _;

use serde_json::Value;

/// A variant's name, colour, and dashes.
pub const LINES: [(&str, &str, &str); 5] = [
    ("host", "#444444", "none"),
    ("vm", "#d97706", "7 4"),
    ("vm+bridge", "#2563eb", "none"),
    ("max", "#15803d", "none"),
    ("scx", "#9333ea", "none"),
];

/// In the SVG's own units.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 930.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 270.0;
const BAND: f64 = 18.0;
/// Of `pCPU 0` and the space beside it.
const NAME_WIDTH: f64 = 48.0;

/// Where times and frequencies lie on the chart.
struct Scale {
    from_us: f64,
    to_us: f64,
    top_khz: f64,
}

impl Scale {
    fn x(&self, us: f64) -> f64 {
        LEFT + (us - self.from_us) / (self.to_us - self.from_us) * (RIGHT - LEFT)
    }

    fn y(&self, khz: f64) -> f64 {
        BOTTOM - khz / self.top_khz * (BOTTOM - TOP)
    }
}

/// `[[us, value], ...]`.
fn points(value: &Value) -> Vec<(f64, f64)> {
    let pairs = value.as_array().into_iter().flatten();
    pairs
        .filter_map(|pair| Some((pair[0].as_f64()?, pair[1].as_f64()?)))
        .collect()
}

/// The cases of a scenario that there are lines of.
pub fn titles<'a>(report: &'a Value, scenario: &str) -> Vec<&'a str> {
    let mut titles: Vec<&str> = Vec::new();
    let series = report["series"].as_array().into_iter().flatten();
    for one in series.filter(|one| one["scenario"] == scenario) {
        let title = one["title"].as_str().unwrap_or_default();
        if !titles.contains(&title) {
            titles.push(title);
        }
    }
    titles
}

/// The chart of one case: a line for each variant, below it where the load ran.
pub fn chart(report: &Value, title: &str) -> String {
    let series = report["series"].as_array().into_iter().flatten();
    let lines: Vec<&Value> = series.filter(|one| one["title"] == title).collect();
    let clusters = report["conditions"]["clusters"].as_array();
    let tops = clusters
        .into_iter()
        .flatten()
        .filter_map(|cluster| cluster["max_khz"].as_f64());
    let ends = lines
        .iter()
        .filter_map(|one| one["lines"]["end_us"].as_f64());
    let starts = lines
        .iter()
        .flat_map(|one| points(&one["lines"]["frequency"]));
    let scale = Scale {
        from_us: starts.map(|(us, _)| us).fold(0.0, f64::min),
        to_us: ends.fold(1000.0, f64::max),
        top_khz: tops.fold(1.0, f64::max) * 1.05,
    };
    let height = BOTTOM + 40.0 + BAND * 4.0 + 20.0;
    let mut svg = format!(
        "<svg viewBox=\"0 0 960 {height}\" role=\"img\" aria-label=\"frequency over time, {}\">\n",
        escaped(title)
    );
    svg.push_str(&axes(&scale));
    for (row, (name, colour, dashes)) in LINES.iter().enumerate() {
        let Some(one) = lines.iter().find(|one| one["variant"] == *name) else {
            continue;
        };
        svg.push_str(&variant(&scale, &one["lines"], (colour, dashes)));
        let y = BOTTOM + 40.0 + BAND * f64::from(u8::try_from(row).unwrap_or(0));
        svg.push_str(&band(report, &scale, &one["lines"], (name, colour, y)));
    }
    svg + "</svg>\n"
}

fn axes(scale: &Scale) -> String {
    let mut svg = String::new();
    let line = |svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)| {
        let _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
        );
    };
    let mut khz = 0.0;
    while khz <= scale.top_khz {
        let y = scale.y(khz);
        line(&mut svg, (LEFT, y), (RIGHT, y));
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{:.1} GHz</text>",
            LEFT - 6.0,
            y + 4.0,
            khz / 1e6
        );
        khz += 500_000.0;
    }
    let step = [
        20_000.0,
        50_000.0,
        100_000.0,
        200_000.0,
        500_000.0,
        1_000_000.0,
    ];
    let span = scale.to_us - scale.from_us;
    let step = step
        .into_iter()
        .find(|step| span / step <= 10.0)
        .unwrap_or(2_000_000.0);
    let mut us = 0.0;
    while us <= scale.to_us {
        let x = scale.x(us);
        line(&mut svg, (x, TOP), (x, BOTTOM));
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{:.0} ms</text>",
            BOTTOM + 16.0,
            us / 1000.0
        );
        us += step;
    }
    svg
}

/// The frequency as steps, and the guest's requests as dots.
fn variant(scale: &Scale, lines: &Value, (colour, dashes): (&str, &str)) -> String {
    let mut path = String::new();
    for (us, khz) in points(&lines["frequency"]) {
        let (x, y) = (scale.x(us), scale.y(khz));
        let _ = if path.is_empty() {
            write!(path, "M{x:.1} {y:.1}")
        } else {
            write!(path, "H{x:.1}V{y:.1}")
        };
    }
    let _ = write!(
        path,
        "H{:.1}",
        scale.x(lines["end_us"].as_f64().unwrap_or(0.0))
    );
    let mut svg = format!(
        "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>\n"
    );
    for (us, khz) in points(&lines["requests"]) {
        let _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"none\" stroke=\"{colour}\"><title>asks for {khz:.0} kHz</title></circle>",
            scale.x(us),
            scale.y(khz)
        );
    }
    svg
}

/// Which pCPUs the load was on: the darker, the more capable.
fn band(
    report: &Value,
    scale: &Scale,
    lines: &Value,
    (name, colour, y): (&str, &str, f64),
) -> String {
    let mut svg = format!(
        "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
        LEFT - 6.0,
        y + 12.0,
        escaped(name)
    );
    let placement = points(&lines["placement"]);
    let end = lines["end_us"].as_f64().unwrap_or(0.0);
    for (at, (us, cpu)) in placement.iter().enumerate() {
        let until = placement.get(at + 1).map_or(end, |(us, _)| *us);
        let (x, to) = (scale.x(us.max(scale.from_us)), scale.x(until));
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.0}\" fill=\"{colour}\" opacity=\"{:.2}\"><title>pCPU {cpu}</title></rect>",
            (to - x).max(0.0),
            BAND - 4.0,
            capacity(report, *cpu) / 1024.0 * 0.6 + 0.05,
        );
        // The bar's title names the pCPU where the text would be cut off.
        if to - x >= NAME_WIDTH {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\">pCPU {cpu}</text>",
                x + 4.0,
                y + 11.0
            );
        }
    }
    svg
}

/// Text for HTML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn capacity(report: &Value, cpu: f64) -> f64 {
    let clusters = report["conditions"]["clusters"]
        .as_array()
        .into_iter()
        .flatten();
    let mut own = clusters.filter(|cluster| {
        let cpus = cluster["cpus"].as_array().into_iter().flatten();
        cpus.filter_map(Value::as_f64)
            .any(|one| (one - cpu).abs() < 0.5)
    });
    own.next()
        .and_then(|cluster| cluster["capacity"].as_f64())
        .unwrap_or(1024.0)
}
