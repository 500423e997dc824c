// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of the bench, and the list of all of its figures.

use std::fmt::Write as _;

use serde_json::Value;

use super::lab;
use super::markdown::{head, row};
use vcpufreq_bench::report_json::{
    VARIANTS, cell, find, metrics as metrics_of, number, scenarios, unit, with_unit,
};

/// Metrics of README.md.
const README: [(&str, &str); 5] = [
    ("big-ramp", "to_fmax"),
    ("step-down", "to_fmin"),
    ("new-thread", "to_fmax"),
    ("little-to-big", "migrate"),
    ("io-wake", "to_host_top"),
];
/// Metrics of docs/bench.md.
const METRICS: [(&str, &str); 10] = [
    ("big-ramp", "to_fmax"),
    ("new-thread", "to_fmax"),
    ("step-down", "to_fmin"),
    ("step-down", "other_thread.to_fmin"),
    ("little-to-big", "migrate"),
    ("little-to-big", "to_big_fmax"),
    ("io-wake", "to_host_top"),
    ("placement", "energy"),
    ("periodic", "efficiency"),
    ("periodic", "at_edge.efficiency"),
];
/// Ramps of protected guests.
const PROTECTED: [(&str, &str); 6] = [
    ("big-ramp", "to_fmax"),
    ("step-down", "to_fmin"),
    ("step-down", "other_thread.to_fmin"),
    ("new-thread", "to_fmax"),
    ("little-to-big", "to_big_fmax"),
    ("io-wake", "to_host_top"),
];
const JOBS: [&str; 5] = ["infer_cached", "infer_small", "infer_large", "io", "frames"];
/// The last two rows of README.md's table are losses.
const OTHER_THREAD: (&str, &str) = ("step-down", "other_thread.to_fmin");
const IO_ENERGY: &str = "io.energy_to_host_normalised";

/// README.md's table, of the topology `2+2`.
pub fn readme(reports: &[Value]) -> Option<String> {
    let [report] = reports else { return None };
    let mut table = head(&["scenario, metric", "host", "guest", "guest with vcpufreq"]);
    let metric = |of: (&str, &str)| {
        let cells = VARIANTS.map(|variant| shown(report, of, variant));
        named(report, of, ", ").map(|name| row(std::iter::once(name).chain(cells)))
    };
    for of in README {
        table += &metric(of)?;
    }
    let none = || "-".to_owned();
    let [vm, bridge] =
        ["vm", "vm+bridge"].map(|variant| score_and_energy(report, "frames", variant));
    table += &row([
        "frames, score; energy, % of the host's".to_owned(),
        none(),
        vm,
        bridge,
    ]);
    table += &metric(OTHER_THREAD)?;
    let [vm, bridge] = ["vm", "vm+bridge"].map(|of| shown(report, ("work", IO_ENERGY), of));
    Some(table + &row(["io, energy, % of the host's".to_owned(), none(), vm, bridge]))
}

/// Each metric of host and guests, of two topologies.
pub fn metrics(reports: &[Value]) -> Option<String> {
    let [first, second] = reports else {
        return None;
    };
    let names = ["metric (emulated)", "`2+2`: host", "vm", "vm+bridge"];
    let mut table = head(&[&names[..], &["`4+3+1`: host", "vm", "vm+bridge"]].concat());
    for of in METRICS {
        let cells = [first, second].map(|report| {
            let vm = find(report, of, "vm").map_or("-".to_owned(), median);
            [
                shown(report, of, "host"),
                vm,
                shown(report, of, "vm+bridge"),
            ]
        });
        table += &row(std::iter::once(named(first, of, " ")?).chain(cells.into_iter().flatten()));
    }
    Some(table)
}

/// Until a vCPU beside other load has the frequency that it needs, of two topologies.
pub fn contended(reports: &[Value]) -> Option<String> {
    let names = ["medians [ms] (emulated)", "`2+2`: host", "vm+bridge"];
    let mut table = head(&[&names[..], &["`4+3+1`: host", "vm+bridge"]].concat());
    for case in CONTENDED {
        let metric = format!("{case}.to_needed");
        let of = |report| {
            ["host", "vm+bridge"].map(|variant| {
                find(report, ("contended", &metric), variant).map_or("-".to_owned(), median)
            })
        };
        table += &row(std::iter::once(case.to_owned()).chain(reports.iter().flat_map(of)));
    }
    find(reports.first()?, ("contended", "new25.to_needed"), "host")?;
    (reports.len() == 2).then_some(table)
}

