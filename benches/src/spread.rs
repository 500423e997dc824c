// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A ramp as a picture: a row for each variant, with its median, its spread and each draw. From the
//! report's JSON.

use serde_json::Value;

use crate::picture::{Anchor, Drawing, MARGIN, Scale, Spread, escaped, pictures};
use crate::report_json::{cell, find, metrics, unit, variants};

/// The ends of names of metrics that are the time of a ramp, or of what is judged like one.
const RAMPS: [&str; 7] = [
    "first_process_at_max",
    "migrate",
    "to_big_fmax",
    "to_fmax",
    "to_fmin",
    "to_host_top",
    "to_needed",
];
/// In the SVG's own units: of a row, which has a line of text above its marks.
const ROW: f64 = 42.0;
const TEXT: f64 = 14.0;
const MARKS: f64 = 28.0;
const FOOT: f64 = 28.0;

/// How a picture is read.
pub const LEGEND: &str = "<p>vm is a guest without the bridge, vm+bridge one with it. In a ramp's picture \
    a circle is a draw, the line reaches from the least to the most, and the bar is the median. A \
    figure with ! is from a state that had not settled.</p>\n";

/// The pictures of a scenario's ramps.
pub fn ramps(report: &Value, scenario: &str) -> String {
    let of_ramp = |metric: &&str| {
        let name = metric.rsplit('.').next().unwrap_or_default();
        RAMPS.contains(&name)
    };
    let ramps = metrics(report, scenario).into_iter().filter(of_ramp);
    ramps
        .map(|metric| ramp(report, (scenario, metric)))
        .collect()
}

fn ramp(report: &Value, (scenario, metric): (&str, &str)) -> String {
    let rows = variants(report).into_iter();
    let rows = rows.filter_map(|of| find(report, (scenario, metric), of));
    let rows: Vec<&Value> = rows.collect();
    let values = shown(rows.iter().flat_map(|row| draws(row)));
    let text = format!("<h3>{}</h3>\n", escaped(metric));
    text + &pictures(&format!("{scenario} {metric}"), |picture| {
        let scale = Scale {
            values,
            ends: (MARGIN, picture.width - MARGIN),
        };
        let bottom = rows.iter().fold(0.0, |top, row| {
            variant(picture, scale, row, top);
            top + ROW
        });
        let (name, per, _) = unit(
            rows.first()
                .map_or("", |row| row["unit"].as_str().unwrap_or("")),
        );
        scale.marks(picture, (bottom, bottom + 5.0), (name, per));
        bottom + FOOT
    })
}

/// The ends of a scale for these: their own, with as much space before them, up to 0.
fn shown(draws: impl Iterator<Item = f64>) -> (f64, f64) {
    let ends = |(least, most): (f64, f64), draw: f64| (least.min(draw), most.max(draw));
    let (least, most) = draws.fold((f64::INFINITY, 1.0), ends);
    if least > most {
        return (0.0, most);
    }
    // What hardly differs is not shown as if it did.
    let span = (most - least).max(most / 50.0);
    ((most - 2.0 * span).max(0.0), most + span / 10.0)
}

/// Those that came about.
fn draws(row: &Value) -> Vec<f64> {
    let values = row["values"].as_array().into_iter().flatten();
    values.filter_map(Value::as_f64).collect()
}

fn variant(picture: &mut Drawing, scale: Scale, row: &Value, top: f64) {
    let all = row["values"].as_array().map_or(0, Vec::len);
    let draws = draws(row);
    let (name, _, _) = unit(row["unit"].as_str().unwrap_or_default());
    let unit = match row["median"].is_null() {
        true => String::new(),
        false => format!(" {name}"),
    };
    let variant = row["variant"].as_str().unwrap_or("?");
    let cell = cell(row);
    let (figure, mark) = match cell.strip_suffix(" !") {
        Some(figure) => (figure, " !"),
        None => (&*cell, ""),
    };
    let count = match all - draws.len() {
        0 => format!("n = {all}"),
        never => format!("{never} of {all} never"),
    };
    let text = format!("{variant}: {figure}{unit}{mark}, {count}");
    picture.text((MARGIN, top + TEXT), Anchor::Start, &text);
    let y = top + MARKS;
    picture.line((scale.ends.0, y), (scale.ends.1, y), "class=\"axis\"");
    for draw in &draws {
        let x = scale.x(*draw);
        picture.add(&format!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"draw\"/>"
        ));
    }
    let ends = |value: &Value, of: fn(f64, f64) -> f64| {
        let draws = draws.iter().copied().reduce(of);
        value.as_f64().or(draws)
    };
    let (least, most) = (ends(&row["min"], f64::min), ends(&row["max"], f64::max));
    if let (Some(least), Some(median), Some(most)) = (least, row["median"].as_f64(), most) {
        let spread = Spread {
            least,
            median,
            most,
        };
        picture.spread(scale, spread, y);
    }
}

#[cfg(test)]
mod tests {
    //! Each ramp has a picture with a row for each variant: its median, its spread, and each draw. One
    //! that never came about is no draw, and is named.

    use serde_json::json;

    use super::*;

    fn row(variant: &str, metric: &str, values: &Value) -> Value {
        json!({ "scenario": "big-ramp", "variant": variant, "metric": metric, "unit": "us",
            "values": values, "median": values[1], "min": values[0], "max": values[2] })
    }

    #[test]
    fn a_scale_shows_the_spread_and_no_more_than_there_is() {
        let of = |draws: &[f64]| shown(draws.iter().copied());
        assert_eq!(of(&[100.0, 110.0]), (90.0, 111.0));
        assert_eq!(of(&[10.0, 100.0]), (0.0, 109.0));
        // Within 2 % of each other.
        assert_eq!(of(&[1000.0, 1000.0]), (960.0, 1002.0));
        assert_eq!(of(&[]), (0.0, 1.0));
    }

    #[test]
    fn a_ramp_has_medians_spread_and_draws_of_each_variant() {
        let mut results = [
            row("host", "to_fmax", &json!([100_000, 110_000, 111_000])),
            row("vm+bridge", "to_fmax", &json!([100_000, 110_000, null])),
            row("vm", "to_fmax", &json!([null, null, null])),
            row("host", "work", &json!([1, 2, 3])),
        ];
        results[1]["unsettled"] = json!(["why"]);
        let html = ramps(&json!({ "results": results }), "big-ramp");
        for part in [
            "<h3>to_fmax</h3>",
            ">host: 110.0 (100.0–111.0) ms, n = 3</text>",
            ">vm+bridge: 110.0 (100.0–never) ms !, 1 of 3 never</text>",
            ">vm: never, 3 of 3 never</text>",
            ">110 ms</text>",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        // For a page and for a phone.
        assert_eq!(html.matches("<svg").count(), 2, "{html}");
        assert_eq!(html.matches("class=\"draw\"").count(), 2 * 5, "{html}");
        assert_eq!(html.matches("stroke-width=\"4\"").count(), 2 * 2, "{html}");
    }
}
