// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the bench's figures have to be: the guest with the bridge against the
//! host's median, or against that of the guest without it. A bound holds if it holds in all repeats but
//! one; with fewer than three, in all. So the median of three or more is within it, too, and one repeat
//! out of it tells of chance, two don't. Pure: from a report to a line for each bound, and for each figure
//! that is out of the bridge's reach (docs/bench.md) and has none.

use serde_json::{Value, json};

use crate::metric::Metric;
use crate::report_json::{find, number, unit};
use crate::scenario::Scenario;
use crate::workloads::WORKLOADS;

/// What a repeat of the guest with the bridge has to be.
#[derive(Debug, Clone, Copy)]
enum Rule {
    /// The host's within some ticks or 2 %.
    Ticks,
    /// At most the host's and some ticks or 2 %.
    NoLater,
    /// The host's within so many per mille.
    Points(u64),
    /// At least so many per mille of the host's.
    AtLeast(u64),
    /// At most.
    AtMost(u64),
    /// At most so many per mille of the host's.
    OfHost(u64),
    /// At most so many per mille of that of a guest without the bridge.
    OfVm(u64),
    /// 1 in each repeat.
    Always,
    /// Anything: it is reported.
    Free,
}

use Rule::{Always, AtLeast, AtMost, Free, NoLater, OfHost, OfVm, Points, Ticks};

const RULES: [(&str, &str, Rule); 20] = [
    ("boot", "first_process_at_max", OfVm(1_020)),
    ("little-to-big", "to_big_fmax", Ticks),
    ("little-to-big", "migrate", Ticks),
    ("big-ramp", "to_fmax", Ticks),
    ("new-thread", "to_fmax", Ticks),
    ("step-down", "to_fmin", Ticks),
    // To the host both threads are the vCPU's, and what it remembers of that one keeps its
    // frequency up.
    ("step-down", "other_thread.to_fmin", Free),
    ("little-to-big", "ends_on_big", Always),
    ("periodic", "efficiency", Points(30)),
    ("periodic", "at_edge.efficiency", Points(30)),
    ("work", "infer_cached.score_to_host_normalised", SCORE),
    ("work", "infer_cached.energy_to_host_normalised", ENERGY),
    ("work", "infer_small.score_to_host_normalised", SCORE),
    ("work", "infer_small.energy_to_host_normalised", ENERGY),
    ("work", "infer_large.score_to_host_normalised", SCORE),
    ("work", "infer_large.energy_to_host_normalised", ENERGY),
    ("work", "io.score_to_host_normalised", SCORE),
    // A request takes a guest more CPU time, and governors answer more work with a costlier OPP.
    ("work", "io.energy_to_host_normalised", Free),
    ("work", "frames.score_to_host_normalised", SCORE),
    ("work", "frames.energy_to_host_normalised", ENERGY),
];

/// Beside other load, of guests whose requests add up: no later than on the host, and for no more
/// energy than this. Where a guest has its frequency tens of ms sooner, that costs more.
const CONTENDED: [(&str, Rule); 10] = [
    ("new25", OfHost(1_050)),
    ("new50", OfHost(1_050)),
    ("new75", OfHost(1_050)),
    ("woken25", Free),
    ("woken50", OfHost(1_050)),
    ("woken75", OfHost(1_050)),
    // Both guests' kernels take CPU time: 5 to 6 % more energy, by QEMU also without a sum.
    ("guest50", OfHost(1_080)),
    ("fifo25", OfHost(1_050)),
    ("deadline25", Free),
    ("part50", Free),
];
const ADD_UP: [&str; 3] = [BRIDGE, "sum", "scx"];
/// By scx in fifo25. There the host is below the frequency that is needed for 7 % of the time; not to be
/// takes 4 to 6 % more energy.
const FIFO_BY_SCX: Rule = OfHost(1_080);
const BRIDGE: &str = "vm+bridge";

