// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain of two vCPUs: the last write counts, whichever of them makes
//! it, and a vCPU that went offline no longer does; and while both ask as fast
//! as they can, each request has one outcome, by each path.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::frequency::host_runs_at;
use super::stats::{self, has_one_outcome_each};
use super::{Plan, Policy, ask_for, let_ticks_pass, registers, set_governor};
use crate::deeds::without_host_module;
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
    for path in ["exit", "kernel", "bpf"] {
        checks.push(both_ask(policy, path)?);
    }
    let mut by_worker = without_host_module(|| both_ask(policy, "bpf"))?;
    by_worker["module"] = false.into();
    checks.push(by_worker);
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

/// Two vCPUs that share a clamp ask for its ends at the same time, no driver loaded.
fn both_ask(policy: &Policy, path: &str) -> Result<Value> {
    let setup = Setup::mirroring(&policy.cpus[..2]).with(&["--path", path]);
    let mut vm = Vm::boot(&setup)?;
    let base = registers(&mut vm)?;
    let (low, high) = (policy.min(), policy.max());
    for vcpu in 0..2 {
        let register = base + vcpu * 0x1000 + SET_PERF;
        vm.ask(format!(
            "start load{vcpu} flood {vcpu} {register:#x} {low} {high}"
        ))?;
    }
    sleep(Duration::from_millis(300));
    let written = [vm.number("stop load0")?, vm.number("stop load1")?];
    // What waits for the limit gets its turn.
    sleep(Duration::from_millis(200));
    let stats = stats::of(&vm)?;
    vm.quit()?;
    let vcpus = stats["vcpus"].as_array().context("no vcpus")?;
    let right = vcpus.len() == 2
        && vcpus.iter().zip(written).all(|(vcpu, written)| {
            vcpu["path"] == path
                && vcpu["counts"]["requests"] == written
                && has_one_outcome_each(vcpu)
        });
    let counts: Vec<_> = vcpus.iter().map(|vcpu| &vcpu["counts"]).collect();
    Ok(json!({
        "what": format!("both ask, by {path}"), "written": written, "counts": counts, "right": right,
    }))
}

fn check(vm: &Vm, policy: &Policy, what: &str, khz: u32) -> Result<Value> {
    let util = policy.util(khz);
    // By the path `kernel` a worker carries it out.
    let_ticks_pass();
    let clamps = [vm.clamp(0)?, vm.clamp(1)?];
    let right = clamps == [(util, util); 2];
    Ok(json!({ "what": what, "util": util, "uclamp_min_max": clamps, "right": right }))
}
