// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How late each reader sees a request that a guest stores in its RAM, and what each costs: tables of
//! what `qemu-late` reported.

use std::collections::BTreeSet;

use serde_json::Value;

use super::lab::result;
use super::markdown::{head, row};
use vcpufreq_bench::report_json::rows;

/// Readers, as the scenario names them, and columns.
const COLUMNS: [(&str, &str); 4] = [
    ("server", "thread"),
    ("exit-seen", "program sees it"),
    ("exit", "program and a thread"),
    ("doorbell", "doorbell"),
];
/// What a vCPU does around its stores.
const AROUND: [(&str, &str); 4] = [
    ("busy", "is busy"),
    ("naps", "idles for 20 ms after each"),
    (
        "bursts",
        "works for 20 ms after a rise, idles for 100 ms after a fall",
    ),
    ("rests", "idles for 100 ms after each"),
];

/// Medians and the longest, in ms, of each vCPU; then what each reader costs.
pub fn stores(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "", "qemu-late")?;
    let names = COLUMNS.map(|(_, name)| name);
    let what = "rise; fall: median (longest) [ms] (emulated)";
    let mut table = head(&[&[what][..], &names].concat());
    let vcpus = rows(result, "rows").filter_map(|row| row["vcpu"].as_u64());
    for vcpu in vcpus.collect::<BTreeSet<_>>() {
        for (around, text) in AROUND {
            let cells = COLUMNS.map(|(reader, _)| {
                let [rise, fall] = ["rise", "fall"].map(|direction| {
                    let mut own = rows(result, "rows");
                    let found = own.find(|row| {
                        row["reader"] == reader
                            && row["direction"] == direction
                            && row["around"] == around
                            && row["vcpu"] == vcpu
                    });
                    found.and_then(late).unwrap_or_else(|| "-".to_owned())
                });
                format!("{rise}; {fall}")
            });
            table += &row(std::iter::once(format!("vCPU {vcpu} {text}")).chain(cells));
        }
    }
    Some(format!("{table}\n{}", costs(result)))
}

/// Of one reader, vCPU and direction.
fn late(found: &Value) -> Option<String> {
    let ms = |key: &str| Some(found[key].as_f64()? / 1000.0);
    let (median, longest) = (ms("median_us")?, ms("longest_us")?);
    let never = match found["never"].as_u64() {
        Some(0) => String::new(),
        never => format!(", {} never", never?),
    };
    Some(format!("{median:.1} ({longest:.1}{never})"))
}

fn costs(result: &Value) -> String {
    let readers = ["server", "exit", "doorbell"];
    let named = COLUMNS
        .iter()
        .filter(|(reader, _)| readers.contains(reader));
    let names: Vec<_> = named.map(|(_, name)| *name).collect();
    let mut table = head(&[&["(emulated)"][..], &names].concat());
    let rate = |of: &Value, key: &str| Some(of[key].as_f64()? / of["seconds"].as_f64()?);
    type Cost<'a> = &'a dyn Fn(&Value) -> Option<String>;
    let all: [(&str, Cost<'_>); 4] = [
        ("a request, in stores", &|cost| {
            let times = cost["request_ns"].as_f64()? / cost["store_ns"].as_f64()?;
            Some(format!("{times:.1}"))
        }),
        ("wake-ups a second, guest idle", &|cost| {
            Some(format!("{:.1}", rate(&cost["idle"], "wakeups")?))
        }),
        ("wake-ups a second, each vCPU busy", &|cost| {
            Some(format!("{:.0}", rate(&cost["busy"], "wakeups")?))
        }),
        ("each exit of a vCPU takes longer by [ns]", &|cost| {
            Some(cost["busy"]["program"]["ns_each"].as_u64()?.to_string())
        }),
    ];
    for (name, cell) in all {
        let cells = readers.map(|reader| {
            let mut costs = rows(result, "costs");
            let own = costs.find(|cost| cost["reader"] == reader);
            own.and_then(cell).unwrap_or_else(|| "-".to_owned())
        });
        table += &row(std::iter::once(name.to_owned()).chain(cells));
    }
    table
}

#[cfg(test)]
mod tests {
    //! Promise: a row for what each vCPU does and for each cost, and a gap where nothing was measured.
    use serde_json::json;

    use super::*;

    #[test]
    fn each_reader_has_its_column() {
        let row = |reader, vcpu, never| {
            json!({ "reader": reader, "direction": "rise", "around": "busy", "vcpu": vcpu,
                "median_us": 1240, "longest_us": 7000, "never": never })
        };
        let ram = [row("server", 0, 0), row("exit", 1, 0)];
        let shm = [row("doorbell", 0, 2), row("doorbell", 1, 0)];
        let rows = [ram, shm].concat();
        let costs = json!([{
            "reader": "exit", "request_ns": 60, "store_ns": 50,
            "idle": { "seconds": 10, "wakeups": 5 },
            "busy": { "seconds": 4, "wakeups": 8, "program": { "ns_each": 690 } },
        }]);
        let result = json!({ "scenario": "qemu-late", "rows": rows, "costs": costs });
        let input = json!({ "results": [{ "host": "2+2 host", "result": result }] });
        let table = stores(&[input]).unwrap();
        for line in [
            "| vCPU 0 is busy | 1.2 (7.0); - | -; - | -; - | 1.2 (7.0, 2 never); - |",
            "| a request, in stores | - | 1.2 | - |",
            "| wake-ups a second, guest idle | - | 0.5 | - |",
            "| each exit of a vCPU takes longer by [ns] | - | 690 | - |",
        ] {
            assert!(table.contains(line), "{table}");
        }
        assert_eq!(table.lines().count(), 2 + 8 + 1 + 2 + 4);
        assert_eq!(stores(&[json!({})]), None);
    }
}
