// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that writes set_perf as fast as it can for 10 s, and then to all
//! registers of all vCPUs for 10 s, against a plain loop in its place: what another
//! vCPU of it, and another guest, get done meanwhile. `flood:worker` is without the
//! host module. `flood:uart` is of the console's registers: what another guest gets done, and the
//! time of the VMM's main thread, which is in no vCPU's group.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::stats::{counted_once, of as stats};
use super::{Plan, Policy, registers};
use crate::deeds::{dmesg, without_host_module};
use crate::load::Load;
use crate::sysfs;
use crate::vm::{Setup, Vm};

/// About a second of the other vCPU's work where all of four CPUs are busy.
const TURNS: u64 = 25_000_000;
/// The time of the others' work, to that beside the plain loop.
const MOST: f64 = 1.05;

/// Of each of the two that work beside the load, in turn: 10 s together.
const ROUNDS: u32 = 5;
/// Of each beside the plain loop, before and after each flood.
const PLAIN_ROUNDS: u32 = 1;
/// Of one build the figures repeat; of another, which CPU comes first has them differ by some
/// per cent (`--later-us`). So what is beyond the bound is measured again, so often at most.
const DRAWS: u32 = 3;

pub fn run(plan: &Plan, name: &str) -> Result<Value> {
    match name {
        "flood:worker" => without_host_module(|| flooded(plan)),
        "flood:uart" => uart(plan),
        _ => flooded(plan),
    }
}

/// Where the guest has its UART.
const UART: &str = "0x9000000";
/// Longer than the rounds of the other guest's work.
const UART_FLOOD: Duration = Duration::from_secs(15);
/// The main thread's time, of the time of these rounds.
const MAIN_PERCENT: u64 = 5;

fn uart(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let [low, .., high] = &policies[..] else {
        bail!("two policies are needed");
    };
    let silent = |pcpu: u32| Setup {
        silent: true,
        ..plan.mirroring(&[pcpu])
    };
    let _fillers = fillers(&policies);
    let mut vm = Vm::boot(&silent(low.cpu()))?;
    let mut beside = Vm::boot(&silent(high.cpu()))?;
    let mut measure = |load: &str, lasts| {
        vm.ask(format!("start load {load}"))?;
        // The first round fills what is filled once.
        beside.ask(format!("work 0 {TURNS}"))?;
        let (main_before, started) = (main_thread_ns(&vm)?, Instant::now());
        let mut ns = 0;
        for _ in 0..ROUNDS {
            ns += beside.number(format!("work 0 {TURNS}"))?;
        }
        let main_ns = main_thread_ns(&vm)? - main_before;
        let took = started.elapsed();
        // Nothing is typed while it lasts: it would read that.
        sleep(Duration::saturating_sub(lasts, took));
        let turns = vm.number("stop load")?;
        Ok::<_, anyhow::Error>((ns, main_ns, took, turns))
    };
    let before = measure("busy 0", Duration::ZERO)?;
    let flood = format!("flood-uart 0 {UART} {}", UART_FLOOD.as_millis());
    let (ns, main_ns, took, turns) = measure(&flood, UART_FLOOD)?;
    let after = measure("busy 0", Duration::ZERO)?;
    let said = [vm.quit()?, beside.quit()?];
    let ratio = ns as f64 / f64::midpoint(before.0 as f64, after.0 as f64);
    let percent = main_ns * 100 / u64::try_from(took.as_nanos())?.max(1);
    let lasted = took < UART_FLOOD;
    Ok(json!({
        "held": ratio <= MOST && percent <= MAIN_PERCENT && lasted && turns > 1_000,
        "turns": turns, "rounds": ROUNDS, "other_guest_ratio": ratio,
        "main_thread_percent": percent, "main_thread_ns": main_ns,
        "took_ms": took.as_millis(), "vmm_said": said,
    }))
}

