// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM counts, from `vcpufreq stats --json` and `--openmetrics`.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::harness::vm::Vm;

/// What becomes of a request.
const OUTCOMES: [&str; 6] = [
    "applied",
    "unchanged",
    "superseded",
    "coalesced",
    "refused",
    "not_applicable",
];

/// What the VMM of a guest counts.
pub fn of(vm: &Vm) -> Result<Value> {
    at(vm.program())
}

/// What a process of the program counts.
pub fn at(pid: u32) -> Result<Value> {
    let text = stats(&["--json", &pid.to_string()])?;
    serde_json::from_slice(&text).context("stats --json")
}

/// The same of all VMMs as OpenMetrics text.
pub fn openmetrics() -> Result<String> {
    Ok(String::from_utf8(stats(&["--openmetrics"])?)?)
}

fn stats(options: &[&str]) -> Result<Vec<u8>> {
    let mut command = Command::new("/bin/vcpufreq");
    let output = command.arg("stats").args(options).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "stats: {said}");
    Ok(output.stdout)
}

/// Whether what a vCPU has asked for adds up to what has become of it.
pub fn has_one_outcome_each(vcpu: &Value) -> bool {
    let count = |name: &str| vcpu["counts"][name].as_u64();
    let outcomes = OUTCOMES.iter().map(|name| count(name)).sum::<Option<u64>>();
    outcomes.is_some_and(|outcomes| outcomes > 0) && count("requests") == outcomes
}

/// Whether all that a vCPU has written is counted, and has one outcome each.
pub fn counted_once(vcpu: &Value, written: u64) -> bool {
    vcpu["counts"]["requests"] == written && has_one_outcome_each(vcpu)
}
