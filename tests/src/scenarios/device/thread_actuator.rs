// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clamps by sched_setattr (`--actuator thread`), on a SCHED_OTHER and a SCHED_FIFO thread. The
//! kernel reports the clamp that the policy computed, the scheduling policy stays, children start
//! without the clamp, and a clamp in force isn't set again.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::{Instance, TraceLine, events};
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::sys::{resets_on_fork, set_fifo_priority_of};
use crate::harness::vm::{Setup, Vm};

const FIFO: i32 = 3;
const EVENT: &str = "syscalls/sys_enter_sched_setattr";

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    let floor = *policy.opps.get(2).context("fewer than three OPPs")?;
    let setup = Setup::mirroring(&first_cpus(&policies));
    let mut vm = Vm::boot(&setup.with(&[
        "--actuator",
        "thread",
        "--path",
        "exit",
        "--clamp",
        "exact",
        "--floor",
        &format!("{vcpu}={floor}"),
    ]))?;
    plan.load_driver(&mut vm)?;
    set_governor(&mut vm, vcpu, "userspace")?;
    let tid = vm.vcpu_tid(vcpu)?;
    // The change of policy below takes it away; requests have to leave it alone.
    let resets = resets_on_fork(tid)?;
    let trace = Instance::create("setattr", 64)?;
    trace.enable(&[EVENT])?;
    let mut rows = Vec::new();
    for priority in [0, FIFO] {
        set_fifo_priority_of(tid, priority)?;
        let before = vm.scheduling(vcpu)?;
        rows.extend(sweep(&trace, &mut vm, vcpu, policy, floor)?);
        let after = vm.scheduling(vcpu)?;
        ensure!(before == after, "scheduled as {before}, then as {after}");
    }
    trace.remove()?;
    vm.quit()?;
    let figures = json!({ "resets_on_fork": resets, "floor_khz": floor, "rows": rows });
    Ok(LabVerdict::with_figures(figures)
        .check_rows("each request", &rows)
        .check("the thread resets on fork", resets, ()))
}

/// Each OPP, up and down. Below the floor nothing changes, and nothing is set.
fn sweep(
    trace: &Instance,
    vm: &mut Vm,
    vcpu: usize,
    policy: &Policy,
    floor: u32,
) -> Result<Vec<Value>> {
    let tid = vm.vcpu_tid(vcpu)?;
    let resets = resets_on_fork(tid)?;
    let mut in_force = vm.clamp(vcpu)?;
    let mut rows = Vec::new();
    for &khz in policy.opps.iter().chain(policy.opps.iter().rev()) {
        trace.start()?;
        ask_for(vm, vcpu, khz)?;
        trace.stop()?;
        let calls = calls_of(tid, &trace.text()?);
        let util = policy.util(khz.max(floor));
        let clamp = vm.clamp(vcpu)?;
        let kept = resets_on_fork(tid)? == resets;
        let right = clamp == (util, util) && calls == usize::from(clamp != in_force) && kept;
        in_force = clamp;
        rows.push(json!({
            "asked_khz": khz, "clamp": clamp, "util": util, "calls": calls, "right": right,
        }));
    }
    Ok(rows)
}

/// The thread's calls of sched_setattr in a trace.
fn calls_of(tid: i32, trace: &str) -> usize {
    let own = |line: &TraceLine| line.event == "sys_sched_setattr" && line.tid() == Some(tid);
    events(trace).filter(own).count()
}
