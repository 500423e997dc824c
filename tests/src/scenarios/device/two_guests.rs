// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two guests at once, whose registers are at the same addresses: each moves
//! and reads its own pCPU alone.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::let_ticks_pass;
use crate::harness::plan::{Plan, ask_for, cur_perf, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm};

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let [low, .., high] = &policies[..] else {
        anyhow::bail!("two policies are needed");
    };
    let mut first = guest(plan, low)?;
    let mut second = guest(plan, high)?;
    let bases = (registers(&mut first)?, registers(&mut second)?);
    ensure!(bases.0 == bases.1, "the addresses differ: {bases:x?}");
    let mut rows = Vec::new();
    // Each in turn, while the other one keeps what it asked for.
    let mut asked = (low.min(), high.min());
    ask_for(&mut first, 0, asked.0)?;
    ask_for(&mut second, 0, asked.1)?;
    for step in 0..2 * low.opps.len().max(high.opps.len()) {
        if step % 2 == 0 {
            asked.0 = low.opps[step / 2 % low.opps.len()];
            ask_for(&mut first, 0, asked.0)?;
        } else {
            asked.1 = high.opps[step / 2 % high.opps.len()];
            ask_for(&mut second, 0, asked.1)?;
        }
        let_ticks_pass();
        rows.push(row(&mut first, low, asked.0, bases.0)?);
        rows.push(row(&mut second, high, asked.1, bases.1)?);
    }
    first.quit()?;
    second.quit()?;
    let wrong: Vec<_> = rows.iter().filter(|row| row["right"] != true).collect();
    let figures = json!({ "looks": rows.len(), "wrong": wrong });
    Ok(LabVerdict::with_figures(figures).check_none("no guest is wrong", &wrong))
}

/// A busy guest with one vCPU.
fn guest(plan: &Plan, policy: &Policy) -> Result<Vm> {
    let setup = Setup {
        silent: true,
        ..plan.mirroring(&[policy.cpu()]).with(&["--clamp", "exact"])
    };
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, 0, "userspace")?;
    vm.ask("start busy busy 0")?;
    Ok(vm)
}

/// The clamp is what this guest asked for last, and what it reads is a
/// frequency of its own pCPU.
fn row(vm: &mut Vm, policy: &Policy, asked: u32, base: u64) -> Result<Value> {
    let util = policy.util(asked);
    let clamp = vm.clamp(0)?;
    let read = cur_perf(vm, base, 0)?;
    let right = clamp == (util, util) && policy.opps.contains(&read);
    Ok(json!({ "right": right, "asked_khz": asked, "clamp": clamp, "guest_reads_khz": read }))
}
