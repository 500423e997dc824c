// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain of two vCPUs: the last write counts, whichever of them makes
//! it, and a vCPU that went offline no longer does.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::frequency::host_runs_at;
use super::{Plan, Policy, ask_for, let_ticks_pass, registers, set_governor};
use crate::vm::{Setup, Vm};

/// Offset of set_perf in a vCPU's page.
const SET_PERF: u64 = 0x04;

pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let policy = policies
        .iter()
        .rev()
        .find(|policy| policy.cpus.len() >= 2)
        .context("no policy with two CPUs: take another topology")?;
    let setup = plan
        .mirroring(&policy.cpus[..2])
        .with(&["--clamp", "exact"]);
    let mut checks = raw_writes(&setup, policy)?;
    checks.extend(through_driver(plan, &setup, policy)?);
    let held = checks.iter().all(|check| check["right"] == true);
    Ok(json!({ "held": held, "checks": checks }))
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

/// The driver writes one register for the policy; after the CPU that it
/// belongs to goes offline it writes the other one, and tells nobody.
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

fn check(vm: &Vm, policy: &Policy, what: &str, khz: u32) -> Result<Value> {
    let util = policy.util(khz);
    // By the path `kernel` a worker carries it out.
    let_ticks_pass();
    let clamps = [vm.clamp(0)?, vm.clamp(1)?];
    let right = clamps == [(util, util); 2];
    Ok(json!({ "what": what, "util": util, "uclamp_min_max": clamps, "right": right }))
}
