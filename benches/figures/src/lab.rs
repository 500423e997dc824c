// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of what the lab's scenarios reported: `demo.json`, and
//! `test-long.json`, whose results each have the host that they ran on.

use serde_json::Value;

use super::markdown::{head, row};
use vcpufreq_bench::report_json::{cell, find, metrics, number, rows, with_unit};

/// A busy vCPU's requests, each once: the request, the host's frequency, the guest's read.
pub fn demo(inputs: &[Value]) -> Option<String> {
    let demo = inputs.first()?;
    let names = [
        "vCPU on",
        "guest asks, host runs at, guest reads [MHz] (emulated)",
    ];
    let mut table = head(&[names[0], names[1], "uclamp of the thread"]);
    let mut pcpus: Vec<&Value> = rows(demo, "rows").map(|row| &row["pcpu"]).collect();
    pcpus.dedup();
    for pcpu in pcpus {
        let of_pcpu: Vec<&Value> = rows(demo, "rows")
            .filter(|row| row["pcpu"] == *pcpu)
            .collect();
        // Up and down again: the first half.
        let up = of_pcpu.get(..of_pcpu.len().div_ceil(2))?;
        let mhz = |row: &&Value| {
            let all =
                ["asked_khz", "host_khz", "guest_reads_khz"].map(|key| number(&row[key], "kHz"));
            match all.iter().all(|one| *one == all[0]) {
                true => all[0].clone(),
                false => all.join(", "),
            }
        };
        let clamp = |row: &&Value| row["uclamp_min"].to_string();
        let list =
            |of: &dyn Fn(&&Value) -> String| up.iter().map(of).collect::<Vec<_>>().join("; ");
        table += &row([format!("pCPU {pcpu}"), list(&mhz), list(&clamp)]);
    }
    (!table.is_empty() && rows(demo, "rows").next().is_some()).then_some(table)
}

/// Each host with what a scenario reported there. Those on real-time kernels are last: a table that
/// takes the first one has the standard kernel's.
pub(super) fn reports(input: &Value) -> impl Iterator<Item = &Value> {
    let on_rt = |row: &&Value| {
        let host = row["host"].as_str();
        host.is_some_and(|name| name.contains(" host Rt "))
    };
    let mut all: Vec<_> = rows(input, "results").collect();
    all.sort_by_key(on_rt);
    all.into_iter()
}

/// What a scenario reported on a host whose name has these words, and not those that are behind a `-`.
pub(super) fn result<'a>(input: &'a Value, host: &str, scenario: &str) -> Option<&'a Value> {
    let on_host = |row: &&Value| {
        let name = row["host"].as_str().unwrap_or_default();
        let has = |word: &str| name.split(' ').any(|one| one == word);
        host.split_whitespace()
            .all(|word| word.strip_prefix('-').map_or(has(word), |word| !has(word)))
    };
    let mut own = reports(input).filter(on_host).map(|row| &row["result"]);
    own.find(|row| {
        row["scenario"]
            .as_str()
            .is_some_and(|name| name.starts_with(scenario))
    })
}