/// Score and energy of each job, of two topologies.
pub fn jobs(reports: &[Value]) -> Option<String> {
    let name = "job: score; energy, % of the host's (emulated)";
    let mut table = head(&[name, "`2+2`: vm", "vm+bridge", "`4+3+1`: vm", "vm+bridge"]);
    for job in JOBS {
        let of = |report| ["vm", "vm+bridge"].map(|variant| score_and_energy(report, job, variant));
        table += &row(std::iter::once(job.to_owned()).chain(reports.iter().flat_map(of)));
    }
    (reports.len() == 2).then_some(table)
}

/// Ramps and jobs of protected guests.
pub fn protected(inputs: &[Value]) -> Option<String> {
    let report = &lab::result(inputs.first()?, "2+2 protected", "bench:big-ramp")?["report"];
    let mut table = head(&["metric (emulated)", "host", "vm", "vm+bridge"]);
    for of in PROTECTED {
        let cells = VARIANTS.map(|variant| shown(report, of, variant));
        table += &row(std::iter::once(named(report, of, " ")?).chain(cells));
    }
    for job in ["infer_small", "io", "frames"] {
        let of = |variant| score_and_energy(report, job, variant);
        let name = format!("{job}: score; energy, % of the host's");
        table += &row([name, "-".to_owned(), of("vm"), of("vm+bridge")]);
    }
    Some(table)
}

/// Requests of fio, of the host, of a guest, of a protected one and of QEMU's.
pub fn fio(inputs: &[Value]) -> Option<String> {
    let of = |host| Some(&lab::result(inputs.first()?, host, "bench:fio")?["report"]);
    let [plain, protected, qemu] = ["2+2 vcpufreq -protected", "2+2 protected", "2+2 qemu"].map(of);
    let (plain, protected, qemu) = (plain?, protected?, qemu?);
    let mut table = head(&[
        "fio (emulated)",
        "host [1/s; mJ]",
        "vm: % of the host's",
        "vm+bridge",
        "protected vm",
        "protected vm+bridge",
        "QEMU's vm",
        "QEMU's vm+bridge",
    ]);
    for job in FIO_JOBS {
        let [score, energy] = ["score", "energy"].map(|what| format!("{job}.{what}"));
        let figure = |report, metric: &str, variant: &str| {
            find(report, ("fio", metric), variant)?["median"].as_f64()
        };
        let host = |metric: &str| figure(plain, metric, "host").map(|value| value / 1000.0);
        let host = format!("{:.0}; {:.1}", host(&score)?, host(&energy)?);
        let guest = |report, variant| {
            let percent = |metric: &str| {
                let (own, host) = (
                    figure(report, metric, variant)?,
                    figure(report, metric, "host")?,
                );
                Some(100.0 * own / host)
            };
            Some(format!("{:.0}; {:.0}", percent(&score)?, percent(&energy)?))
        };
        let mut cells = vec![job.to_owned(), host];
        for report in [plain, protected, qemu] {
            cells.extend([guest(report, "vm")?, guest(report, "vm+bridge")?]);
        }
        table += &row(cells);
    }
    Some(table)
}

/// Jobs of the bench's scenario fio.
const FIO_JOBS: [&str; 4] = ["seq_read", "seq_write", "rand_read", "rand_write"];

/// Cases of contended that have a needed frequency which is not there from the start.
const CONTENDED: [&str; 8] = [
    "new25",
    "new50",
    "woken25",
    "woken50",
    "part25",
    "part50",
    "fifo25",
    "deadline25",
];

/// `big-ramp, to_fmax [ms]`, if the host has it.
fn named(report: &Value, of: (&str, &str), between: &str) -> Option<String> {
    find(report, of, "host")?;
    Some(format!("{}{between}{}", of.0, with_unit(report, of)))
}

fn shown(report: &Value, of: (&str, &str), variant: &str) -> String {
    find(report, of, variant).map_or("-".to_owned(), cell)
}

fn median(row: &Value) -> String {
    number(&row["median"], row["unit"].as_str().unwrap_or_default())
}

fn score_and_energy(report: &Value, job: &str, variant: &str) -> String {
    let of = |what: &str| {
        let metric = format!("{job}.{what}_to_host_normalised");
        find(report, ("work", &metric), variant).map_or("-".to_owned(), median)
    };
    format!("{}; {}", of("score"), of("energy"))
}

