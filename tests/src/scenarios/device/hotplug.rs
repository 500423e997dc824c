// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! pCPUs that are offline when the guest starts, and come online while it runs: a vCPU that
//! moves there reads their frequency, by each path. By `ioeventfd` and `shm` their changes of frequency wake
//! the worker, also once they have been offline in between.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::let_ticks_pass;
use crate::harness::frequency::stay_off;
use crate::harness::load;
use crate::harness::migration::{like, move_to, scaled};
use crate::harness::plan::{Plan, cur_perf, last_of, registers};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::trace::{Trace, Waking};
use crate::harness::vm::Vm;

const PATHS: [&str; 4] = ["exit", "ioeventfd", "bpf", "shm"];
/// The VMM looks at the host every second.
const A_LOOK: Duration = Duration::from_millis(1_500);
/// Changes of frequency that are made on a pCPU.
const CHANGES: usize = 20;
/// The worker's thread.
const WORKER: &str = "requests";

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "userspace")?;
    }
    let results: Vec<Value> = PATHS
        .iter()
        .map(|path| by_path(path, &policies).with_context(|| format!("path {path}")))
        .collect::<Result<_>>()?;
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "schedutil")?;
    }
    Ok(LabVerdict::default()
        .check_rows("each path", &results)
        .figure("by_path", results))
}

/// All pCPUs but the first are offline at the start: one whose policy is there, and those of
/// policies that aren't.
fn by_path(path: &str, policies: &[Policy]) -> Result<Value> {
    let own = policies.first().context("no policy")?;
    let cpus = policies.iter().flat_map(|policy| &policy.cpus);
    let late: Vec<u32> = cpus.copied().filter(|cpu| *cpu != own.cpu()).collect();
    switch(&late, false)?;
    let mut vm = Vm::boot(&like(own).with(&["--path", path, "--explain"]))?;
    switch(&late, true)?;
    sleep(A_LOOK);
    let base = registers(&mut vm)?;
    let (mut compared, mut wrong) = (0, Vec::new());
    for policy in policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "userspace")?;
        for cpu in policy.cpus.iter().filter(|cpu| late.contains(cpu)) {
            move_to(&vm, *cpu)?;
            // Its frequency when it came online first: no change event has it.
            let now = std::iter::once(policy.khz()?);
            for khz in now.chain([policy.min(), policy.max()]) {
                sysfs::write(format!("{}/scaling_setspeed", policy.path), khz)?;
                let_ticks_pass();
                let read = cur_perf(&mut vm, base, 0)?;
                let expected = scaled(own, policy, khz);
                compared += 1;
                if read != expected || vm.pcpu(0)? != *cpu {
                    wrong.push(json!({
                        "pcpu": cpu, "khz": khz, "reads_khz": read, "expected_khz": expected,
                    }));
                }
            }
        }
    }
    let wakes = match path {
        "ioeventfd" | "shm" => wakes(&vm, policies)?,
        _ => json!({ "right": true }),
    };
    let said = vm.quit()?;
    Ok(json!({
        "right": wrong.is_empty() && wakes["right"] == true && compared > 0,
        "path": path, "compared": compared, "wrong": wrong.len(),
        "first_wrong": wrong.first(), "wakes": wakes, "vmm_said": said,
    }))
}

/// The last pCPU changes its policy's frequency. Counts the changes that wake the worker from
/// there: after it came online late, and after it went and came back, with and without a look of
/// the VMM in between.
fn wakes(vm: &Vm, policies: &[Policy]) -> Result<Value> {
    let (_, policy) = last_of(policies)?;
    let cpu = *policy.cpus.last().context("no CPU")?;
    move_to(vm, policies.first().context("no policy")?.cpu())?;
    stay_off(policy, vm)?;
    let late = woken(policy, cpu)?;
    switch(&[cpu], false)?;
    sleep(A_LOOK);
    switch(&[cpu], true)?;
    sleep(A_LOOK);
    let seen_to_go = woken(policy, cpu)?;
    switch(&[cpu], false)?;
    switch(&[cpu], true)?;
    sleep(A_LOOK);
    let unseen = woken(policy, cpu)?;
    // A worker that is at its look when the change comes isn't woken.
    let right = [late, seen_to_go, unseen]
        .iter()
        .all(|woken| *woken >= CHANGES / 2);
    Ok(json!({
        "right": right, "changes": CHANGES, "woken_since_late": late,
        "woken_since_back": seen_to_go, "woken_since_back_unseen": unseen,
    }))
}

/// A waking has the pCPU of the one that wakes: the worker's own timer is on another one.
fn woken(policy: &Policy, cpu: u32) -> Result<usize> {
    let setspeed = format!("{}/scaling_setspeed", policy.path);
    load::pin(cpu)?;
    let trace = Trace::start_with_wakings()?;
    for khz in [policy.min(), policy.max()].iter().cycle().take(CHANGES) {
        sysfs::write(&setspeed, khz)?;
        let_ticks_pass();
    }
    let seen = trace.stop()?;
    load::unpin()?;
    let from_there = |waking: &&Waking| waking.cpu == cpu && waking.thread == WORKER;
    Ok(seen.wakings.iter().filter(from_there).count())
}

fn switch(cpus: &[u32], online: bool) -> Result<()> {
    for cpu in cpus {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        sysfs::write(file, u32::from(online))?;
    }
    Ok(())
}