/// Of a job.
const SCORE: Rule = AtLeast(950);
const ENERGY: Rule = AtMost(1_050);

/// Of a demand's frames on the host, in per mille.
const HOST_LATE: u64 = 50;

/// A bound, and whether a report keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// What has to be, and what is.
    pub text: String,
    /// Whether it is; `None` for a figure that is reported without a bound.
    pub held: Option<bool>,
}

impl Bound {
    /// As JSON.
    pub fn json(&self) -> Value {
        json!({ "text": self.text, "held": self.held })
    }
}

/// All bounds on what the report has, ramps within these ticks; what it hasn't measured is
/// left out.
pub fn judge(report: &Value, ticks_us: u64) -> Vec<Bound> {
    let alone = RULES.into_iter().filter_map(|(scenario, metric, rule)| {
        bound(report, (scenario, metric), BRIDGE, rule, ticks_us)
    });
    let cases = ADD_UP.into_iter();
    let cases = cases.flat_map(|variant| CONTENDED.map(|(case, energy)| (variant, case, energy)));
    let contended = cases.flat_map(|(variant, case, energy)| {
        let energy = match (variant, case) {
            ("scx", "fifo25") => FIFO_BY_SCX,
            _ => energy,
        };
        let rules = [
            ("to_needed", NoLater),
            ("above", NoLater),
            ("energy", energy),
        ];
        rules.map(|(metric, rule)| {
            let metric = format!("{case}.{metric}");
            bound(report, ("contended", &metric), variant, rule, ticks_us)
        })
    });
    let workloads = WORKLOADS.iter().flat_map(|one| {
        let metrics = one.metrics.iter();
        metrics.filter_map(|metric| of_workload(report, one, *metric, ticks_us))
    });
    alone.chain(contended.flatten()).chain(workloads).collect()
}

/// A workload's bound: the guest's against the host's; of late frames the host's own, for a demand
/// that the host can't meet says nothing of a guest.
fn of_workload(report: &Value, one: &Scenario, metric: Metric, ticks_us: u64) -> Option<Bound> {
    let name = one.metric_name(metric);
    let judged = format!("{name}_to_host");
    let (name, variant, rule) = match metric {
        Metric::FrameTime(95) => (judged, BRIDGE, AtMost(1_030)),
        Metric::JobEnergy => (judged, BRIDGE, AtMost(1_030)),
        Metric::JobScore => (judged, BRIDGE, AtLeast(970)),
        Metric::Late if !one.overloads => (name, "host", AtMost(HOST_LATE)),
        _ => return None,
    };
    bound(report, (one.name, &name), variant, rule, ticks_us)
}

fn bound(
    report: &Value,
    of: (&str, &str),
    variant: &str,
    rule: Rule,
    ticks_us: u64,
) -> Option<Bound> {
    let row = find(report, of, variant)?;
    let reference = match rule {
        OfVm(_) => "vm",
        _ => "host",
    };
    let host = find(report, of, reference).map(|row| row["median"].as_u64());
    let figure = MedianPair {
        guest: row["median"].as_u64(),
        host: host.flatten(),
        unit: row["unit"].as_str().unwrap_or_default(),
    };
    if host.is_none() && matches!(rule, Ticks | NoLater | Points(_) | OfHost(_) | OfVm(_)) {
        return None;
    }
    let values = row["values"].as_array().map_or(&[][..], Vec::as_slice);
    let n = values.len();
    let by = match variant {
        BRIDGE => String::new(),
        other => format!(" {other}"),
    };
    let what = format!("{} {}{by}", of.0, of.1);
    let each = match rule {
        Always => values.iter().map(|value| *value == 1).collect(),
        Free => {
            let beside = host.map_or(String::new(), |host| format!(", host {}", figure.is(host)));
            let text = format!("{what}: {}{beside} (n = {n})", figure.is(figure.guest));
            return Some(Bound { text, held: None });
        }
        _ => {
            let of_repeat = |value: &Value| {
                let guest = value.as_u64();
                let repeat = MedianPair { guest, ..figure };
                repeat.judged(rule, reference, ticks_us).0
            };
            values.iter().map(of_repeat).collect::<Vec<bool>>()
        }
    };
    let kept = each.iter().filter(|held| **held).count();
    let (held, text) = match rule {
        Always => (n > 0 && kept == n, format!("{}, 1 in each", row["values"])),
        _ => (
            all_but_one(kept, n),
            figure.judged(rule, reference, ticks_us).1,
        ),
    };
    Some(Bound {
        text: format!("{what}: {text} (held in {kept} of {n})"),
        held: Some(held),
    })
}