/// The time that the VMM's main thread has run.
fn main_thread_ns(vm: &Vm) -> Result<u64> {
    let pid = vm.pid();
    let text = sysfs::text(format!("/proc/{pid}/task/{pid}/schedstat"))?;
    let ns = text.split(' ').next().context("schedstat is empty")?;
    Ok(ns.parse()?)
}

/// Keeps each pCPU busy with what yields to all else. The emulated CPUs that are busy share one
/// stream of instructions, so without it a worker on a CPU that is otherwise idle would slow
/// the others down, which it doesn't on a real host.
fn fillers(policies: &[Policy]) -> Vec<Load> {
    let cpus = policies.iter().flat_map(|policy| &policy.cpus);
    cpus.map(|cpu| Load::filler(*cpu)).collect()
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
    let _fillers = fillers(&policies);
    let mut vm = Vm::boot(&silent(&[low.cpu(), own]))?;
    let mut beside = Vm::boot(&silent(&[other]))?;
    let base = registers(&mut vm)?;
    let register = base + 0x04;
    let (min, max) = (low.min(), low.max());
    let loads = [
        ("set_perf", format!("flood 0 {register:#x} {min} {max}")),
        (
            "all registers",
            format!("flood-all 0 {base:#x} 2 {min} {max}"),
        ),
    ];
    let (mut rows, mut turns) = (Vec::new(), Vec::new());
    let mut before = measure(&mut vm, &mut beside, "busy 0", PLAIN_ROUNDS)?;
    for (what, load) in &loads {
        let mut of_load = 0;
        for draw in 1..=DRAWS {
            let flood = measure(&mut vm, &mut beside, load, ROUNDS)?;
            let after = measure(&mut vm, &mut beside, "busy 0", PLAIN_ROUNDS)?;
            let row = flood.row((what, draw), [&before, &after]);
            before = after;
            of_load += flood.turns;
            let held = row["held"] == true;
            rows.push(row);
            if held {
                break;
            }
        }
        turns.push(of_load);
    }
    // What waits for the limit gets its turn.
    sleep(Duration::from_millis(200));
    let counted = stats(&vm)?["vcpus"].clone();
    let said = [vm.quit()?, beside.quit()?];
    let log = dmesg("")?;
    let log = log.get(log_before..).unwrap_or(&log);
    // Each turn of the second load writes both.
    let written = [turns.iter().sum(), turns[1]];
    let each_once = counted.as_array().is_some_and(|vcpus| {
        vcpus.len() == 2
            && vcpus
                .iter()
                .zip(written)
                .all(|(vcpu, written)| counted_once(vcpu, written))
    });
    let within = |(what, _): &(&str, String)| {
        let held = |row: &Value| row["what"] == *what && row["held"] == true;
        rows.iter().any(held)
    };
    let held = loads.iter().all(within) && log.is_empty() && each_once;
    Ok(json!({
        "held": held, "rows": rows, "counted": counted,
        "kernel_said": log, "vmm_said": said,
    }))
}

/// What was counted while a load lasted.
struct Measured {
    /// Mean time of a round of the other vCPU's work.
    vcpu_ns: f64,
    /// The same of the other guest's.
    guest_ns: f64,
    turns: u64,
    before_kib: u64,
    after_kib: u64,
}

impl Measured {
    /// This flood against the plain loop before and after it.
    fn row(&self, (what, draw): (&str, u32), [before, after]: [&Self; 2]) -> Value {
        let vcpu = self.vcpu_ns / f64::midpoint(before.vcpu_ns, after.vcpu_ns);
        let guest = self.guest_ns / f64::midpoint(before.guest_ns, after.guest_ns);
        let grown_kib = self.after_kib.saturating_sub(self.before_kib);
        json!({
            "held": vcpu <= MOST && guest <= MOST && grown_kib <= 64 && self.turns > 1_000,
            "what": what, "draw": draw, "turns": self.turns, "rounds_of_each": ROUNDS,
            "other_vcpu_ratio": vcpu, "other_guest_ratio": guest, "vmm_grown_kib": grown_kib,
        })
    }
}

/// The others' work while vCPU 0 carries `load`, one after the other.
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
