// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that writes set_perf as fast as it can for 10 s, and then to all
//! registers of all vCPUs for 10 s, against a plain loop in its place: what another
//! vCPU of it, and another guest, get done meanwhile. `flood:worker` is without the
//! host module.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::stats::{counted_once, of as stats};
use super::{Plan, Policy, registers};
use crate::deeds::{dmesg, without_host_module};
use crate::vm::{Setup, Vm};

/// About a second of the other vCPU's work beside a busy one.
const TURNS: u64 = 50_000_000;
/// The time of the others' work, to that beside the plain loop.
const MOST: f64 = 1.05;

/// Of each of the two that work beside the load, in turn: 10 s together.
const ROUNDS: u32 = 5;
/// Of each beside the plain loop, before and after each flood.
const PLAIN_ROUNDS: u32 = 1;

pub fn run(plan: &Plan, name: &str) -> Result<Value> {
    if name != "flood:worker" {
        return flooded(plan);
    }
    without_host_module(|| flooded(plan))
}

fn flooded(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let (low, high) = (
        policies.first().context("no policy")?,
        policies.last().context("no policy")?,
    );
    let [own, other] = high.cpus[..] else {
        bail!("the policy of the two that work has CPUs {:?}", high.cpus);
    };
    let silent = |pcpus: &[u32]| Setup {
        silent: true,
        ..plan.mirroring(pcpus)
    };
    let log_before = dmesg("")?.len();
    let mut vm = Vm::boot(&silent(&[low.cpu(), own]))?;
    let mut beside = Vm::boot(&silent(&[other]))?;
    let base = registers(&mut vm)?;
    let register = base + 0x04;
    let (min, max) = (low.min(), low.max());
    let mut measure = |load: &str, rounds| measure(&mut vm, &mut beside, load, rounds);
    let before = measure("busy 0", PLAIN_ROUNDS)?;
    let one = measure(&format!("flood 0 {register:#x} {min} {max}"), ROUNDS)?;
    let between = measure("busy 0", PLAIN_ROUNDS)?;
    let all = measure(&format!("flood-all 0 {base:#x} 2 {min} {max}"), ROUNDS)?;
    let after = measure("busy 0", PLAIN_ROUNDS)?;
    // What waits for the limit gets its turn.
    sleep(Duration::from_millis(200));
    let counted = stats(&vm)?["vcpus"].clone();
    let said = [vm.quit()?, beside.quit()?];
    let log = dmesg("")?;
    let log = log.get(log_before..).unwrap_or(&log);
    let rows = [
        ("set_perf", &one, [&before, &between]),
        ("all registers", &all, [&between, &after]),
    ];
    let rows = rows.map(|(what, flood, [before, after])| {
        let vcpu = flood.vcpu_ns / f64::midpoint(before.vcpu_ns, after.vcpu_ns);
        let guest = flood.guest_ns / f64::midpoint(before.guest_ns, after.guest_ns);
        let grown_kib = flood.after_kib.saturating_sub(flood.before_kib);
        json!({
            "held": vcpu <= MOST && guest <= MOST && grown_kib <= 64 && flood.turns > 1_000,
            "what": what, "turns": flood.turns, "rounds_of_each": ROUNDS,
            "other_vcpu_ratio": vcpu, "other_guest_ratio": guest, "vmm_grown_kib": grown_kib,
        })
    });
    let plain_ns = [&before, &between, &after].map(|plain| [plain.vcpu_ns, plain.guest_ns]);
    // Each turn of the second load writes both.
    let written = [one.turns + all.turns, all.turns];
    let each_once = counted.as_array().is_some_and(|vcpus| {
        vcpus.len() == 2
            && vcpus
                .iter()
                .zip(written)
                .all(|(vcpu, written)| counted_once(vcpu, written))
    });
    let held = rows.iter().all(|row| row["held"] == true) && log.is_empty() && each_once;
    Ok(json!({
        "held": held, "rows": rows, "counted": counted,
        "plain_round_ns": plain_ns,
        "kernel_said": log, "vmm_said": said,
    }))
}

struct Measured {
    /// Mean time of a round of the other vCPU's work.
    vcpu_ns: f64,
    /// The same of the other guest's.
    guest_ns: f64,
    turns: u64,
    before_kib: u64,
    after_kib: u64,
}

/// The others' work while vCPU 0 carries `load`. One after the other, for all
/// emulated CPUs that are busy share one stream of instructions.
fn measure(vm: &mut Vm, beside: &mut Vm, load: &str, rounds: u32) -> Result<Measured> {
    vm.ask(format!("start load {load}"))?;
    // The first round fills what is filled once: buffers, page tables.
    vm.ask(format!("work 1 {TURNS}"))?;
    beside.ask(format!("work 0 {TURNS}"))?;
    let before_kib = vm.resident_kib()?;
    let (mut vcpu_ns, mut guest_ns) = (0, 0);
    for _ in 0..rounds {
        vcpu_ns += vm.number(format!("work 1 {TURNS}"))?;
        guest_ns += beside.number(format!("work 0 {TURNS}"))?;
    }
    let after_kib = vm.resident_kib()?;
    let mean = |ns: u64| ns as f64 / f64::from(rounds);
    Ok(Measured {
        vcpu_ns: mean(vcpu_ns),
        guest_ns: mean(guest_ns),
        turns: vm.number("stop load")?,
        before_kib,
        after_kib,
    })
}