/// Whether a bound that was kept in so many of `n` repeats holds.
fn all_but_one(kept: usize, n: usize) -> bool {
    match n {
        0 => false,
        1 | 2 => kept == n,
        _ => kept + 1 >= n,
    }
}

/// A repeat or the median of all, beside the host's.
#[derive(Clone, Copy)]
struct MedianPair<'a> {
    guest: Option<u64>,
    /// Or what it is compared with in the host's place.
    host: Option<u64>,
    unit: &'a str,
}

/// Whether a bound is held, and what is and what has to be.
type Judged = (bool, String);

impl MedianPair<'_> {
    /// By a rule for single figures, with this as what `host` is.
    fn judged(self, rule: Rule, reference: &str, ticks_us: u64) -> Judged {
        let of_host = self.host.unwrap_or_default();
        let ticks = ticks_us.max(of_host / 50);
        match rule {
            Ticks => self.near(ticks),
            Points(most) => self.near(most),
            NoLater => self.beside(reference, of_host + ticks),
            OfHost(most) | OfVm(most) => self.beside(reference, of_host * most / 1_000),
            AtLeast(least) => self.at_least(least),
            AtMost(most) => self.at_most(most),
            Always | Free => (true, String::new()),
        }
    }

    fn shown(&self, value: u64) -> String {
        let figure = number(&value.into(), self.unit);
        format!("{figure} {}", unit(self.unit).0)
    }

    fn is(&self, value: Option<u64>) -> String {
        value.map_or("never".to_owned(), |value| self.shown(value))
    }

    fn near(&self, most: u64) -> Judged {
        let apart = self.guest.zip(self.host);
        let apart = apart.map(|(guest, host)| guest.abs_diff(host));
        let held = apart.is_some_and(|apart| apart <= most);
        let (guest, host) = (self.is(self.guest), self.is(self.host));
        let text = format!("{guest}, host {host}, within {}", self.shown(most));
        (held, text)
    }

    fn beside(&self, reference: &str, most: u64) -> Judged {
        let (held, _) = self.at_most(most);
        let (guest, host) = (self.is(self.guest), self.is(self.host));
        let text = format!("{guest}, {reference} {host}, at most {}", self.shown(most));
        (held && self.host.is_some(), text)
    }

    fn at_most(&self, most: u64) -> Judged {
        let held = self.guest.is_some_and(|guest| guest <= most);
        let text = format!("{}, at most {}", self.is(self.guest), self.shown(most));
        (held, text)
    }

    fn at_least(&self, least: u64) -> Judged {
        let held = self.guest.is_some_and(|guest| guest >= least);
        let text = format!("{}, at least {}", self.is(self.guest), self.shown(least));
        (held, text)
    }
}

#[cfg(test)]
mod tests {
    //! Each bound at its edge, and just beyond. It holds if it holds in all repeats but one, and its
    //! line says in how many.

    use serde_json::json;

    use super::*;
    use crate::args::TWO_TICKS_US;
    use crate::scenarios::SCENARIOS;

    fn row(scenario: &str, variant: &str, metric: &str, median: Option<u64>) -> Value {
        json!({ "scenario": scenario, "variant": variant, "metric": metric,
            "median": median, "values": [median] })
    }