/// Ramps of the drawn topologies: guest with the bridge, host.
pub fn drawn(inputs: &[Value]) -> Option<String> {
    let hosts = ["drawn:1", "drawn:2", "drawn:3"];
    let mut reports = Vec::new();
    let mut names = vec!["metric [ms] (emulated)".to_owned()];
    for host in hosts {
        let report = &result(inputs.first()?, host, "bench:")?["report"];
        let capacities =
            rows(&report["conditions"], "clusters").map(|it| it["capacity"].to_string());
        names.push(format!(
            "`{host}`: {}",
            capacities.collect::<Vec<_>>().join(", ")
        ));
        reports.push(report);
    }
    let mut table = head(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for of in [
        ("big-ramp", "to_fmax"),
        ("step-down", "to_fmin"),
        ("new-thread", "to_fmax"),
        ("little-to-big", "migrate"),
        ("little-to-big", "to_big_fmax"),
    ] {
        let both = |report: &&Value| {
            let shown = |variant| find(report, of, variant).map_or("-".to_owned(), cell);
            format!("{}, {}", shown("vm+bridge"), shown("host"))
        };
        table +=
            &row(std::iter::once(format!("{} {}", of.0, of.1)).chain(reports.iter().map(both)));
    }
    Some(table)
}

/// Ramps of QEMU's guests: host and guest on two topologies.
pub fn qemu_ramps(inputs: &[Value]) -> Option<String> {
    let reports = ["2+2 qemu", "pixel6 qemu"]
        .map(|host| Some(&result(inputs.first()?, host, "bench:big-ramp")?["report"]));
    let [Some(first), Some(second)] = reports else {
        return None;
    };
    let names = ["median [ms] (emulated)", "`2+2`: host", "guest"];
    let mut table = head(&[&names[..], &["`pixel6`: host", "guest"]].concat());
    for of in [
        ("big-ramp", "to_fmax"),
        ("step-down", "to_fmin"),
        ("new-thread", "to_fmax"),
        ("little-to-big", "to_big_fmax"),
    ] {
        let median = |report: &Value, variant| {
            find(report, of, variant).map_or("-".to_owned(), |row| number(&row["median"], "us"))
        };
        let both = |report: &Value| ["host", "vm+bridge"].map(|of| median(report, of));
        let cells = [first, second].map(both).into_iter().flatten();
        table += &row(std::iter::once(format!("{} {}", of.0, of.1)).chain(cells));
    }
    Some(table)
}

/// Beside other load, each way of adding it, and none: until the needed frequency, and energy.
pub fn contended_ways(inputs: &[Value]) -> Option<String> {
    let mut table = head(&["[ms]; [mJ] (emulated)", "host", "max", "`--sum`", "scx"]);
    for topology in ["2+2", "4+3+1", "pixel6"] {
        let host = format!("{topology} vcpufreq");
        let report = &result(inputs.first()?, &host, "bench:contended.new25:")?["report"];
        table += &contended_ways_on(topology, report);
    }
    Some(table)
}

fn contended_ways_on(topology: &str, report: &Value) -> String {
    let mut rows = String::new();
    for case in metrics(report, "contended") {
        let Some(case) = case.strip_suffix(".to_needed") else {
            continue;
        };
        let median = |metric: &str, variant| {
            let metric = format!("{case}.{metric}");
            let row = find(report, ("contended", &metric), variant)?;
            Some(number(&row["median"], row["unit"].as_str()?))
        };
        let cells = ["host", "max", "vm+bridge", "scx"].map(|of| {
            let both = ["to_needed", "energy"].map(|metric| median(metric, of));
            both.map(|one| one.unwrap_or("-".to_owned())).join("; ")
        });
        rows += &row(std::iter::once(format!("`{topology}` {case}")).chain(cells));
    }
    rows
}

/// What a guest loses that reads its own request: medians and extremes.
pub fn side_channel(inputs: &[Value]) -> Option<String> {
    let report = &result(inputs.first()?, "2+2", "bench:contended.part50:")?["report"];
    let mut table = head(&["scenario, metric (emulated)", "`table`", "`request`"]);
    for of in [
        ("big-ramp", "to_fmax"),
        ("step-down", "to_fmin"),
        ("new-thread", "to_fmax"),
        ("little-to-big", "migrate"),
        ("contended", "part50.energy"),
    ] {
        let rows = ["vm+bridge", "request"].map(|variant| find(report, of, variant));
        let [Some(first), Some(second)] = rows else {
            return None;
        };
        let name = format!("{}, {}", of.0, with_unit(report, of));
        table += &row([name, cell(first), cell(second)]);
    }
    Some(table)
}

/// How long after a write its clamp is in force: medians and the longest, in µs.
pub fn in_force(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "", "in-force")?;
    let mut table = head(&[
        "median (longest) [µs] (emulated)",
        "vCPU sleeps",
        "worker runs",
        "clamp in force",
        "from when the pCPU was idle (writes that count)",
    ]);
    for (name, key) in [
        ("vCPU sleeps after the write", "vcpu_sleeps"),
        (
            "the same, host in deep idle",
            "vcpu_sleeps_host_in_deep_idle",
        ),
        ("vCPU stays busy", "vcpu_stays_busy"),
    ] {
        let times = |of: &str| {
            let all = &result[key][of];
            match all["median"].as_u64() {
                Some(median) => format!("{median} ({})", all["max"]),
                None => "-".to_owned(),
            }
        };
        let counted = result[key]["clamp_after_pcpu_idle_us"]["n"].to_string();
        table += &row([
            name.to_owned(),
            times("vcpu_sleeps_after_us"),
            times("worker_runs_after_us"),
            times("clamp_after_us"),
            format!("{} ({counted})", times("clamp_after_pcpu_idle_us")),
        ]);
    }
    Some(table)
}

