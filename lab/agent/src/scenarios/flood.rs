// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that writes set_perf as fast as it can for 10 s, and one that does so
//! to all registers of all vCPUs, against the same guest with a plain loop in
//! its place.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Plan, Policy, registers};
use crate::deeds::dmesg;
use crate::vm::{Setup, Vm};

/// About a second of the other vCPU's work beside a busy one, ten times over.
const TURNS: u64 = 50_000_000;
const ROUNDS: usize = 10;

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
    let plain = measure(&setup, |_| Ok("start load busy 0".to_owned()))?;
    let flood = measure(&setup, |vm| {
        let register = registers(vm)? + 0x04;
        Ok(format!(
            "start load flood 0 {register:#x} {} {}",
            low.min(),
            low.max()
        ))
    })?;
    let all = measure(&setup, |vm| {
        let base = registers(vm)?;
        let (low, high) = (low.min(), low.max());
        Ok(format!("start load flood-all 0 {base:#x} 2 {low} {high}"))
    })?;
    let log = dmesg("")?;
    let log = log.get(log_before..).unwrap_or(&log);
    let rows = [("set_perf", &flood), ("all registers", &all)].map(|(what, flood)| {
        let ratio = flood.ns as f64 / plain.ns.max(1) as f64;
        let grown_kib = flood.after_kib.saturating_sub(flood.before_kib);
        json!({
            "held": ratio <= 1.05 && grown_kib <= 64 && flood.turns > 1_000, "what": what,
            "turns": flood.turns, "vmm_said": flood.said, "work_ratio": ratio,
            "work_flood_ns": flood.ns, "vmm_grown_kib": grown_kib,
        })
    });
    let held = rows.iter().all(|row| row["held"] == true) && log.is_empty();
    Ok(json!({ "held": held, "rows": rows, "work_plain_ns": plain.ns, "kernel_said": log }))
}

struct Measured {
    ns: u64,
    turns: u64,
    before_kib: u64,
    after_kib: u64,
    said: String,
}

fn measure(setup: &Setup, load: impl FnOnce(&mut Vm) -> Result<String>) -> Result<Measured> {
    let mut vm = Vm::boot(setup)?;
    let start = load(&mut vm)?;
    vm.ask(start)?;
    // The first round fills what is filled once: buffers, page tables.
    vm.ask(format!("work 1 {TURNS}"))?;
    let before_kib = vm.resident_kib()?;
    let mut ns = 0;
    for _ in 0..ROUNDS {
        ns += vm.number(format!("work 1 {TURNS}"))?;
    }
    let after_kib = vm.resident_kib()?;
    let turns = vm.number("stop load")?;
    let said = vm.quit()?;
    Ok(Measured {
        said,
        ns,
        turns,
        before_kib,
        after_kib,
    })
}
