// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `out/paths.json`: an object with `conditions` and `results`. Pure: from
//! the results of the scenarios and the benchmark to the report.

use std::num::NonZeroU64;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::kvm::Kvm;

/// The accesses of one kind by one path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Access {
    machine: MeasuredOn,
    path: ReportedPath,
    op: Op,
    n: NonZeroU64,
    median_ns: f64,
    p99_ns: f64,
    /// The mean of writes that follow each other at once, where they were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at_once_ns: Option<f64>,
    exits_user: u64,
    exits_kernel: u64,
    /// How many accesses the exits are counted of, where these aren't the timed ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exits_of: Option<u64>,
    /// Null where nothing is clamped; the key has to be there.
    #[serde(deserialize_with = "Option::deserialize")]
    clamp_after_ns: Option<u64>,
    /// Null where no frequency has followed.
    #[serde(deserialize_with = "Option::deserialize")]
    freq_after_ns: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum MeasuredOn {
    Kvm,
    KvmSoftware,
    Lab,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ReportedPath {
    Exit,
    Ioeventfd,
    Bpf,
    Shm,
    Ram,
    Qemu,
    QemuPmu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Op {
    Read,
    Write,
}

/// The rows of the scenario `paths`, each with all of its keys.
///
/// # Errors
/// A key that a row lacks, or a value that isn't one of those agreed on.
pub fn rows_of(lab: &Value) -> Result<Vec<Access>> {
    let rows = lab["rows"].as_array().context("no rows")?;
    let row = |row: &Value| {
        let mut whole = row.clone();
        whole["machine"] = "lab".into();
        serde_json::from_value(whole).with_context(|| format!("of {row}"))
    };
    rows.iter().map(row).collect()
}

/// Of `out/paths-lab.json`, and of the benchmark on this machine's KVM.
pub fn report(input: &Value, kvm: Kvm) -> Result<Value> {
    let (lab, switches) = (&input["paths"], &input["bpf-switch-cost"]);
    let kvm_rows: Vec<Access> = serde_json::from_value(kvm.rows.into())?;
    let results = [rows_of(lab)?, kvm_rows].concat();
    Ok(json!({
        "build": input["build"],
        "packages": input["packages"],
        "conditions": {
            "lab": {
                "emulated": true, "cpu": input["cpu"], "topology": "2+2", "ns_an_instruction": 2,
                "host_kernel": lab["host_kernel"], "guest_kernel": lab["guest_kernel"],
                "clamp": "floor, by cgroup; each write asks for another OPP",
                "spacing": "a write each 2 ms, and 1,000 at once; reads in batches of 50, loop included",
                "rate_limit": 0, "bare": lab["bare"], "sandbox": lab["sandbox"],
                "switches_of_others": switches["rows"],
            },
            "kvm": kvm.conditions,
        },
        "results": results,
    }))
}

#[cfg(test)]
mod tests {
    //! Each key that a row lacks, and each value that isn't one of those agreed on, is named.
    use super::*;

    fn row() -> Value {
        json!({
            "path": "ioeventfd", "op": "write", "n": 500, "median_ns": 12.5, "p99_ns": 20.0,
            "exits_user": 0, "exits_kernel": 500, "clamp_after_ns": null, "freq_after_ns": 8,
        })
    }

    fn wrong(row: &Value) -> String {
        format!("{:#}", rows_of(&json!({ "rows": [row] })).unwrap_err())
    }

    #[test]
    fn a_whole_report_is_right() {
        let input = json!({ "paths": { "rows": [row()] }, "build": "v1", "packages": [1] });
        let report = report(&input, Kvm::skipped("no /dev/kvm")).unwrap();
        assert_eq!(report["results"][0]["machine"], "lab");
        assert_eq!(report["build"], "v1");
        assert_eq!(report["packages"], json!([1]));
        assert!(rows_of(&Value::Null).is_err());
        let mut more = row();
        more["exits_of"] = 1000.into();
        more["at_once_ns"] = 9.5.into();
        let rows = rows_of(&json!({ "rows": [more] })).unwrap();
        assert_eq!(json!(rows)[0]["exits_of"], 1000);
        assert_eq!(json!(rows)[0]["at_once_ns"], 9.5);
    }

    #[test]
    fn each_key_that_is_missing_is_named() {
        for key in row().as_object().unwrap().keys() {
            let mut less = row();
            less.as_object_mut().unwrap().remove(key);
            let wrong = wrong(&less);
            assert!(
                wrong.ends_with(&format!("missing field `{key}`")),
                "{wrong}"
            );
        }
    }

    #[test]
    fn other_values_are_named() {
        let others = [
            ("path", json!("hypercall"), "hypercall"),
            ("op", json!("load"), "load"),
            ("n", json!(0), "0"),
            ("median_ns", Value::Null, "null"),
            ("exits_user", json!("0"), "\"0\""),
            ("clamp_after_ns", json!("soon"), "soon"),
        ];
        for (key, value, named) in others {
            let mut other = row();
            other[key] = value;
            let wrong = wrong(&other);
            assert!(wrong.contains(named), "{key}: {wrong}");
        }
    }
}
