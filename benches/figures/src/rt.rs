// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of what the lab's scenarios of real-time hosts reported.

use serde_json::Value;

use super::lab::result;
use super::markdown::{head, row};
use vcpufreq_bench::report_json::{number, rows};

/// cyclictest on a vCPU that drives its frequency, and beside governor performance before and after.
pub fn latency(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "vcpufreq", "rt-latency")?;
    let fixed = result["with_performance"].as_array()?;
    let mut table = head(&[
        "on a FIFO vCPU (emulated)",
        "it drives its frequency",
        "governor performance, before and after",
    ]);
    for (name, key) in [("longest latency [µs]", "max_us"), ("mean [µs]", "avg_us")] {
        let both: Vec<_> = fixed.iter().map(|one| one[key].to_string()).collect();
        let own = result["apart"]["latency"][key].as_u64()?.to_string();
        table += &row([name.to_owned(), own, both.join(", ")]);
    }
    let energy = &result["phases"]["energy_of_5_s_uj"];
    let joules = |of: &str| Some(format!("{:.2}", energy[of].as_f64()? / 1e6));
    let name = "energy in 5 s at 40 % load, with the speed model [J]".to_owned();
    Some(table + &row([name, joules("bridge")?, joules("performance")?]))
}

/// The periodic loop in the kernel.
pub fn periodic_loop(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "vcpufreq", "rt-loop")?;
    let mut table = head(&[
        "scheduler, load on its CPU (emulated)",
        "under 8, over 12 ms",
        "longest, shortest [ms]",
    ]);
    for one in rows(result, "rows").chain([&result["in_guest"]]) {
        let ms = |key: &str| number(&one[key], "us");
        table += &row([
            format!("{}, {}", one["scheduler"].as_str()?, one["load"].as_str()?),
            format!("{}, {}", one["under_8ms"], one["over_12ms"]),
            format!("{}, {}", ms("longest_us"), ms("shortest_us")),
        ]);
    }
    Some(table)
}

/// A guest with disk and network, by each way to start it.
pub fn io(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "", "rt-io")?;
    let ways = ["by_run", "by_tool", "by_hand"].map(|way| &result[way]);
    let mut table = head(&[
        "on a FIFO vCPU beside I/O (emulated)",
        "`run`",
        "`qemu --rt`",
        "QEMU by hand",
    ]);
    let mut add = |name: &str, of: &dyn Fn(&Value) -> Option<String>| {
        let cells = ways.map(|way| of(way).unwrap_or_else(|| "-".to_owned()));
        table += &row(std::iter::once(name.to_owned()).chain(cells));
    };
    for (name, key) in [("longest latency [µs]", "max_us"), ("mean [µs]", "avg_us")] {
        add(name, &|way| Some(way["latency"][key].as_u64()?.to_string()));
    }
    add("energy of its pCPU [J]", &|way| {
        Some(format!("{:.2}", way["energy_uj"].as_f64()? / 1e6))
    });
    add("other threads that ran there, or may", &|way| {
        let lists = ["strangers", "vmm_threads_that_may_run_there"];
        let lens = lists.map(|list| way[list].as_array().map(Vec::len));
        Some((lens[0]? + lens[1]?).to_string())
    });
    add("interrupts that go there", &|way| {
        Some(way["interrupts_there"].as_u64()?.to_string())
    });
    Some(table)
}

#[cfg(test)]
mod tests {
    //! Each row has its scenario's figures; what isn't there gives no table.

    use serde_json::json;

    use super::*;

    fn input(result: &Value) -> [Value; 1] {
        [json!({ "results": [{ "host": "2+2 host vcpufreq", "result": result }] })]
    }

    #[test]
    fn rows_are_what_scenarios_reported() {
        let of = |max: u32| json!({ "max_us": max, "avg_us": 60 });
        let energy = json!({ "bridge": 399_604, "performance": 3_730_143 });
        let table = latency(&input(&json!({
            "scenario": "rt-latency", "apart": { "latency": of(2585) },
            "with_performance": [of(1528), of(2675)], "phases": { "energy_of_5_s_uj": energy },
        })));
        let table = table.unwrap();
        assert!(table.contains("| 2585 | 1528, 2675 |"), "{table}");
        assert!(table.ends_with("| 0.40 | 3.73 |\n"), "{table}");
        let row = |scheduler: &str| {
            json!({ "scheduler": scheduler, "load": "none", "under_8ms": 0, "over_12ms": 1,
                "longest_us": 12_100, "shortest_us": 8290 })
        };
        let table = periodic_loop(&input(&json!({
            "scenario": "rt-loop:x", "rows": [row("normal")], "in_guest": row("guest"),
        })));
        let table = table.unwrap();
        assert!(
            table.contains("| normal, none | 0, 1 | 12.1, 8.3 |"),
            "{table}"
        );
        assert!(table.contains("| guest, none |"), "{table}");
        let way = json!({ "latency": of(900), "energy_uj": 1_200_000, "strangers": ["a"],
            "vmm_threads_that_may_run_there": ["b"], "interrupts_there": 3 });
        let table = io(&input(
            &json!({ "scenario": "rt-io", "by_run": way, "by_hand": way }),
        ));
        let table = table.unwrap();
        assert!(
            table.contains("| longest latency [µs] | 900 | - | 900 |"),
            "{table}"
        );
        assert!(table.contains(" or may | 2 | - | 2 |"), "{table}");
        assert_eq!(table.lines().count(), 7);
        for make in [latency, periodic_loop, io] {
            assert_eq!(make(&[json!({})]), None);
        }
    }
}
