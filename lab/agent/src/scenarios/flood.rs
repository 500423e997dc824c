// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that writes set_perf as fast as it can for 10 s (3 where the path is
//! forced), and then to all registers of all vCPUs for 10 s, against a plain loop
//! in its place, in one guest.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Plan, Policy, registers};
use crate::deeds::dmesg;
use crate::vm::{Setup, Vm};

/// About a second of the other vCPU's work beside a busy one.
const TURNS: u64 = 50_000_000;

pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let (low, high) = (
        policies.first().context("no policy")?,
        policies.last().context("no policy")?,
    );
    let setup = Setup {
        silent: true,
        ..plan.mirroring(&[low.cpu(), high.cpu()])
    };
    let log_before = dmesg("")?.len();
    let mut vm = Vm::boot(&setup)?;
    let base = registers(&mut vm)?;
    let register = base + 0x04;
    let (min, max) = (low.min(), low.max());
    let plain = measure(&mut vm, "busy 0", 3)?;
    let rounds = if plan.path.is_none() { 10 } else { 3 };
    let one = format!("flood 0 {register:#x} {min} {max}");
    let one = measure(&mut vm, &one, rounds)?;
    let all = measure(&mut vm, &format!("flood-all 0 {base:#x} 2 {min} {max}"), 10)?;
    let said = vm.quit()?;
    let log = dmesg("")?;
    let log = log.get(log_before..).unwrap_or(&log);
    let rows = [("set_perf", &one), ("all registers", &all)].map(|(what, flood)| {
        let ratio = flood.round_ns / plain.round_ns;
        let grown_kib = flood.after_kib.saturating_sub(flood.before_kib);
        json!({
            "held": ratio <= 1.05 && grown_kib <= 64 && flood.turns > 1_000, "what": what,
            "turns": flood.turns, "rounds": flood.rounds, "work_ratio": ratio,
            "round_ns": flood.round_ns, "vmm_grown_kib": grown_kib,
        })
    });
    let held = rows.iter().all(|row| row["held"] == true) && log.is_empty();
    Ok(json!({
        "held": held, "rows": rows, "plain_round_ns": plain.round_ns, "kernel_said": log,
        "vmm_said": said,
    }))
}

struct Measured {
    rounds: u32,
    /// Mean time of a round of the other vCPU's work.
    round_ns: f64,
    turns: u64,
    before_kib: u64,
    after_kib: u64,
}

/// The other vCPU's work while vCPU 0 carries `load`.
fn measure(vm: &mut Vm, load: &str, rounds: u32) -> Result<Measured> {
    vm.ask(format!("start load {load}"))?;
    // The first round fills what is filled once: buffers, page tables.
    vm.ask(format!("work 1 {TURNS}"))?;
    let before_kib = vm.resident_kib()?;
    let mut ns = 0;
    for _ in 0..rounds {
        ns += vm.number(format!("work 1 {TURNS}"))?;
    }
    let after_kib = vm.resident_kib()?;
    Ok(Measured {
        rounds,
        round_ns: ns as f64 / f64::from(rounds),
        turns: vm.number("stop load")?,
        before_kib,
        after_kib,
    })
}
