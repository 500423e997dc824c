// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain of two vCPUs: the last write counts, whichever of them makes
//! it, and a vCPU that went offline no longer does; `domain:both`: both ask as fast
//! as they can, and each request has one outcome, and the last one is in force.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::without_host_module;
use crate::harness::frequency::host_runs_at;
use crate::harness::frequency::let_ticks_pass;
use crate::harness::plan::{Plan, ask_for, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats::{self, counted_once};
use crate::harness::vm::{Setup, Vm};
use crate::harness::wait::{SOON, settled};

/// Offset of set_perf in a vCPU's page.
const SET_PERF: u64 = 0x04;

/// Either, by its name.
pub fn run(plan: &Plan, name: &str) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = with_two_cpus(&policies)?;
    match name {
        "domain:both" => both(policy),
        _ => by_turns(plan, policy),
    }
}

fn by_turns(plan: &Plan, policy: &Policy) -> Result<LabVerdict> {
    let setup = plan
        .mirroring(&policy.cpus[..2])
        .with(&["--clamp", "exact"]);
    let mut checks = raw_writes(&setup, policy)?;
    checks.extend(through_driver(plan, &setup, policy)?);
    Ok(LabVerdict::default()
        .check_rows("both vCPUs have the domain's clamp", &checks)
        .figure("checks", checks))
}

/// Both ask at once, by each path, and by `bpf` without the host module.
fn both(policy: &Policy) -> Result<LabVerdict> {
    let mut checks = Vec::new();
    for limit in ["0", "5000:500"] {
        for path in ["exit", "ioeventfd", "bpf"] {
            checks.push(both_ask(policy, path, limit)?);
        }
        let mut by_worker = without_host_module(|| both_ask(policy, "bpf", limit))?;
        by_worker["module"] = false.into();
        checks.push(by_worker);
    }
    Ok(LabVerdict::default()
        .check_rows("both vCPUs have the newest request's clamp", &checks)
        .figure("checks", checks))
}

fn with_two_cpus(policies: &[Policy]) -> Result<&Policy> {
    let mut found = policies.iter().rev();
    found
        .find(|policy| policy.cpus.len() >= 2)
        .context("no policy with two CPUs: take another topology")
}

/// Registers written by hand, no driver loaded.
fn raw_writes(setup: &Setup, policy: &Policy) -> Result<Vec<Value>> {
    let mut vm = Vm::boot(setup)?;
    let base = registers(&mut vm)?;
    let mut checks = Vec::new();
    let (low, high) = (policy.min(), policy.max());
    for (vcpu, khz) in [(0, high), (1, low), (0, low), (1, high), (0, low)] {
        let register = base + vcpu * 0x1000 + SET_PERF;
        vm.ask(format!("poke {vcpu} {register:#x} {khz}"))?;
        checks.push(check(
            &vm,
            policy,
            &format!("vCPU {vcpu} writes {khz}"),
            khz,
        )?);
    }
    vm.quit()?;
    Ok(checks)
}

/// The driver writes one register for the policy. After that register's CPU goes offline it writes
/// the other one, without a notice to the host.
fn through_driver(plan: &Plan, setup: &Setup, policy: &Policy) -> Result<Vec<Value>> {
    let mut vm = plan.guest(setup)?;
    set_governor(&mut vm, 0, "userspace")?;
    let mut checks = Vec::new();
    ask_for(&mut vm, 0, policy.max())?;
    checks.push(check(&vm, policy, "vCPU 0 online, maximum", policy.max())?);
    vm.ask("write /sys/devices/system/cpu/cpu0/online 0")?;
    ask_for(&mut vm, 0, policy.min())?;
    let mut last = check(&vm, policy, "vCPU 0 offline, minimum", policy.min())?;
    vm.ask("start busy busy 1")?;
    let_ticks_pass();
    let khz = host_runs_at(policy, &mut vm, policy.min())?;
    last["host_khz"] = khz.into();
    last["right"] = (last["right"] == true && khz == policy.min()).into();
    checks.push(last);
    vm.quit()?;
    Ok(checks)
}

/// Two vCPUs that share a clamp ask for its ends at the same time, no driver loaded; then one of
/// them for something else.
fn both_ask(policy: &Policy, path: &str, limit: &str) -> Result<Value> {
    let setup = Setup {
        silent: true,
        ..Setup::mirroring(&policy.cpus[..2]).with(&["--path", path, "--rate-limit", limit])
    };
    let mut vm = Vm::boot(&setup)?;
    let base = registers(&mut vm)?;
    let registers = [0, 1].map(|vcpu| base + vcpu * 0x1000 + SET_PERF);
    let (low, high) = (policy.min(), policy.max());
    for (vcpu, register) in registers.iter().enumerate() {
        vm.ask(format!(
            "start load{vcpu} flood {vcpu} {register:#x} {low} {high}"
        ))?;
    }
    sleep(Duration::from_millis(300));
    let mut written = [vm.number("stop load0")?, vm.number("stop load1")?];
    let last = *policy.opps.get(1).context("one OPP")?;
    vm.ask(format!("poke 1 {:#x} {last}", registers[1]))?;
    written[1] += 1;
    let (stats, settled) = until_settled(&vm, written)?;
    let clamps = [vm.clamp(0)?, vm.clamp(1)?];
    vm.quit()?;
    let vcpus = stats["vcpus"].as_array().context("no vcpus")?;
    let counts: Vec<_> = vcpus.iter().map(|vcpu| &vcpu["counts"]).collect();
    let by_path = vcpus.iter().all(|vcpu| vcpu["path"] == path);
    let right = settled
        && by_path
        && written.iter().all(|&count| count > 1_000)
        && clamps.map(|(min, _)| min) == [policy.util(last); 2];
    Ok(json!({
        "what": format!("both ask, by {path}, limit {limit}"), "written": written, "counts": counts,
        "uclamp_min_max": clamps, "right": right,
    }))
}

/// The counts, once all that was written is counted and has an outcome: what waits for the limit
/// or for the worker gets its turn.
fn until_settled(vm: &Vm, written: [u64; 2]) -> Result<(Value, bool)> {
    let look = || {
        let stats = stats::of(vm)?;
        let vcpus = stats["vcpus"].as_array().context("no vcpus")?;
        let mut both = vcpus.iter().zip(written);
        let all = both.all(|(vcpu, written)| counted_once(vcpu, written));
        let settled = vcpus.len() == 2 && all;
        Ok((stats, settled))
    };
    settled(2 * SOON, look, |(_, settled)| *settled)
}

fn check(vm: &Vm, policy: &Policy, what: &str, khz: u32) -> Result<Value> {
    let util = policy.util(khz);
    // By the path `ioeventfd` a worker carries it out.
    let_ticks_pass();
    let clamps = [vm.clamp(0)?, vm.clamp(1)?];
    let right = clamps == [(util, util); 2];
    Ok(json!({ "what": what, "util": util, "uclamp_min_max": clamps, "right": right }))
}
