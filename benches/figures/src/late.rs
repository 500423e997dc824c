// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How late each reader sees a request that a guest stores in its RAM: a table of what `qemu-late`
//! reported.

use std::collections::BTreeSet;

use serde_json::Value;

use super::lab::result;
use super::markdown::{head, row};
use vcpufreq_bench::report_json::rows;

/// Readers and directions, as the scenario names them, and columns.
const COLUMNS: [(&str, &str, &str); 6] = [
    ("server", "rise", "thread: rise"),
    ("server", "fall", "fall"),
    ("exit", "rise", "next exit: rise"),
    ("exit", "fall", "fall"),
    ("doorbell", "rise", "doorbell: rise"),
    ("doorbell", "fall", "fall"),
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

/// Medians and the longest, in ms, of each vCPU.
pub fn stores(inputs: &[Value]) -> Option<String> {
    let result = result(inputs.first()?, "", "qemu-late")?;
    let names = COLUMNS.map(|(_, _, name)| name);
    let mut table = head(&[&["median (longest) [ms] (emulated)"][..], &names].concat());
    let vcpus = rows(result, "rows").filter_map(|row| row["vcpu"].as_u64());
    for vcpu in vcpus.collect::<BTreeSet<_>>() {
        for (around, text) in AROUND {
            let cell = |(reader, direction, _)| {
                let mut own = rows(result, "rows");
                let found = own.find(|row| {
                    row["reader"] == reader
                        && row["direction"] == direction
                        && row["around"] == around
                        && row["vcpu"] == vcpu
                });
                let ms = |key: &str| Some(found?[key].as_f64()? / 1000.0);
                let (median, longest) = (ms("median_us")?, ms("longest_us")?);
                let never = match found?["never"].as_u64() {
                    Some(0) => String::new(),
                    never => format!(", {} never", never?),
                };
                Some(format!("{median:.1} ({longest:.1}{never})"))
            };
            let cells = COLUMNS.map(|column| cell(column).unwrap_or_else(|| "-".to_owned()));
            table += &row(std::iter::once(format!("vCPU {vcpu} {text}")).chain(cells));
        }
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    //! Promise: a row for what each vCPU does, and a gap where nothing was measured.
    use serde_json::json;

    use super::*;

    #[test]
    fn each_reader_has_its_columns() {
        let row = |reader, vcpu, never| {
            json!({ "reader": reader, "direction": "rise", "around": "busy", "vcpu": vcpu,
                "median_us": 1240, "longest_us": 7000, "never": never })
        };
        let ram = [row("server", 0, 0), row("exit", 1, 0)];
        let shm = [row("doorbell", 0, 2), row("doorbell", 1, 0)];
        let rows = [ram, shm].concat();
        let result = json!({ "scenario": "qemu-late", "rows": rows });
        let input = json!({ "results": [{ "host": "2+2 host", "result": result }] });
        let table = stores(&[input]).unwrap();
        assert!(
            table.contains("| vCPU 0 is busy | 1.2 (7.0) | - | - | - | 1.2 (7.0, 2 never) | - |"),
            "{table}"
        );
        assert!(
            table.contains("| vCPU 1 is busy | - | - | 1.2 (7.0)"),
            "{table}"
        );
        assert_eq!(table.lines().count(), 2 + 8);
        assert_eq!(stores(&[json!({})]), None);
    }
}
