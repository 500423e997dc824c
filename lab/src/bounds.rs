// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the bench's figures have to be: the guest with the bridge against the
//! host. Pure: from a report to a line for each bound, and for each figure
//! that is out of the bridge's reach (docs/bench.md) and has none.

use serde_json::Value;

/// A guest's tick and a host's, in µs.
pub const TWO_TICKS_US: u64 = 8_000;
/// And one more, for few repeats: a ramp begins anywhere between two ticks, and the
/// host's own repeats differ by two.
pub const THREE_TICKS_US: u64 = 12_000;
/// Points of efficiency, in per mille.
const EFFICIENCY: u64 = 30;
/// Of the host's, in per mille.
const SCORE_LEAST: u64 = 950;
const ENERGY_MOST: u64 = 1_050;

/// Metrics that are to be the host's within some ticks or 2 %.
const RAMPS: [(&str, &str); 5] = [
    ("little-to-big", "to_big_fmax"),
    ("little-to-big", "migrate"),
    ("big-ramp", "to_fmax"),
    ("new-thread", "to_fmax"),
    ("step-down", "to_fmin"),
];

/// Without a bound: to the host both threads are the vCPU's, and what it
/// remembers of that one keeps its frequency up.
const OTHER_THREAD: (&str, &str) = ("step-down", "other_thread.to_fmin");
/// Without a bound: a request takes a guest more CPU time, and governors answer
/// more work with a costlier OPP.
const IO_ENERGY: &str = "io.energy_to_host_normalised";

/// A bound, and whether a report keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// What has to be, and what is.
    pub text: String,
    /// Whether it is; `None` for a figure that is reported without a bound.
    pub held: Option<bool>,
}

/// All bounds on what the report has, ramps within these ticks; what it hasn't measured is
/// left out.
pub fn of(report: &Value, ticks_us: u64) -> Vec<Bound> {
    let mut bounds = Vec::new();
    for (scenario, metric) in RAMPS {
        bounds.extend(ramp(report, (scenario, metric), ticks_us));
    }
    bounds.extend(without_bound(report, OTHER_THREAD));
    bounds.extend(right_cluster(report));
    bounds.extend(efficiency(report, "efficiency"));
    bounds.extend(efficiency(report, "at_edge.efficiency"));
    for row in rows(report, "work", "vm+bridge") {
        bounds.extend(work(row));
    }
    bounds
}

fn rows<'a>(
    report: &'a Value,
    scenario: &'a str,
    variant: &'a str,
) -> impl Iterator<Item = &'a Value> {
    let all = report["results"].as_array().into_iter().flatten();
    all.filter(move |row| row["scenario"] == scenario && row["variant"] == variant)
}

/// The medians of host and guest with the bridge; `None` where it wasn't
/// measured, `Some(None)` where it didn't come about.
fn medians(report: &Value, scenario: &str, metric: &str) -> Option<(Option<u64>, Option<u64>)> {
    let median = |variant| {
        let mut rows = rows(report, scenario, variant);
        rows.find(|row| row["metric"] == metric)
            .map(|row| row["median"].as_u64())
    };
    Some((median("host")?, median("vm+bridge")?))
}

fn ramp(report: &Value, (scenario, metric): (&str, &str), ticks_us: u64) -> Option<Bound> {
    let (host, guest) = medians(report, scenario, metric)?;
    let allowed = |host: u64| ticks_us.max(host / 50);
    let held = host
        .zip(guest)
        .is_some_and(|(host, guest)| host.abs_diff(guest) <= allowed(host));
    Some(Bound {
        text: format!(
            "{scenario} {metric}: vm+bridge {}, host {}, within {} us",
            or_never(guest),
            or_never(host),
            allowed(host.unwrap_or_default())
        ),
        held: Some(held),
    })
}

fn without_bound(report: &Value, (scenario, metric): (&str, &str)) -> Option<Bound> {
    let (host, guest) = medians(report, scenario, metric)?;
    let (host, guest) = (or_never(host), or_never(guest));
    Some(Bound {
        text: format!("{scenario} {metric}: vm+bridge {guest}, host {host}"),
        held: None,
    })
}

fn or_never(us: Option<u64>) -> String {
    us.map_or("never".to_owned(), |us| format!("{us} us"))
}

/// In no repeat the wrong cluster at the end.
fn right_cluster(report: &Value) -> Option<Bound> {
    let mut rows = rows(report, "little-to-big", "vm+bridge");
    let row = rows.find(|row| row["metric"] == "ends_on_big")?;
    let values = row["values"].as_array()?;
    Some(Bound {
        text: format!(
            "little-to-big: ends on the wrong cluster in no repeat: {}",
            row["values"]
        ),
        held: Some(!values.is_empty() && values.iter().all(|value| *value == 1)),
    })
}

fn efficiency(report: &Value, metric: &str) -> Option<Bound> {
    let (host, guest) = medians(report, "periodic", metric)?;
    let held = host
        .zip(guest)
        .is_some_and(|(host, guest)| host.abs_diff(guest) <= EFFICIENCY);
    Some(Bound {
        text: format!(
            "periodic {metric}: vm+bridge {}, host {} of 1000, within {EFFICIENCY}",
            or_unknown(guest),
            or_unknown(host)
        ),
        held: Some(held),
    })
}

