// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `out/paths.json`: an object with `conditions` and `results`, and what it has
//! to have. Pure: from what the scenarios and the benchmark said to the report.

use serde_json::{Value, json};

use crate::paths::PATHS;
use crate::paths_kvm::Kvm;
use crate::run::DEFAULT_CPU;

const MACHINES: [&str; 3] = ["kvm", "kvm-software", "lab"];
const NUMBERS: [&str; 5] = ["n", "median_ns", "p99_ns", "exits_user", "exits_kernel"];
/// Null where nothing is clamped, or no frequency has followed.
const TIMES: [&str; 2] = ["clamp_after_ns", "freq_after_ns"];

/// Of what the scenarios `paths` and `bpf-switch-cost` reported, and of the
/// benchmark on this machine's KVM.
pub fn report(lab: &Value, switches: &Value, kvm: Kvm) -> Value {
    let of_lab = lab["rows"].as_array().into_iter().flatten().map(|row| {
        let mut row = row.clone();
        row["machine"] = "lab".into();
        row
    });
    let results: Vec<Value> = of_lab.chain(kvm.rows).collect();
    json!({
        "conditions": {
            "lab": {
                "emulated": true, "cpu": DEFAULT_CPU, "topology": "2+2", "ns_an_instruction": 2,
                "host_kernel": lab["host_kernel"], "guest_kernel": lab["guest_kernel"],
                "clamp": "floor, by cgroup; each write asks for another OPP",
                "spacing": "a write each 2 ms; reads in batches of 50, loop included",
                "rate_limit": 0, "bare": lab["bare"],
                "added_to_a_switch_of_others_ns": switches["virtual_ns"],
            },
            "kvm": kvm.conditions,
        },
        "results": results,
    })
}

/// What a report lacks of all that it has to have, or has and must not.
pub fn wrong(report: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    if !report["conditions"].is_object() {
        wrong.push("conditions".to_owned());
    }
    let rows = report["results"].as_array().map_or(&[][..], Vec::as_slice);
    if rows.is_empty() {
        wrong.push("results".to_owned());
    }
    for row in rows {
        let one_of =
            |key: &str, names: &[&str]| row[key].as_str().is_some_and(|it| names.contains(&it));
        let key_wrong = |key: &str| match key {
            "machine" => !one_of(key, &MACHINES),
            "path" => !one_of(key, &PATHS),
            "op" => !one_of(key, &["read", "write"]),
            "n" => row[key].as_u64().is_none_or(|n| n == 0),
            _ if NUMBERS.contains(&key) => !row[key].is_number(),
            // There, but null where there is none.
            _ => row.get(key).is_none_or(|ns| !ns.is_u64() && !ns.is_null()),
        };
        let keys = ["machine", "path", "op"]
            .iter()
            .chain(&NUMBERS)
            .chain(&TIMES);
        let keys = keys.filter(|key| key_wrong(key));
        wrong.extend(keys.map(|key| format!("{key} of {row}")));
    }
    wrong
}

#[cfg(test)]
mod tests {
    //! The report has its keys; each one that it lacks, and each value that
    //! isn't one of those agreed on, is named.
    use super::*;

    /// A report of the builder, of a scenario with this row.
    fn of(row: &Value) -> Value {
        let kvm = Kvm::skipped("no /dev/kvm");
        report(&json!({ "rows": [row] }), &Value::Null, kvm)
    }

    fn row() -> Value {
        json!({
            "path": "ioeventfd", "op": "write", "n": 500, "median_ns": 12.5, "p99_ns": 20.0,
            "exits_user": 0, "exits_kernel": 500, "clamp_after_ns": null, "freq_after_ns": 8,
        })
    }

    #[test]
    fn a_whole_report_is_right() {
        assert_eq!(wrong(&of(&row())), Vec::<String>::new());
        assert_eq!(wrong(&Value::Null), ["conditions", "results"]);
    }

    #[test]
    fn each_key_that_is_missing_is_named() {
        for key in row().as_object().unwrap().keys() {
            let mut less = row();
            less.as_object_mut().unwrap().remove(key);
            let wrong = wrong(&of(&less));
            assert!(
                matches!(&wrong[..], [one] if one.starts_with(key)),
                "{key}: {wrong:?}"
            );
        }
    }

    #[test]
    fn other_values_are_named() {
        let others = [
            ("machine", json!("emulator")),
            ("path", json!("hypercall")),
            ("op", json!("load")),
            ("n", json!(0)),
            ("median_ns", Value::Null),
            ("exits_user", json!("0")),
            ("clamp_after_ns", json!("soon")),
        ];
        for (key, value) in others {
            let mut report = of(&row());
            report["results"][0][key] = value;
            let wrong = wrong(&report);
            assert!(
                matches!(&wrong[..], [one] if one.starts_with(key)),
                "{key}: {wrong:?}"
            );
        }
    }
}
