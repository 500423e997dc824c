// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tables of what holds: a promise, the scenario that fails where it doesn't, and the figure that
//! the scenarios of a set of tests reported.

use serde_json::Value;

use super::lab::reports;
use super::markdown::{head, row};
use vcpufreq_bench::report_json::rows;

/// What makes the figure of all reports of a scenario.
type FigureOf = fn(&[&Value]) -> Option<String>;

/// Words, a scenario, and its figure.
type HoldsRow = (&'static str, &'static str, FigureOf);

/// Of both sets.
const OPPS: HoldsRow = (
    "OPPs that the host misses with `exact`",
    "opps-exact",
    |all| wrong_of(all, "opps_wrong", "opps_checked"),
);

/// Of `make test`.
const SHORT: &[HoldsRow] = &[
    OPPS,
    (
        "wrong reads by `bpf` after moves and changes",
        "bpf-page",
        |all| wrong_of(&both(all, "moves", "changes"), "wrong", "looks"),
    ),
    ("wrong reads with default options", "default-run", |all| {
        wrong_of(&flat(all, |one| rows(one, "unpinned")), "wrong", "compared")
    }),
    (
        "losses of `bpf` after which an OPP is not in force",
        "fallbacks",
        |all| {
            let rows = flat(all, |one| rows(one, "rows"));
            let wrong = rows.iter().filter(|one| one["held"] != true).count();
            Some(format!("{wrong} of {}", rows.len()))
        },
    ),
    (
        "writes by `bpf` that exit to the VMM; reads, as many, have none",
        "no-exit",
        |all| {
            let seen: Vec<&Value> = all.iter().map(|one| &one["accesses"]).collect();
            wrong_of(&seen, "exited", "set_perf_trapped")
        },
    ),
];

