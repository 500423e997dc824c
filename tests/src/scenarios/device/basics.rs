// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The least that must hold of a guest: it boots and ends; it sees its
//! CPUs as they are; its own governor moves the host.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::opps::{SweepRow, sweep};
use crate::harness::fair_server;
use crate::harness::frequency::{host_runs_at, look, stay_off};
use crate::harness::plan::{Plan, cur_perf, first_cpus, let_load_decay, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::vm::Vm;

/// A guest with a vCPU on the first CPU of each policy boots, answers, and
/// powers off.
pub fn boot(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut vm = Vm::boot(&plan.mirroring(&first_cpus(&policies)))?;
    let guest = vm.ask("read /proc/sys/kernel/osrelease")?;
    let errors = vm.quit()?;
    // A guest that doesn't boot, or ends otherwise, is an error.
    let figures = json!({ "guest_kernel": guest, "vmm_said": errors });
    Ok(LabVerdict::with_figures(figures).check("it boots and ends", true, ()))
}

/// cpu_capacity of a guest with a vCPU of each of these: in the proportion of their capacities at the
/// highest frequencies, those for boost too, and none above 1024.
fn capacities_of_guest(policies: &[Policy]) -> Vec<u64> {
    let tops = policies.iter().map(|policy| {
        let top = u64::from(policy.capacity) * u64::from(policy.max());
        // In parts of 1024: the largest is the measure of all.
        (top << 10) / u64::from(policy.reference.max(1))
    });
    let tops: Vec<u64> = tops.collect();
    let most = tops.iter().copied().max().unwrap_or(0).max(1 << 20);
    tops.iter().map(|top| (top << 10) / most).collect()
}

/// The guest's own cpu_capacity is within 1 as its device tree gives it, without boost its pCPU's, and
/// cur_perf is the pCPU's frequency.
pub fn capacity(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut vm = plan.guest(&plan.mirroring(&first_cpus(&policies)))?;
    let base = registers(&mut vm)?;
    let mut right = true;
    let mut rows = Vec::new();
    let expected = capacities_of_guest(&policies);
    for (vcpu, (policy, expected)) in policies.iter().zip(expected).enumerate() {
        let path = format!("/sys/devices/system/cpu/cpu{vcpu}/cpu_capacity");
        let capacity = vm.number(format!("read {path}"))?;
        vm.ask(format!("start busy busy {vcpu}"))?;
        let_load_decay();
        stay_off(policy, &vm)?;
        let look = look(policy, || cur_perf(&mut vm, base, vcpu))?;
        let (host, read) = (look.held, look.outcome);
        let khz = host.most;
        vm.ask("stop busy")?;
        right &= capacity.abs_diff(expected) <= 1 && host.since.contains(&read);
        rows.push(json!({
            "pcpu_capacity": policy.capacity, "guest_capacity": capacity,
            "expected_capacity": expected,
            "host_khz": khz, "guest_reads_khz": read,
        }));
    }
    vm.quit()?;
    Ok(LabVerdict::default()
        .check("capacities and frequencies are the pCPUs'", right, &rows)
        .figure("vcpus", rows))
}

/// With schedutil in the guest, a busy loop brings its pCPU to the maximum
/// and idling brings it down to the minimum.
pub fn governor(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut vm = plan.guest(&plan.mirroring(&first_cpus(&policies)))?;
    let mut right = true;
    let mut rows = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        set_governor(&mut vm, vcpu, "schedutil")?;
        vm.ask(format!("start busy busy {vcpu}"))?;
        let_load_decay();
        let busy = host_runs_at(policy, &mut vm, policy.max())?;
        vm.ask("stop busy")?;
        let_load_decay();
        // An idle CPU's frequency stays where it was: idle but for 1 %.
        vm.ask(format!("start idle periodic {vcpu} 20000 200"))?;
        let_load_decay();
        // How soon isn't asked here; that it gets there is.
        let mut idle = 0;
        for _ in 0..10 {
            idle = host_runs_at(policy, &mut vm, policy.min())?;
            if idle == policy.min() {
                break;
            }
        }
        vm.ask("stop idle")?;
        right &= busy == policy.max() && idle == policy.min();
        rows.push(json!({ "busy_khz": busy, "max_khz": policy.max(), "idle_khz": idle, "idle_clamp": vm.clamp(vcpu)?, "min_khz": policy.min() }));
    }
    vm.quit()?;
    Ok(LabVerdict::default()
        .check(
            "a busy loop brings the maximum, idling the minimum",
            right,
            &rows,
        )
        .figure("vcpus", rows))
}

/// A guest that reboots boots again, and the bridge works after it.
pub fn restart(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.first().context("no policy")?;
    let setup = plan.mirroring(&[policy.cpu()]).with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    vm.tell("restart")?;
    vm.expect("@ready", Duration::from_secs(120))?;
    plan.load_driver(&mut vm)?;
    vm.ask("start busy busy 0")?;
    let rows = sweep(&mut vm, 0, policy, SweepRow::exact)?;
    vm.quit()?;
    let wrong = rows.iter().filter(|row| !row.exact()).count();
    let figures = json!({ "opps_checked": rows.len(), "opps_wrong": wrong });
    Ok(LabVerdict::with_figures(figures).check_eq("no OPP is wrong", &wrong, 0))
}

/// What the bridge can't do without, by the names of `vcpufreq doctor`.
const NEEDED: [&str; 4] = ["kvm", "path", "uclamp", "governor"];
/// The best path of `run`, or where `run` isn't, QEMU's.
const BEST_PATH: &str = if cfg!(target_arch = "aarch64") {
    "bpf"
} else {
    "shm"
};

/// `vcpufreq doctor` on the lab's host reports that a guest can run here with
/// the bridge, and each policy's floor.
pub fn doctor(_plan: &Plan) -> Result<LabVerdict> {
    let output = Command::new("/bin/vcpufreq")
        .args(["doctor", "--json"])
        .output()?;
    let said: Value = serde_json::from_slice(&output.stdout).context("doctor --json")?;
    let code = output.status.code();
    let all = said.as_array().or_else(|| said["findings"].as_array());
    let good = |subject: &&str| {
        let mut findings = all.into_iter().flatten();
        findings.any(|one| one["subject"] == **subject && one["level"] == "good")
    };
    let good: Vec<&str> = NEEDED.into_iter().filter(good).collect();
    let paths = all.into_iter().flatten();
    let paths = paths.filter(|one| one["subject"] == "path");
    let paths: Vec<&Value> = paths.map(|one| &one["what"]).collect();
    let (floors_right, floors) = fair_server::doctors(&said)?;
    let figures = json!({
        "exit_code": code, "good": good, "floors": floors, "doctor": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("the exit code", matches!(code, Some(0 | 1)), code)
        .check_eq("all that is needed is good", &good, NEEDED)
        .check_eq("the best path", &paths, [BEST_PATH])
        .check("each policy's floor", floors_right, &floors))
}

#[cfg(test)]
mod tests {
    //! Promise: boost of one CPU shrinks the capacities of the others.
    use super::*;

    #[test]
    fn a_guests_capacities_are_those_at_the_highest_frequencies() {
        let policy = |capacity, reference, top| Policy {
            path: String::new(),
            cpus: vec![0],
            opps: vec![top],
            capacity,
            reference,
            limit: reference,
        };
        let plain = policy(326, 2_016_000, 2_016_000);
        let boosted = policy(1024, 2_956_800, 3_187_200);
        assert_eq!(capacities_of_guest(std::slice::from_ref(&plain)), [326]);
        assert_eq!(capacities_of_guest(&[plain, boosted]), [302, 1024]);
    }
}
