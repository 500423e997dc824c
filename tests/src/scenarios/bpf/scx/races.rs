// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two vCPUs ask for their domain by `scx` at the same time. No clamp is set beside the target, and
//! what is asked for last is in force.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::fallback::busy_target;
use super::service::{ServiceProcess, said, scx};
use crate::harness::machine::mount_bpffs;
use crate::harness::plan::{GuestDevice, Plan, ask_for, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats::{has_one_outcome_each, of as stats};

/// Floods, and looks at the clamps in each.
const FLOODS: u32 = 10;
const LOOKS: u32 = 10;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    mount_bpffs()?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let [first, second, ..] = policy.cpus[..] else {
        bail!("a policy of one pCPU");
    };
    let service = ServiceProcess::start()?;
    let options = ["--actuator", "scx", "--rate-limit", "0"];
    let mut vm = plan.guest(&plan.mirroring(&[first, second]).with(&options))?;
    set_governor(&mut vm, 0, "userspace")?;
    let register = GuestDevice::of(&mut vm)?.set_perf(0);
    let (min, max) = (policy.min(), policy.max());
    let (mut clamps, mut turns, mut targets) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..FLOODS {
        for vcpu in 0..2 {
            vm.ask(format!(
                "start load{vcpu} flood {vcpu} {register} {min} {max}"
            ))?;
        }
        for _ in 0..LOOKS {
            sleep(Duration::from_millis(10));
            clamps.extend([vm.clamp(0)?, vm.clamp(1)?]);
        }
        turns.extend([vm.number("stop load0")?, vm.number("stop load1")?]);
        ask_for(&mut vm, 0, min)?;
        ask_for(&mut vm, 0, max)?;
        targets.push(busy_target(&mut vm, 1)?.as_u64());
    }
    let counted = stats(&vm)?["vcpus"][0].clone();
    let vmm_said = vm.quit()?;
    said(&scx(&["stop"])?);
    service.ended()?;
    let free = clamps.iter().all(|clamp| *clamp == (0, 1024));
    let flooded = turns.iter().all(|turns| *turns > 100);
    let there = targets.iter().all(|target| *target > Some(0));
    clamps.sort_unstable();
    clamps.dedup();
    let counts = &counted["counts"];
    let figures = json!({
        "clamps": clamps, "turns": turns, "targets": targets,
        "counts": counts, "vmm_said": vmm_said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("no clamp is set", free, &clamps)
        .check("both flood", flooded, &turns)
        .check("the target is there", there, &targets)
        .check(
            "each request has an outcome",
            has_one_outcome_each(&counted),
            counts,
        ))
}