/// All figures of all reports, a line each.
pub fn csv(reports: &[Value]) -> String {
    let mut text = "topology,scenario,metric,unit,variant,median,lowest,highest\n".to_owned();
    for report in reports {
        let topology = report["conditions"]["topology"].as_str().unwrap_or("?");
        for scenario in scenarios(report) {
            let all = metrics_of(report, scenario).into_iter();
            let all = all.flat_map(|metric| VARIANTS.map(|variant| (metric, variant)));
            for (metric, variant) in all {
                let Some(row) = find(report, (scenario, metric), variant) else {
                    continue;
                };
                let of = row["unit"].as_str().unwrap_or_default();
                let figures = ["median", "min", "max"].map(|key| number(&row[key], of));
                let (unit, figures) = (unit(of).0, figures.join(","));
                let _ = writeln!(
                    text,
                    "{topology},{scenario},{metric},{unit},{variant},{figures}"
                );
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    //! Tables have a row for each figure, in the units that people read.

    use serde_json::json;

    use super::*;

    fn report() -> Value {
        let mut rows = Vec::new();
        let shares = JOBS.iter().flat_map(|job| {
            ["score", "energy"].map(|what| format!("{job}.{what}_to_host_normalised"))
        });
        let shares: Vec<String> = shares.collect();
        let shares = shares
            .iter()
            .map(|metric| (("work", metric.as_str()), "permille"));
        for (of, unit) in METRICS.into_iter().map(|of| (of, "us")).chain(shares) {
            for variant in VARIANTS {
                rows.push(
                    json!({ "scenario": of.0, "metric": of.1, "variant": variant,
                    "unit": unit, "median": 1004, "min": 1000, "max": null }),
                );
            }
        }
        json!({ "conditions": { "topology": "2+2" }, "results": rows })
    }

    #[test]
    fn each_figure_has_its_place() {
        let one = [report()];
        let table = readme(&one).unwrap();
        assert!(
            table.contains("| big-ramp, to_fmax [ms] | 1.0 (1.0–never) |"),
            "{table}"
        );
        assert!(
            table.contains("| - | 100.4; 100.4 | 100.4; 100.4 |"),
            "{table}"
        );
        assert_eq!(table.lines().count(), 10);
        let two = [report(), report()];
        assert!(
            metrics(&two)
                .unwrap()
                .lines()
                .all(|line| line.matches('|').count() == 8)
        );
        assert!(jobs(&two).unwrap().contains("| io | 100.4; 100.4 |"));
        assert_eq!((metrics(&one), jobs(&one)), (None, None));
        assert!(csv(&one).contains("\n2+2,big-ramp,to_fmax,ms,vm,1.0,1.0,never\n"));
        let result = json!({ "scenario": "bench:big-ramp", "report": one[0] });
        let of = |host| [json!({ "results": [{ "host": host, "result": result }] })];
        let table = protected(&of("2+2 host GICv3 protected")).unwrap();
        assert_eq!(table.lines().count(), 11);
        assert!(
            table.ends_with("| - | 100.4; 100.4 | 100.4; 100.4 |\n"),
            "{table}"
        );
        assert_eq!(protected(&of("2+2 host GICv3")), None);
        assert_eq!(
            readme(&[json!({ "results": [] })]),
            None,
            "of some scenarios alone"
        );
    }

    #[test]
    fn fio_is_of_three_guests() {
        let row = |metric: String, variant: &str, median: u32| json!({ "scenario": "fio", "metric": metric, "variant": variant, "median": median });
        let report = |bridge| {
            let all = FIO_JOBS.iter().flat_map(|job| {
                ["score", "energy"].into_iter().flat_map(move |what| {
                    let of = move |variant, median| row(format!("{job}.{what}"), variant, median);
                    [
                        of("host", 200_000),
                        of("vm", 100_000),
                        of("vm+bridge", bridge),
                    ]
                })
            });
            json!({ "results": all.collect::<Vec<_>>() })
        };
        let of = |host: &str, bridge| json!({ "host": host, "result": { "scenario": "bench:fio", "report": report(bridge) } });
        let own = of("2+2 vcpufreq GICv3", 190_000);
        let all = json!({ "results": [
            of("2+2 qemu GICv3", 160_000), of("2+2 vcpufreq GICv3 protected", 180_000), own.clone(),
        ] });
        let table = fio(&[all]).unwrap();
        let line =
            "| seq_read | 200; 200.0 | 50; 50 | 95; 95 | 50; 50 | 90; 90 | 50; 50 | 80; 80 |\n";
        assert!(table.contains(line), "{table}");
        assert_eq!(table.lines().count(), 6);
        assert_eq!(fio(&[json!({ "results": [own] })]), None);
    }
}