/// Of `make test-long`.
const LONG: &[HoldsRow] = &[
    OPPS,
    ("changes that dip", "no-dip", |all| {
        let seen: Vec<&Value> = all.iter().map(|one| &one["seen"]).collect();
        wrong_of(&seen, "dips", "changes")
    }),
    (
        "OPPs at which a busy vCPU gets less than it requests with `floor`",
        "opps-floor",
        |all| wrong_of(all, "opps_wrong", "opps_checked"),
    ),
    (
        "wrong first reads after a move, by `exit`, `ioeventfd`",
        "unpinned",
        |all| {
            let moves = flat(all, |one| rows(one, "moves"));
            let by_exit = moves.iter().filter(|one| one["right"] != true).count();
            let page = all.iter().map(|one| &one["with_perf_events"]);
            let page: Vec<&Value> = page.flat_map(|with| rows(with, "rows")).collect();
            let by_page = page
                .iter()
                .filter(|one| one["first_is_true"] != true)
                .count();
            Some(format!(
                "{by_exit} of {}, {by_page} of {}",
                moves.len(),
                page.len()
            ))
        },
    ),
    (
        "longest until the page is true after a move by `ioeventfd`, without perf events [ms]",
        "unpinned",
        |all| {
            let longest = |key: &str| {
                let us = all.iter().filter_map(|one| one[key]["longest_us"].as_u64());
                Some(format!("{:.1}", us.max()? as f64 / 1000.0))
            };
            Some(format!(
                "{}, {}",
                longest("with_perf_events")?,
                longest("without")?
            ))
        },
    ),
    (
        "wrong reads on pCPUs that come online later",
        "hotplug",
        |all| wrong_of(&flat(all, |one| rows(one, "by_path")), "wrong", "compared"),
    ),
    (
        "time that others wait for their pCPU beside a flood, at most [%]",
        "flood",
        |all| {
            let each = flat(all, |one| rows(one, "rows"));
            let mut waits = both(&each, "other_vcpu", "other_guest");
            waits.extend(both(all, "other_vcpu", "other_guest"));
            let most = waits.iter().filter_map(|one| one["waiting"].as_f64());
            Some(format!("{:.1}", 100.0 * most.reduce(f64::max)?))
        },
    ),
    ("what is left 1 s after kills of a VMM", "kill", |all| {
        after_kills(all, "kills")
    }),
    (
        "what is left after kills of QEMU, its server or both",
        "qemu-deaths",
        |all| after_kills(all, "kills"),
    ),
    (
        "values that differ after kills of `rt apply` and `restore`",
        "rt-settings",
        |all| after_kills(&both(all, "apply_killed", "restore_killed"), "times"),
    ),
    (
        "a fixed job's time against the inverse speed, most [%]",
        "speed",
        |all| off(all, "time_against_inverse_speed"),
    ),
    ("the same in a guest [%]", "speed-guest", |all| {
        off(all, "time_against_inverse_speed")
    }),
    (
        "a write by `bpf` with 64 vCPUs against one with 1",
        "bpf-many",
        |all| {
            let rows = flat(all, |one| rows(one, "rows"));
            let ns = |one: &Value| one["write_bpf_virtual_ns"].as_f64();
            Some(format!("{:.3}", ns(rows.last()?)? / ns(rows.first()?)?))
        },
    ),
    (
        "another guest's request, a cgroup's, a thread's, a process' life beside 1,000 requests a second, against a guest that computes: `bpf`; `scx`",
        "bpf-flood",
        |all| {
            let ways =
                ["cgroup_write", "scx"].map(|way| &all.first().unwrap_or(&&Value::Null)[way]);
            let ratio = |way: &Value, what: &str| {
                let of = |when: &str| way[when][what]["median_ns"].as_f64();
                Some(format!("{:.2}", of("asks")? / of("computes")?))
            };
            let of = |way: &Value| {
                let whats = ["request", "cgroup", "thread", "fork"];
                let ratios = whats.map(|what| ratio(way, what)).into_iter();
                Some(ratios.collect::<Option<Vec<_>>>()?.join(", "))
            };
            Some(format!("{}; {}", of(ways[0])?, of(ways[1])?))
        },
    ),
    (
        "share of time that these requests hold the lock of all clamps [%]; longest [µs]",
        "bpf-flood",
        |all| {
            let lock = &all.first()?["cgroup_write"]["asks"]["lock"];
            let share = lock["share_percent"].as_f64()?;
            Some(format!("{share:.1}; {}", lock["longest_us"]))
        },
    ),
    (
        "a switch of other tasks with 1, 10, 100 VMs by `bpf` against none",
        "bpf-switch-cost",
        |all| {
            let ns = rows(all.first()?, "rows").map(|row| row["virtual_ns"].as_f64());
            let ns: Vec<f64> = ns.collect::<Option<_>>()?;
            let (none, vms) = ns.split_first()?;
            let ratios = vms.iter().map(|ns| format!("{:.2}", ns / none));
            Some(ratios.collect::<Vec<_>>().join(", "))
        },
    ),
    (
        "what a loaded `scx` adds to a switch of any task [µs]",
        "bpf-switch-cost",
        |all| {
            let one = all.first()?;
            let without = rows(one, "rows").next()?["virtual_ns"].as_f64()?;
            let with = one["scx_virtual_ns"].as_f64()?;
            Some(format!("{:.1}", (with - without) / 1000.0))
        },
    ),
    (
        "a request by `scx` against one by `exit`",
        "scx-requests",
        |all| {
            let parts = flat(all, |one| rows(one, "parts"));
            let cost = parts.iter().find(|one| one["part"] == "cost")?;
            Some(format!("{:.2}", cost["percent"].as_f64()? / 100.0))
        },
    ),
];

/// The table of `make test`; `None` unless each promise has its figure.
pub fn short(inputs: &[Value]) -> Option<String> {
    table(SHORT, inputs)
}

/// The same of `make test-long`.
pub fn long(inputs: &[Value]) -> Option<String> {
    table(LONG, inputs)
}