    /// Of a job of the guest with the bridge, against the host.
    fn work(metric: &str, median: Option<u64>) -> Value {
        let metric = format!("{metric}_to_host_normalised");
        row("work", "vm+bridge", &metric, median)
    }

    fn all(rows: &[Value]) -> Vec<Option<bool>> {
        let bounds = judge(&json!({ "results": rows }), TWO_TICKS_US);
        bounds.iter().map(|bound| bound.held).collect()
    }

    fn held(rows: &[Value]) -> Vec<bool> {
        let held = all(rows).into_iter().map(|held| held.expect("a bound"));
        held.collect()
    }

    #[test]
    fn each_job_has_a_rule_for_score_and_energy() {
        for scenario in SCENARIOS.iter().filter(|scenario| scenario.name == "work") {
            for what in ["score", "energy"] {
                let metric = format!("{}.{what}_to_host_normalised", scenario.case);
                let rule = |(of, name, _): &(&str, &str, Rule)| *of == "work" && *name == metric;
                assert!(RULES.iter().any(rule), "{metric}");
            }
        }
    }

    #[test]
    fn each_case_beside_other_load_is_a_scenarios() {
        for (case, _) in CONTENDED {
            let own = |one: &Scenario| one.name == "contended" && one.case == case;
            let found = SCENARIOS.iter().find(|one| own(one));
            let metrics = found.map_or(&[][..], |one| one.metrics);
            for metric in [Metric::ToNeeded, Metric::Above, Metric::Energy] {
                assert!(metrics.contains(&metric), "{case} {metric:?}");
            }
        }
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
            let bounds = judge(&json!({ "results": rows }), 12_000);
            assert_eq!(bounds[0].held, Some(wanted), "{guest}");
        }
    }

    #[test]
    fn one_repeat_may_be_out_of_a_bound() {
        for (values, kept, wanted) in [
            (&[100_000, 108_000, 92_000][..], 3, true),
            (&[100_000, 108_001, 100_000], 2, true),
            // Their median is within it.
            (&[91_999, 100_000, 108_001], 1, false),
            (&[100_000, 100_000, 100_000, 108_001, 200_000], 3, false),
            (&[100_000, 100_000, 100_000, 100_000, 200_000], 4, true),
            (&[100_000, 108_001], 1, false),
            (&[108_001], 0, false),
            (&[], 0, false),
        ] {
            let n = values.len();
            let mut guest = row("big-ramp", "vm+bridge", "to_fmax", Some(100_000));
            guest["values"] = json!(values);
            let rows = [row("big-ramp", "host", "to_fmax", Some(100_000)), guest];
            let bounds = judge(&json!({ "results": rows }), TWO_TICKS_US);
            assert_eq!(bounds[0].held, Some(wanted), "{values:?}");
            let text = &bounds[0].text;
            assert!(
                text.ends_with(&format!(" (held in {kept} of {n})")),
                "{text}"
            );
        }
    }

    #[test]
    fn a_repeat_in_which_nothing_came_is_out_of_a_bound() {
        let mut guest = row("big-ramp", "vm+bridge", "to_fmax", Some(100_000));
        let host = row("big-ramp", "host", "to_fmax", Some(100_000));
        for (values, wanted) in [
            (json!([100_000, null, 100_000]), true),
            (json!([100_000, null, null]), false),
        ] {
            guest["values"] = values;
            assert_eq!(held(&[host.clone(), guest.clone()]), [wanted]);
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
            work("io.score", Some(949)),
            work("frames.energy", Some(1050)),
            work("infer_small.energy", Some(1051)),
            row("work", "vm+bridge", "io.energy", Some(9999)),
        ];
        // In the order of the rules: infer_small, io, frames.
        assert_eq!(held(&rows), [true, false, false, false, true]);
        assert!(held(&[]).is_empty());
    }

    #[test]
    fn what_has_a_row_and_no_median_is_not_held() {
        let rows = [
            row("periodic", "host", "efficiency", Some(500)),
            row("periodic", "vm+bridge", "efficiency", None),
            work("frames.energy", None),
            work("io.score", None),
        ];
        assert_eq!(held(&rows), [false, false, false]);
    }

    #[test]
    fn a_thread_that_rested_is_no_later_and_its_energy_is_reported() {
        let of = |variant, metric, median| row("contended", variant, metric, Some(median));
        let rows = [
            of("host", "part50.to_needed", 1_000),
            of("scx", "part50.to_needed", 9_001),
            of("host", "part50.energy", 1_000),
            of("scx", "part50.energy", 1_210),
        ];
        assert_eq!(all(&rows), [Some(false), None]);
    }

    #[test]
    fn beside_a_fifo_thread_scx_may_take_more_energy() {
        let of = |variant, median| row("contended", variant, "fifo25.energy", Some(median));
        let rows = |median| [of("host", 1_000), of("vm+bridge", 1_050), of("scx", median)];
        assert_eq!(held(&rows(1_080)), [true, true]);
        assert_eq!(held(&rows(1_081)), [true, false]);
        assert_eq!(held(&[of("host", 1_000), of("sum", 1_051)]), [false]);
    }

    #[test]
    fn a_paced_job_is_judged_by_its_frames_and_a_demand_by_the_host() {
        for (late, p95, energy) in [(50, 1_030, 1_030), (51, 1_031, 1_031)] {
            let wanted = late == 50;
            let rows = [
                row("demand", "host", "d90.late", Some(late)),
                row("demand", "vm+bridge", "d90.frame_p95_to_host", Some(p95)),
                row("demand", "vm+bridge", "d90.energy_to_host", Some(energy)),
                row("demand", "vm+bridge", "d90.late", Some(999)),
                row(
                    "workload",
                    "vm+bridge",
                    "build.score_to_host",
                    Some(2_000 - p95),
                ),
                // More than the host can do.
                row("demand", "host", "d110.late", Some(999)),
            ];
            assert_eq!(held(&rows), [wanted; 4], "{late}");
        }
    }

    #[test]
    fn io_energy_and_other_thread_are_reported_without_a_bound() {
        for figure in [Some(99_999), None] {
            let rows = [
                row("step-down", "host", "other_thread.to_fmin", Some(80_000)),
                row("step-down", "vm+bridge", "other_thread.to_fmin", figure),
                work("io.energy", figure),
            ];
            assert_eq!(all(&rows), [None, None], "{figure:?}");
        }
    }

    #[test]
    fn the_bridge_adds_at_most_two_per_cent_to_a_boot() {
        let of = |variant, us| row("boot", variant, "first_process_at_max", Some(us));
        for (us, wanted) in [(1_020_000, true), (1_020_001, false)] {
            let rows = [of("vm", 1_000_000), of("vm+bridge", us)];
            assert_eq!(held(&rows), [wanted], "{us}");
        }
        assert!(held(&[of("vm+bridge", 1)]).is_empty());
    }

    #[test]
    fn what_adds_up_is_no_later_and_no_dearer_than_the_host() {
        for (needed, energy, wanted) in [
            (8_000, 1_050, [true, true]),
            (8_001, 1_051, [false, false]),
            (0, 900, [true, true]),
        ] {
            for variant in ["vm+bridge", "scx"] {
                let of = |variant, metric, median| row("contended", variant, metric, Some(median));
                let rows = [
                    of("host", "new25.to_needed", 0),
                    of(variant, "new25.to_needed", needed),
                    of("host", "new25.energy", 1_000),
                    of(variant, "new25.energy", energy),
                ];
                assert_eq!(held(&rows), wanted, "{variant} {needed} {energy}");
            }
        }
    }
}
