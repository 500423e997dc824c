// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The charts of the bench's page: frequency, requests and placement over time. From the report's
//! JSON.

use std::fmt::Write as _;

use serde_json::Value;

use crate::picture::{Anchor, Drawing, LETTER, MARGIN, Scale, Stroke, pictures};

/// A variant's name and its stroke, which differs from the others' without colour too. What has no
/// stroke here has one of [`OTHERS`].
const LINES: [(&str, Stroke); 5] = [
    ("host", stroke("#444444", "2 3", 2.0)),
    ("vm", stroke("#b45309", "9 5", 2.0)),
    ("vm+bridge", stroke("#2563eb", "none", 3.0)),
    ("max", stroke("#15803d", "12 4 2 4", 2.0)),
    ("scx", stroke("#9333ea", "6 2 1 2", 2.0)),
];

/// Strokes of other variants, in the report's order; after the last one they repeat, wider.
const OTHERS: [Stroke; 5] = [
    stroke("#be123c", "1 2", 2.0),
    stroke("#0e7490", "4 4", 2.0),
    stroke("#4d7c0f", "16 4", 2.0),
    stroke("#a21caf", "9 3 2 3 2 3", 2.0),
    stroke("#7c2d12", "14 3 4 3", 2.0),
];
const WIDER: f64 = 2.0;

const fn stroke(colour: &'static str, dashes: &'static str, width: f64) -> Stroke {
    Stroke {
        colour,
        dashes,
        width,
    }
}

/// How a picture is read.
pub const LEGEND: &str = "<p>In a chart over time a line is the frequency of the pCPU that the load \
    runs on, and a circle is a request of the guest. Below are the lines' names. A bar there shows \
    the pCPU that the load runs on; a darker bar is a more capable pCPU.</p>\n";

/// In the SVG's own units.
const LEFT: f64 = 78.0;
const RIGHT_MARGIN: f64 = 26.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 250.0;
/// From there to the bars.
const BELOW: f64 = 34.0;
const BAND: f64 = 18.0;
/// Between two lines of frequency, kHz.
const KHZ_STEP: f64 = 500_000.0;

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
    let from_us = starts.map(|(us, _)| us).fold(0.0, f64::min);
    let to_us = ends.fold(1000.0, f64::max);
    let top_khz = tops.fold(1.0, f64::max) * 1.05;
    pictures(&format!("frequency over time, {title}"), |picture| {
        let times = Scale {
            values: (from_us, to_us),
            ends: (LEFT, picture.width - RIGHT_MARGIN),
        };
        let plane = Plane { times, top_khz };
        plane.axes(picture);
        let there = strokes(&lines);
        // The dots of the host's line are seen on the others.
        for (_, stroke, lines) in there.iter().rev() {
            plane.variant(picture, lines, *stroke);
        }
        let mut y = BOTTOM + BELOW;
        for (name, stroke, lines) in there {
            plane.band(picture, report, lines, (name, stroke, y));
            y += BAND;
        }
        y + 4.0
    })
}

/// Each line's name, stroke and points: those that [`LINES`] names first.
fn strokes<'a>(lines: &[&'a Value]) -> Vec<(&'a str, Stroke, &'a Value)> {
    let named = LINES.iter().filter_map(|(name, stroke)| {
        let one = lines.iter().find(|one| one["variant"] == *name)?;
        Some((*name, *stroke, &one["lines"]))
    });
    let is_named = |name: &str| LINES.iter().any(|(of, _)| *of == name);
    let all = lines.iter();
    let all = all.map(|one| (one["variant"].as_str().unwrap_or("?"), &one["lines"]));
    let widths = std::iter::successors(Some(0.0), |wider| Some(wider + WIDER));
    let strokes = widths.flat_map(|wider| {
        OTHERS.map(|of| Stroke {
            width: of.width + wider,
            ..of
        })
    });
    let others = all.filter(|(name, _)| !is_named(name)).zip(strokes);
    let others = others.map(|((name, lines), stroke)| (name, stroke, lines));
    named.chain(others).collect()
}

/// Where times and frequencies lie.
struct Plane {
    times: Scale,
    top_khz: f64,
}

impl Plane {
    fn y(&self, khz: f64) -> f64 {
        BOTTOM - khz / self.top_khz * (BOTTOM - TOP)
    }