fn table(promises: &[HoldsRow], inputs: &[Value]) -> Option<String> {
    let mut table = head(&["what (emulated)", "figure", "scenario"]);
    for (what, scenario, figure) in promises {
        let reports = inputs.iter().flat_map(reports);
        // Each draw has one.
        let draws = reports.map(|one| &one["result"]);
        let own = draws.filter(|one| {
            let name = one["scenario"].as_str().unwrap_or_default();
            name.split(':').next() == Some(scenario)
        });
        let own: Vec<&Value> = own.collect();
        let figure = figure(&own).filter(|_| !own.is_empty())?;
        table += &row([(*what).to_owned(), figure, format!("`{scenario}`")]);
    }
    Some(table)
}

/// The parts of each report.
fn flat<'a, I>(all: &[&'a Value], part: impl Fn(&'a Value) -> I) -> Vec<&'a Value>
where
    I: Iterator<Item = &'a Value>,
{
    all.iter().flat_map(|one| part(one)).collect()
}

/// Two parts of each report, where it has them.
fn both<'a>(all: &[&'a Value], first: &str, second: &str) -> Vec<&'a Value> {
    let parts = all.iter().flat_map(|one| [&one[first], &one[second]]);
    parts.filter(|part| part.is_object()).collect()
}

/// A number, or of how many a list is.
fn count(value: &Value) -> usize {
    let number = value
        .as_u64()
        .and_then(|number| usize::try_from(number).ok());
    number.unwrap_or_else(|| value.as_array().map_or(0, Vec::len))
}

/// `0 of 1,200`, over all.
fn wrong_of(all: &[&Value], wrong: &str, of: &str) -> Option<String> {
    let sum = |key: &str| all.iter().map(|one| count(&one[key])).sum::<usize>();
    let whole = sum(of);
    (whole > 0).then(|| format!("{} of {}", thousands(sum(wrong)), thousands(whole)))
}

/// `0 after 94`: things that are left, and kills.
fn after_kills(all: &[&Value], kills: &str) -> Option<String> {
    let sum = |key: &str| all.iter().map(|one| count(&one[key])).sum::<usize>();
    let kills = sum(kills);
    (kills > 0).then(|| format!("{} after {kills}", sum("left")))
}

/// How far from 1 a ratio of the reports' rows is at most, in percent.
fn off(all: &[&Value], key: &str) -> Option<String> {
    let rows = flat(all, |one| rows(one, "rows"));
    let off = rows
        .iter()
        .filter_map(|one| Some((one[key].as_f64()? - 1.0).abs()));
    Some(format!("{:.1}", 100.0 * off.reduce(f64::max)?))
}

fn thousands(number: usize) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", thousands(number / 1000), number % 1000),
    }
}

#[cfg(test)]
mod tests {
    //! A figure is over all reports of its scenario; without one there is no table.

    use serde_json::json;

    use super::*;

    #[test]
    fn a_figure_is_over_all_reports() {
        let (one, two) = (
            json!({ "opps_wrong": 0, "opps_checked": 1_016, "rows": [{ "is": 0.99 }] }),
            json!({ "opps_wrong": 2, "opps_checked": 16, "rows": [{ "is": 1.018 }] }),
        );
        let all = [&one, &two];
        let wrong = wrong_of(&all, "opps_wrong", "opps_checked");
        assert_eq!(wrong.as_deref(), Some("2 of 1,032"));
        assert_eq!(wrong_of(&all, "opps_wrong", "none"), None);
        assert_eq!(off(&all, "is").as_deref(), Some("1.8"));
        assert_eq!(off(&all, "none"), None);
        assert_eq!(count(&json!(["a", "b"])), 2);
    }

    #[test]
    fn without_a_report_there_is_no_table() {
        for make in [short, long] {
            assert_eq!(make(&[json!({}), json!({ "results": [] })]), None);
        }
    }
}