/// How a clamp's way makes the frequency dip.
pub fn dips(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "", "bpf-dip")?;
    let mut table = head(&["way of a request (emulated)", "dips by policy", "exits"]);
    let mut ways: Vec<&Value> = rows(result, "rows").map(|one| &one["way"]).collect();
    ways.dedup();
    for way in ways {
        let own: Vec<_> = rows(result, "rows")
            .filter(|one| one["way"] == *way)
            .collect();
        let of_policy = own.iter().map(|one| {
            let policy = one["scheduler"].as_str().unwrap_or_default();
            format!("{policy} {}", one["dips"])
        });
        let dips = match own.iter().all(|one| one["dips"] == own[0]["dips"]) {
            true => own[0]["dips"].to_string(),
            false => of_policy.collect::<Vec<_>>().join("; "),
        };
        let exits = own.first()?["exits"].to_string();
        table += &row([way.as_str()?.to_owned(), dips, exits]);
    }
    Some(table)
}

/// new-thread by each path.
pub fn ramps(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "", "ramps")?;
    let mut table = head(&[
        "new-thread, to_fmax [ms] (emulated)",
        "median",
        "all repeats",
    ]);
    for one in rows(result, "rows") {
        let all: Vec<String> = rows(one, "values").map(|us| number(us, "us")).collect();
        let path = format!("`{}`", one["path"].as_str()?);
        table += &row([path, number(&one["to_fmax_us"], "us"), all.join(", ")]);
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    //! Results are found by host and scenario; what isn't there gives no table.

    use serde_json::json;

    use super::*;

    #[test]
    fn tables_are_made_of_what_scenarios_reported() {
        let ramp = json!({ "scenario": "ramps", "rows": [
            { "path": "exit", "to_fmax_us": 13_000, "values": [12_000, 13_000, 14_000] }] });
        let times = json!({ "n": 3, "median": 32, "max": 70 });
        let in_force_result =
            json!({ "scenario": "in-force", "vcpu_sleeps": { "clamp_after_us": times } });
        let bench = json!({ "scenario": "bench:x", "report": { "results": [
            { "scenario": "big-ramp", "metric": "to_fmax", "variant": "host", "unit": "us",
              "median": 1000, "min": 1000, "max": 1000 }] } });
        let mut results = vec![json!({ "host": "2+2 host", "result": ramp })];
        results.push(json!({ "host": "2+2 host", "result": in_force_result }));
        for seed in 1..=3 {
            results.push(json!({ "host": format!("drawn:{seed} host"), "result": bench }));
        }
        let rows = [
            ("big-ramp", "to_fmax"),
            ("step-down", "to_fmin"),
            ("new-thread", "to_fmax"),
            ("little-to-big", "migrate"),
            ("contended", "part50.energy"),
        ]
        .map(|(scenario, metric)| {
            ["vm+bridge", "request"].map(|variant| {
                json!({ "scenario": scenario, "metric": metric, "variant": variant, "unit": "us",
                    "median": 2000, "min": 1000, "max": 3000 })
            })
        });
        let report = json!({ "results": rows.concat() });
        let cost = json!({ "scenario": "bench:contended.part50:x", "report": report });
        results.push(json!({ "host": "2+2 host", "result": cost }));
        let bench = json!({ "scenario": "bench:big-ramp:x", "report": bench["report"] });
        for host in ["2+2 host qemu", "pixel6 host qemu"] {
            results.push(json!({ "host": host, "result": bench }));
        }
        let dip = json!({ "scheduler": "FIFO", "way": "exit, cgroup", "dips": 0, "exits": 102 });
        let thread = |policy: &str, dips: u32| json!({ "scheduler": policy, "way": "thread", "dips": dips, "exits": 102 });
        let (other, fifo) = (thread("OTHER", 9), thread("FIFO", 10));
        let on_rt = json!({ "scenario": "bpf-dip", "rows": [] });
        results.push(json!({ "host": "2+2 host Rt guest", "result": on_rt }));
        let dips_result = json!({ "scenario": "bpf-dip", "rows": [dip, other, fifo] });
        results.push(json!({ "host": "2+2 host", "result": dips_result }));
        let input = [json!({ "results": results })];
        let has = |table: Option<String>, part: &str| {
            let table = table.unwrap();
            assert!(table.contains(part), "{part}: {table}");
        };
        has(ramps(&input), "| `exit` | 13.0 | 12.0, 13.0, 14.0 |");
        has(
            in_force(&input),
            "| vCPU sleeps after the write | - | - | 32 (70) |",
        );
        has(dips(&input), "| exit, cgroup | 0 | 102 |");
        has(
            side_channel(&input),
            "| contended, part50.energy [ms] | 2.0 (1.0–3.0) | 2.0 (1.0–3.0) |",
        );
        has(dips(&input), "| thread | OTHER 9; FIFO 10 | 102 |");
        has(
            drawn(&input),
            "| big-ramp to_fmax | -, 1.0 | -, 1.0 | -, 1.0 |",
        );
        has(
            qemu_ramps(&input),
            "| big-ramp to_fmax | 1.0 | - | 1.0 | - |",
        );
        let row = |khz| json!({ "pcpu": 0, "asked_khz": khz, "host_khz": khz, "guest_reads_khz": khz, "uclamp_min": 9 });
        let rows = json!({ "rows": [row(600_000), row(1_800_000), row(1_800_000), row(600_000)] });
        has(demo(&[rows]), "| pCPU 0 | 600; 1800 | 9; 9 |");
        let nothing = [json!({})];
        for make in [demo, dips, drawn, in_force, qemu_ramps, ramps, side_channel] {
            assert_eq!(make(&nothing), None);
        }
    }

    #[test]
    fn each_way_of_adding_other_load_has_a_column() {
        let row = |metric: &str| {
            json!({ "scenario": "contended", "metric": format!("new25.{metric}"), "variant": "max",
                "unit": "us", "median": 3000 })
        };
        let result = json!({ "scenario": "bench:contended.new25:x",
            "report": { "results": [row("to_needed"), row("above"), row("energy")] } });
        let hosts = ["2+2", "4+3+1", "pixel6"].map(|name| format!("{name} host vcpufreq"));
        let results = hosts
            .each_ref()
            .map(|host| json!({ "host": host, "result": result }));
        let table = contended_ways(&[json!({ "results": results })]).unwrap();
        assert!(
            table.ends_with("\n| `pixel6` new25 | -; - | 3.0; 3.0 | -; - | -; - |\n"),
            "{table}"
        );
        assert_eq!(table.lines().count(), 5);
        let first = json!({ "results": results[..1] });
        assert_eq!(contended_ways(&[first]), None);
        assert_eq!(contended_ways(&[json!({})]), None);
    }
}
