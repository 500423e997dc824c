// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an access costs by each path: `out/paths.json` from what the lab
//! measured and this machine's KVM, and its table.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::markdown::{head, row};
use super::{kvm, paths_report};
use vcpufreq_bench::report_json::rows;

/// Paths that this machine's KVM may have too, in the order of the table.
pub const PATHS: [&str; 4] = ["exit", "ioeventfd", "bpf", "shm"];

/// Those that are measured in the lab alone; two are guests of QEMU's, by `vcpufreq qemu`.
const IN_LAB: [&str; 3] = ["ram", "qemu", "qemu-pmu"];

/// Measures on this machine's KVM, and writes `out/paths.json` from it and `out/paths-lab.json`.
///
/// # Errors
/// Without the lab's part, or if a row lacks a key.
pub fn whole(repo: &Path) -> Result<()> {
    let path = repo.join("out/paths-lab.json");
    let lab = fs::read_to_string(&path)
        .with_context(|| format!("{}; run make bench-paths", path.display()))?;
    let lab: Value = serde_json::from_str(&lab)?;
    let report = paths_report::report(&lab, kvm::measure(repo)?)?;
    Ok(fs::write(
        repo.join("out/paths.json"),
        format!("{report:#}\n"),
    )?)
}

/// Of the accesses by a path, one of these on this machine.
pub fn find<'a>(report: &'a Value, (path, op): (&str, &str), machine: &str) -> Option<&'a Value> {
    rows(report, "results")
        .find(|row| row["path"] == path && row["op"] == op && row["machine"] == machine)
}

/// The lab's table, and this machine's.
pub fn table(inputs: &[Value]) -> Option<String> {
    let report = inputs.first()?;
    let lab = &report["conditions"]["lab"];
    let word = |key: &str| lab[key].as_str().unwrap_or("?");
    let mut text = format!(
        "Arm host, **emulated** (virtual ns, 2 ns an instruction; Linux {}, guest of Linux {}):\n\n",
        word("host_kernel"),
        word("guest_kernel"),
    );
    text += &head(&[
        "path",
        "read, ns (emulated)",
        "p99",
        "write with a new clamp, ns (emulated)",
        "p99",
        "against `exit`",
        "writes at once, ns each (emulated)",
        "against `exit`",
        "exits of a read, of a write",
    ]);
    let of = |path, op| find(report, (path, op), "lab");
    let of_write = |path, key: &str| of(path, "write")?[key].as_f64();
    let share = |path, key| {
        let share = of_write(path, key).zip(of_write("exit", key));
        share.map_or("-".to_owned(), |(ns, exit)| format!("{:.2}", ns / exit))
    };
    for path in PATHS.into_iter().chain(IN_LAB) {
        let [read, write] = ["read", "write"].map(|op| of(path, op));
        let ends = format!("{}, {}", exits(read), exits(write));
        text += &row(std::iter::once(format!("`{path}`"))
            .chain([number(read, "median_ns"), number(read, "p99_ns")])
            .chain([
                number(write, "median_ns"),
                number(write, "p99_ns"),
                share(path, "median_ns"),
                number(write, "at_once_ns"),
                share(path, "at_once_ns"),
                ends,
            ]));
    }
    let bare = &lab["bare"];
    text += &format!(
        "\nIn the same loops a load from memory takes {}, stores at once {} each (emulated).\n",
        number(Some(bare), "load_median_ns"),
        number(Some(bare), "store_mean_ns"),
    );
    let share = |row: &Value, op: &str| row[op].as_f64().unwrap_or(f64::NAN);
    let shares = lab["sandbox"].as_array()?.iter().map(|row| {
        let path = row["path"].as_str().unwrap_or("?");
        format!(
            "`{path}` {:.3}, {:.3}",
            share(row, "read"),
            share(row, "write")
        )
    });
    text += &format!(
        "A read, a write with the sandbox against one without: {} (emulated).\n",
        shares.collect::<Vec<_>>().join("; "),
    );
    let switches = lab["switches_of_others"].as_array()?;
    let all = |key: &str| {
        let all = switches.iter().map(|row| row[key].to_string());
        all.collect::<Vec<_>>().join(", ")
    };
    text += &format!(
        "A switch between other tasks, with {} VMs by `bpf`: {} (emulated).\n",
        all("vms"),
        all("virtual_ns"),
    );
    Some(text + &kvm_table(report))
}

fn kvm_table(report: &Value) -> String {
    let conditions = &report["conditions"]["kvm"];
    if let Some(why) = conditions["skipped"].as_str() {
        return format!("\nOn this machine's KVM: skipped, {why}.\n");
    }
    let machine = conditions["machine"].as_str().unwrap_or("?");
    let software = match machine {
        "kvm" => "",
        _ => " (KVM emulates instructions: no figures of hardware)",
    };
    let mut text = format!(
        "\nx86-64, `{machine}`: {} ns for a turn of the bare loop, {} with a load{software}. Nothing is \
         clamped there, and writes follow each other at once:\n\n",
        conditions["bare_loop_ns"], conditions["bare_load_ns"],
    );
    text += &head(&["path", "read, ns", "p99", "write, ns", "p99"]);
    for path in PATHS {
        let both = ["read", "write"].map(|op| find(report, (path, op), machine));
        if both.iter().all(Option::is_some) {
            let cells = both.map(|row| [number(row, "median_ns"), number(row, "p99_ns")]);
            text += &row(std::iter::once(format!("`{path}`")).chain(cells.into_iter().flatten()));
        }
    }
    text
}

/// Where a row's accesses end.
fn exits(row: Option<&Value>) -> &'static str {
    let count = |name: &str| row.and_then(|row| row[name].as_u64());
    match (count("exits_user"), count("exits_kernel")) {
        (Some(0), Some(0)) => "none",
        (Some(0), Some(_)) => "KVM",
        (Some(_), _) => "VMM",
        _ => "-",
    }
}

/// A row's number; `-` where there is none.
fn number(row: Option<&Value>, name: &str) -> String {
    row.and_then(|row| row[name].as_f64())
        .map_or("-".to_owned(), ns)
}

/// `12,345`; under a hundred with a digit behind the point.
pub(super) fn ns(ns: f64) -> String {
    if ns < 100.0 {
        return format!("{ns:.1}");
    }
    let digits = format!("{ns:.0}");
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .flat_map(std::str::from_utf8)
        .collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    //! Numbers read as people write them; a row shows where accesses end.
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_grouped() {
        let rows = [
            (8.04, "8.0"),
            (123.0, "123"),
            (28_800.4, "28,800"),
            (1e6, "1,000,000"),
        ];
        for (number, text) in rows {
            assert_eq!(ns(number), text);
        }
    }

    #[test]
    fn a_row_says_where_accesses_end() {
        let row = |user, kernel| json!({ "exits_user": user, "exits_kernel": kernel });
        assert_eq!(exits(Some(&row(0, 0))), "none");
        assert_eq!(exits(Some(&row(0, 9))), "KVM");
        assert_eq!(exits(Some(&row(9, 0))), "VMM");
        assert_eq!(exits(None), "-");
    }
}
