// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The charts of the bench's page: frequency, requests and placement over time. From the report's
//! JSON.

use std::fmt::Write as _;

use serde_json::Value;

use crate::picture::{Anchor, Drawing, LETTER, MARGIN, Scale, Stroke, pictures};

/// A variant's name and its stroke, which differs from the others' without colour too.
const LINES: [(&str, Stroke); 5] = [
    ("host", stroke("#444444", "2 3", 2.0)),
    ("vm", stroke("#b45309", "9 5", 2.0)),
    ("vm+bridge", stroke("#2563eb", "none", 3.0)),
    ("max", stroke("#15803d", "12 4 2 4", 2.0)),
    ("scx", stroke("#9333ea", "6 2 1 2", 2.0)),
];

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
        let there = LINES.iter().filter_map(|(name, stroke)| {
            let one = lines.iter().find(|one| one["variant"] == *name)?;
            Some((*name, *stroke, &one["lines"]))
        });
        let there: Vec<_> = there.collect();
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
