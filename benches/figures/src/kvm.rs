// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The paths on this machine's KVM: this crate's criterion benchmark `paths`,
//! and its figures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// What came of it.
pub struct Kvm {
    /// How it was measured, or why not.
    pub conditions: Value,
    /// A row for each path and kind of access.
    pub rows: Vec<Value>,
}

impl Kvm {
    /// None of it, for `why`.
    pub fn skipped(why: &str) -> Self {
        Self {
            conditions: json!({ "skipped": why }),
            rows: Vec::new(),
        }
    }
}

/// A bare loop that takes longer than this a turn isn't run by the CPU itself.
const EMULATED_NS: f64 = 50.0;
const ROWS: [(&str, &str, &str); 4] = [
    ("exit-read", "exit", "read"),
    ("exit-write", "exit", "write"),
    ("ioeventfd-read", "ioeventfd", "read"),
    ("ioeventfd-write", "ioeventfd", "write"),
];

/// Runs the benchmark, where there is a KVM.
pub fn measure(repo: &Path) -> Result<Kvm> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut bench = Command::new(cargo);
    bench.args(["bench", "--quiet", "--locked", "-p", "vcpufreq-bench"]);
    let output = bench
        .args(["--bench", "paths"])
        .current_dir(repo)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "the benchmark failed: {errors}");
    if let Some(why) = said.lines().find_map(|line| line.strip_prefix("SKIP: ")) {
        return Ok(Kvm::skipped(why));
    }
    rows(&target(repo).join("criterion/paths"), &said)
}

fn target(repo: &Path) -> PathBuf {
    let given = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    given.unwrap_or_else(|| repo.join("target"))
}

fn rows(criterion: &Path, said: &str) -> Result<Kvm> {
    let bare = turns(criterion, "bare-loop")?;
    let load = turns(criterion, "bare-load")?;
    let machine = if at(&bare, 50) > EMULATED_NS {
        "kvm-software"
    } else {
        "kvm"
    };
    let mut rows = Vec::new();
    for (name, path, op) in ROWS {
        let turns = turns(criterion, name)?;
        let told = said.lines().filter(|line| line.starts_with('{'));
        let told = told.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let told = told.into_iter().find(|line| line["bench"] == name);
        let told = told.with_context(|| format!("the benchmark printed nothing of {name}"))?;
        // The last one ends a run; what leaves otherwise is nearly none or all.
        let each = told["exits_each"].as_f64().unwrap_or(0.0);
        let n = told["accesses"].as_u64().unwrap_or(0);
        let write_in_kernel = path == "ioeventfd" && op == "write";
        rows.push(json!({
            "machine": machine, "path": path, "op": op, "n": n,
            "median_ns": at(&turns, 50), "p99_ns": at(&turns, 99),
            "exits_user": if each > 0.5 { n } else { 0 },
            "exits_kernel": if write_in_kernel { n } else { 0 },
            "clamp_after_ns": null, "freq_after_ns": null,
        }));
    }
    let conditions = json!({
        "machine": machine, "emulated": machine != "kvm",
        "bare_loop_ns": at(&bare, 50), "bare_load_ns": at(&load, 50),
        "clamp": "none: the actuator is a fake", "spacing": "none; the loop is included",
    });
    Ok(Kvm { conditions, rows })
}

/// ns for each turn of the loop, of criterion's samples, rising.
fn turns(criterion: &Path, name: &str) -> Result<Vec<f64>> {
    let path = criterion.join(name).join("new/sample.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let sample: Value = serde_json::from_str(&text)?;
    let list = |name: &str| sample[name].as_array().cloned().unwrap_or_default();
    let (iters, times) = (list("iters"), list("times"));
    let pairs = iters.iter().zip(&times);
    let pairs = pairs.filter_map(|(iters, times)| Some(times.as_f64()? / iters.as_f64()?));
    let mut turns: Vec<f64> = pairs.collect();
    ensure!(!turns.is_empty(), "{} has no samples", path.display());
    turns.sort_unstable_by(f64::total_cmp);
    Ok(turns)
}

/// A percentile, to a tenth of a ns.
fn at(sorted: &[f64], percent: usize) -> f64 {
    let ns = sorted.get(sorted.len() * percent / 100).copied();
    (ns.unwrap_or(f64::NAN) * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    //! Criterion's samples and the benchmark's lines become rows of the report.
    use super::*;
    use crate::paths_report::report;

    /// A folder as criterion leaves it, each turn of this many ns.
    fn criterion(ns: u32) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let names = ROWS.iter().map(|(name, ..)| *name);
        for name in names.chain(["bare-loop", "bare-load"]) {
            let new = dir.path().join(name).join("new");
            fs::create_dir_all(&new).unwrap();
            let sample = json!({ "iters": [10.0, 20.0], "times": [10 * ns, 20 * ns] });
            fs::write(new.join("sample.json"), sample.to_string()).unwrap();
        }
        dir
    }

    fn said() -> String {
        let lines = ROWS.iter().map(|(name, path, _)| {
            let each = u8::from(path.starts_with("exit"));
            json!({ "bench": name, "accesses": 1000, "exits_each": each }).to_string()
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn rows_have_the_reports_keys() {
        for (ns, machine) in [(5, "kvm"), (800, "kvm-software")] {
            let dir = criterion(ns);
            let kvm = rows(dir.path(), &said());
            let lab = json!({ "paths": { "rows": [] } });
            let report = report(&lab, kvm.unwrap()).unwrap();
            let results = report["results"].as_array().unwrap();
            assert_eq!(results.len(), ROWS.len());
            assert!(results.iter().all(|row| row["machine"] == machine));
            assert_eq!(results[0]["exits_user"], 1000);
            assert_eq!(results[3]["exits_kernel"], 1000);
        }
    }
}