fn work(row: &Value) -> Option<Bound> {
    let metric = row["metric"].as_str()?;
    let median = row["median"].as_u64();
    let shown = or_unknown(median);
    let (held, bound) = if metric == IO_ENERGY {
        (None, shown)
    } else if metric.ends_with(".score_to_host_normalised") {
        (
            Some(median.is_some_and(|score| score >= SCORE_LEAST)),
            format!("{shown}, at least {SCORE_LEAST}"),
        )
    } else if metric.ends_with(".energy_to_host_normalised") {
        (
            Some(median.is_some_and(|energy| energy <= ENERGY_MOST)),
            format!("{shown}, at most {ENERGY_MOST}"),
        )
    } else {
        return None;
    };
    Some(Bound {
        text: format!("work {metric}: {bound} of 1000"),
        held,
    })
}

fn or_unknown(figure: Option<u64>) -> String {
    figure.map_or("unknown".to_owned(), |figure| figure.to_string())
}

#[cfg(test)]
mod tests {
    //! Each bound at its edge, and just beyond.

    use serde_json::json;

    use super::*;

    fn row(scenario: &str, variant: &str, metric: &str, median: Option<u64>) -> Value {
        json!({ "scenario": scenario, "variant": variant, "metric": metric,
            "median": median, "values": [median] })
    }

    fn all(rows: &[Value]) -> Vec<Option<bool>> {
        let bounds = of(&json!({ "results": rows }), TWO_TICKS_US);
        bounds.iter().map(|bound| bound.held).collect()
    }

    fn held(rows: &[Value]) -> Vec<bool> {
        let held = all(rows).into_iter().map(|held| held.expect("a bound"));
        held.collect()
    }

    #[test]
    fn ramps_are_within_two_ticks_or_two_per_cent() {
        for (host, guest, wanted) in [
            (Some(100_000), Some(108_000), true),
            (Some(100_000), Some(108_001), false),
            (Some(100_000), Some(91_999), false),
            (Some(500_000), Some(510_000), true),
            (Some(500_000), Some(510_001), false),
            (Some(100_000), None, false),
        ] {
            let rows = [
                row("big-ramp", "host", "to_fmax", host),
                row("big-ramp", "vm+bridge", "to_fmax", guest),
            ];
            assert_eq!(held(&rows), [wanted], "{host:?} {guest:?}");
        }
    }

    #[test]
    fn of_few_repeats_ramps_are_within_three_ticks() {
        for (guest, wanted) in [(112_000, true), (112_001, false)] {
            let rows = [
                row("big-ramp", "host", "to_fmax", Some(100_000)),
                row("big-ramp", "vm+bridge", "to_fmax", Some(guest)),
            ];
            let bounds = of(&json!({ "results": rows }), THREE_TICKS_US);
            assert_eq!(bounds[0].held, Some(wanted), "{guest}");
        }
    }

    #[test]
    fn the_wrong_cluster_once_is_too_often() {
        let mut one = row("little-to-big", "vm+bridge", "ends_on_big", Some(1));
        one["values"] = json!([1, 1, 0]);
        assert_eq!(held(&[one.clone()]), [false]);
        one["values"] = json!([]);
        assert_eq!(held(&[one]), [false], "measured in no repeat");
    }

    #[test]
    fn work_and_periodic_have_their_bounds() {
        let rows = [
            row("periodic", "host", "efficiency", Some(500)),
            row("periodic", "vm+bridge", "efficiency", Some(470)),
            row("periodic", "host", "at_edge.efficiency", Some(500)),
            row("periodic", "vm+bridge", "at_edge.efficiency", Some(531)),
            row(
                "work",
                "vm+bridge",
                "io.score_to_host_normalised",
                Some(949),
            ),
            row(
                "work",
                "vm+bridge",
                "frames.energy_to_host_normalised",
                Some(1050),
            ),
            row(
                "work",
                "vm+bridge",
                "infer_small.energy_to_host_normalised",
                Some(1051),
            ),
            row("work", "vm+bridge", "io.energy", Some(9999)),
        ];
        assert_eq!(held(&rows), [true, false, false, true, false]);
        assert!(held(&[]).is_empty());
    }

    #[test]
    fn what_has_a_row_and_no_median_is_not_held() {
        let rows = [
            row("periodic", "host", "efficiency", Some(500)),
            row("periodic", "vm+bridge", "efficiency", None),
            row(
                "work",
                "vm+bridge",
                "frames.energy_to_host_normalised",
                None,
            ),
            row("work", "vm+bridge", "io.score_to_host_normalised", None),
        ];
        assert_eq!(held(&rows), [false, false, false]);
    }

    #[test]
    fn io_energy_and_other_thread_are_reported_without_a_bound() {
        for figure in [Some(99_999), None] {
            let rows = [
                row("step-down", "host", "other_thread.to_fmin", Some(80_000)),
                row("step-down", "vm+bridge", "other_thread.to_fmin", figure),
                row("work", "vm+bridge", "io.energy_to_host_normalised", figure),
            ];
            assert_eq!(all(&rows), [None, None], "{figure:?}");
        }
    }
}