    fn axes(&self, picture: &mut Drawing) {
        let mut khz = 0.0;
        while khz <= self.top_khz {
            let y = self.y(khz);
            let (left, right) = self.times.ends;
            picture.line((left, y), (right, y), "class=\"axis\"");
            // The lowest is beside the first mark of time.
            if khz > 0.0 {
                let label = format!("{:.1} GHz", khz / 1e6);
                picture.text((LEFT - 6.0, y + 4.0), Anchor::End, &label);
            }
            khz += KHZ_STEP;
        }
        self.times.marks(picture, (TOP, BOTTOM), ("ms", 1e3));
    }

    /// The frequency as steps, and the guest's requests as dots.
    fn variant(&self, picture: &mut Drawing, lines: &Value, stroke: Stroke) {
        let mut path = String::new();
        for (us, khz) in points(&lines["frequency"]) {
            let (x, y) = (self.times.x(us), self.y(khz));
            let _ = if path.is_empty() {
                write!(path, "M{x:.1} {y:.1}")
            } else {
                write!(path, "H{x:.1}V{y:.1}")
            };
        }
        let end = self.times.x(lines["end_us"].as_f64().unwrap_or(0.0));
        picture.add(&format!(
            "<path d=\"{path}H{end:.1}\" {}/>",
            stroke.attributes()
        ));
        for (us, khz) in points(&lines["requests"]) {
            picture.add(&format!(
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"none\" stroke=\"{}\"><title>asks for {khz:.0} kHz</title></circle>",
                self.times.x(us),
                self.y(khz),
                stroke.colour
            ));
        }
    }

    /// The name above its stroke, and which pCPUs the load was on: the darker, the more capable.
    fn band(
        &self,
        picture: &mut Drawing,
        report: &Value,
        lines: &Value,
        (name, stroke, y): (&str, Stroke, f64),
    ) {
        let right = LEFT - 6.0;
        picture.text((right, y + 11.0), Anchor::End, name);
        picture.line((MARGIN, y + 15.0), (right, y + 15.0), &stroke.attributes());
        let placement = points(&lines["placement"]);
        let end = lines["end_us"].as_f64().unwrap_or(0.0);
        for (at, (us, cpu)) in placement.iter().enumerate() {
            let until = placement.get(at + 1).map_or(end, |(us, _)| *us);
            let (x, to) = (self.times.x(*us), self.times.x(until));
            picture.add(&format!(
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.0}\" fill=\"{}\" opacity=\"{:.2}\"><title>pCPU {cpu}</title></rect>",
                (to - x).max(0.0),
                BAND - 4.0,
                stroke.colour,
                capacity(report, *cpu) / 1024.0 * 0.4 + 0.05,
            ));
            // The bar's title names the pCPU where the text would be cut off.
            let name = format!("pCPU {cpu}");
            let letters = u8::try_from(name.len()).map_or(f64::INFINITY, f64::from);
            if to - x >= letters * LETTER + 4.0 {
                picture.text((x + 4.0, y + 11.0), Anchor::Start, &name);
            }
        }
    }
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

#[cfg(test)]
mod tests {
    //! Promise: each variant of a report has a line, which differs from the others' without colour.

    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::variant::Variant;

    #[test]
    fn each_variant_has_a_line_of_its_own() {
        let one = |name: &str| {
            json!({ "title": "ramp", "variant": name, "lines": {
                "placement": [], "frequency": [[0, 1]], "requests": [], "end_us": 1000 } })
        };
        let names = Variant::ALL.map(Variant::name);
        let series: Vec<_> = names.iter().copied().chain(["a < b"]).map(one).collect();
        let report = json!({ "series": series });
        let lines: Vec<_> = series.iter().collect();
        let strokes = strokes(&lines);
        let differ = |of: &Stroke| format!("{} {}", of.dashes, of.width);
        let looks: BTreeSet<_> = strokes.iter().map(|(_, of, _)| differ(of)).collect();
        assert_eq!((strokes.len(), looks.len()), (16, 16));
        let html = chart(&report, "ramp");
        // Once for a page and once for a phone.
        assert_eq!(html.matches("<path").count(), 2 * 16, "{html}");
        for name in names.into_iter().chain(["a &lt; b"]) {
            assert_eq!(
                html.matches(&format!(">{name}</text>")).count(),
                2,
                "{name}"
            );
        }
    }
}
