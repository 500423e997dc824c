// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The chart beside the table: medians of the lab, on a logarithmic scale, for
//! a read is a thousand times shorter by one path than by another.

use std::fmt::Write as _;

use serde_json::Value;

use super::paths::{PATHS, find};

const LEFT: f64 = 130.0;
const WIDTH: f64 = 420.0;
const ROW: f64 = 20.0;
/// Decades of the scale: 1 ns to 1 ms.
const DECADES: u32 = 6;

/// An SVG of the lab's rows.
pub fn chart(report: &Value) -> String {
    let rows = f64::from(u32::try_from(PATHS.len() * 2).unwrap_or(0));
    let height = 70.0 + rows * ROW + 30.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"640\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"640\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"10\" y=\"20\" font-size=\"14\">How long an access blocks the vCPU (emulated, median)</text>\n"
    );
    let bottom = height - 25.0;
    for decade in 0..=DECADES {
        let x = LEFT + WIDTH * f64::from(decade) / f64::from(DECADES);
        let label = ["1 ns", "10 ns", "100 ns", "1 µs", "10 µs", "100 µs", "1 ms"];
        let label = label.get(decade as usize).copied().unwrap_or_default();
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"30\" x2=\"{x}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">{label}</text>",
            bottom + 16.0
        );
    }
    let mut y = 36.0;
    for (op, title, color) in [
        ("read", "read of cur_perf", "#3b78b5"),
        ("write", "write of set_perf with a new clamp", "#c25b1f"),
    ] {
        let _ = writeln!(
            svg,
            "<text x=\"10\" y=\"{}\" fill=\"{color}\">{title}</text>",
            y + 12.0
        );
        y += ROW;
        for path in PATHS {
            bar(&mut svg, report, (path, op, color), y);
            y += ROW - 1.0;
        }
    }
    svg + "</svg>\n"
}

fn bar(svg: &mut String, report: &Value, (path, op, color): (&str, &str, &str), y: f64) {
    let ns = find(report, (path, op), "lab").and_then(|row| row["median_ns"].as_f64());
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{path}</text>",
        LEFT - 6.0,
        y + 12.0
    );
    let (length, label) = match ns {
        Some(ns) => {
            let length = WIDTH * ns.max(1.0).log10() / f64::from(DECADES);
            (
                length,
                if ns < 100.0 {
                    format!("{ns:.1} ns")
                } else {
                    format!("{ns:.0} ns")
                },
            )
        }
        None => (0.0, "not possible".to_owned()),
    };
    let _ = writeln!(
        svg,
        "<rect x=\"{LEFT}\" y=\"{}\" width=\"{length:.1}\" height=\"13\" fill=\"{color}\"/>\
         <text x=\"{:.1}\" y=\"{}\">{label}</text>",
        y + 2.0,
        LEFT + length + 5.0,
        y + 12.0
    );
}

#[cfg(test)]
mod tests {
    //! Each path has a bar or a word for why not.
    use serde_json::json;

    use super::*;

    #[test]
    fn each_path_is_in_the_chart() {
        let row = json!({ "machine": "lab", "path": "exit", "op": "read", "median_ns": 24_000.0 });
        let svg = chart(&json!({ "results": [row] }));
        assert!(svg.contains("24000 ns"));
        assert_eq!(svg.matches("not possible").count(), 2 * PATHS.len() - 1);
    }
}
