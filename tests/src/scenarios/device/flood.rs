// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest writes set_perf as fast as it can for 10 s, and then all registers of all vCPUs, or all
//! of the shared memory and its doorbells, for 10 s. A plain loop is the reference. It measures how
//! long another vCPU of it, and another guest, wait for their pCPUs meanwhile, and how often the
//! other guest exits. No clamp of its own is ever above its vCPU's limit, and the other guest's
//! stays as it was. `flood:worker` is without the host module. `flood:uart` is of the console's
//! registers: the same of another guest, and the time of the VMM's main thread, which is in no
//! vCPU's group.
//!
//! The time of the others' work is reported without a bound: busy emulated CPUs share one stream of
//! instructions, and a trap ends a CPU's turn in it. So beside a flood the work takes 0.86 to 1.18
//! of the time, by the path and the build, on CPUs that it doesn't use.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::{dmesg, without_host_module};
use crate::harness::plan::{GuestDevice, Plan};
use crate::harness::policy::Policy;
use crate::harness::stats::{counted_once, has_one_outcome_each, of as stats};
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};

/// About a second of the other vCPU's work beside a busy one.
const TURNS: u64 = 50_000_000;
/// The share of the others' time that they wait for their pCPU.
const MOST_WAITING: f64 = 0.05;
/// Exits of the other guest a second, beyond those beside the plain loop, which are some 570.
const MOST_EXITS: f64 = 100.0;

/// Of each of the two that work beside the load, in turn: 10 s together.
const ROUNDS: u32 = 5;
pub fn run(plan: &Plan, name: &str) -> Result<LabVerdict> {
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

fn uart(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let [low, .., high] = &policies[..] else {
        bail!("two policies are needed");
    };
    let silent = |pcpu: u32| Setup {
        silent: true,
        ..plan.mirroring(&[pcpu])
    };
    let mut vm = Vm::boot(&silent(low.cpu()))?;
    let mut beside = Vm::boot(&silent(high.cpu()))?;
    let mut measure = |load: &str, lasts| {
        vm.ask(format!("start load {load}"))?;
        // The first round fills what is filled once.
        beside.ask(format!("work 0 {TURNS}"))?;
        let (main_before, started) = (main_thread_ns(&vm)?, Instant::now());
        let before = Counted::of(&beside, 0)?;
        let mut ns = 0;
        for _ in 0..ROUNDS {
            ns += beside.number(format!("work 0 {TURNS}"))?;
        }
        let other = Counted::of(&beside, 0)?.since(before);
        let main_ns = main_thread_ns(&vm)? - main_before;
        let took = started.elapsed();
        // Nothing is typed while it lasts: it would read that.
        sleep(Duration::saturating_sub(lasts, took));
        let turns = vm.number("stop load")?;
        Ok::<_, anyhow::Error>((other.with_work(ns), main_ns, took, turns))
    };
    let (before, ..) = measure("busy 0", Duration::ZERO)?;
    let flood = format!("flood-uart 0 {UART} {}", UART_FLOOD.as_millis());
    let (other, main_ns, took, turns) = measure(&flood, UART_FLOOD)?;
    let said = [vm.quit()?, beside.quit()?];
    let percent = main_ns * 100 / u64::try_from(took.as_nanos())?.max(1);
    let lasted = took < UART_FLOOD;
    let figures = json!({
        "turns": turns, "rounds": ROUNDS, "other_guest": other.json(&before),
        "main_thread_percent": percent, "main_thread_ns": main_ns,
        "took_ms": took.as_millis(), "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "the other guest is undisturbed",
            other.undisturbed(&before),
            other.json(&before),
        )
        .check("the main thread's share", percent <= MAIN_PERCENT, percent)
        .check("the flood outlasts the measurement", lasted, took)
        .check("turns of the flood", turns > 1_000, turns))
}

/// The time that the VMM's main thread has run.
fn main_thread_ns(vm: &Vm) -> Result<u64> {
    let pid = vm.pid();
    Ok(sysfs::ran_and_waited_ns(&format!("/proc/{pid}/task/{pid}"))?.0)
}

fn flooded(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (low, high) = (
        policies.first().context("no policy")?,
        policies.last().context("no policy")?,
    );
    // Of one policy, or of two that are alike.
    let alike = policies.iter().filter(|policy| policy.opps == high.opps);
    let alike: Vec<u32> = alike.flat_map(|policy| policy.cpus.clone()).collect();
    let [.., own, other] = alike[..] else {
        bail!("the two that work have CPUs {alike:?}");
    };
    let silent = |pcpus: &[u32]| Setup {
        silent: true,
        ..plan.mirroring(pcpus)
    };
    let mut vm = Vm::boot(&silent(&[low.cpu(), own]))?;
    let mut beside = Vm::boot(&silent(&[other]))?;
    // KVM on x86-64 tells what a booting guest asks of its CPU.
    let log_before = dmesg("")?.len();
    let device = GuestDevice::of(&mut vm)?;
    let (base, register) = (device.base, device.set_perf(0));
    let (min, max) = (low.min(), low.max());
    let all = match device.bell {
        Some((bell, ring)) => format!("scribble 0 {base:#x} {bell:#x},{ring:#x} 2"),
        None => format!("flood-all 0 {base:#x} 2 {min} {max}"),
    };
    let loads = [
        ("set_perf", format!("flood 0 {register} {min} {max}")),
        ("all registers", all),
    ];
    let clamps = Clamps {
        limits: [low, high].map(|policy| policy.util(policy.max())),
        beside: beside.clamp(0)?,
    };
    let (mut rows, mut turns) = (Vec::new(), Vec::new());
    let plain = measure(&mut vm, &mut beside, "busy 0", &clamps)?;
    for (what, load) in &loads {
        let flood = measure(&mut vm, &mut beside, load, &clamps)?;
        turns.push(flood.turns);
        rows.push(flood.row(what, &plain));
    }
    // What waits for the limit gets its turn.
    sleep(Duration::from_millis(200));
    let counted = stats(&vm)?["vcpus"].clone();
    let others_clamp = [clamps.beside, beside.clamp(0)?];
    let said = [vm.quit()?, beside.quit()?];
    let log = dmesg("")?;
    let log = log.get(log_before..).unwrap_or(&log);
    // Each turn of the second load writes both.
    let written: [u64; 2] = [turns.iter().sum(), turns[1]];
    // A store to RAM is a request if it is there when the VMM looks.
    let looks = plan.path.as_deref() == Some("ram");
    let is_right = |(vcpu, written): (&Value, u64)| match (looks, device.bell) {
        (true, _) => {
            let requests = vcpu["counts"]["requests"].as_u64();
            has_one_outcome_each(vcpu) && requests.is_some_and(|n| (1..=written).contains(&n))
        }
        (false, Some(_)) => rang_once(vcpu, written),
        (false, None) => counted_once(vcpu, written),
    };
    let each_once = counted
        .as_array()
        .is_some_and(|vcpus| vcpus.len() == 2 && vcpus.iter().zip(written).all(is_right));
    let figures = json!({
        "counted": counted,
        "other_guests_clamp": others_clamp, "kernel_said": log, "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .parts("rows", rows)
        .check("the kernel says nothing", log.is_empty(), log)
        .check("each request is counted once", each_once, &counted)
        .check(
            "the other guest's clamp stays",
            others_clamp[0] == others_clamp[1],
            others_clamp,
        ))
}

/// Whether each ring is counted once. The end of a ceiling counts as a request, too, and in a memory
/// of random values are ceilings: they end where a turn takes longer than they hold.
fn rang_once(vcpu: &Value, rings: u64) -> bool {
    let requests = vcpu["counts"]["requests"].as_u64();
    vcpu["accesses"]["writes_in_kernel"] == rings
        && has_one_outcome_each(vcpu)
        && requests.is_some_and(|requests| requests >= rings)
}

/// What the kernel has counted of a vCPU's thread and its guest.
#[derive(Clone, Copy)]
struct Counted {
    ran_ns: u64,
    waited_ns: u64,
    /// Of all vCPUs of the guest.
    exits: u64,
    /// The time that the work took, as the guest measured it.
    work_ns: u64,
}

impl Counted {
    fn of(vm: &Vm, vcpu: usize) -> Result<Self> {
        let tid = vm.vcpu_tid(vcpu)?;
        let thread = format!("/proc/{}/task/{tid}", vm.pid());
        let (ran_ns, waited_ns) = sysfs::ran_and_waited_ns(&thread)?;
        Ok(Self {
            ran_ns,
            waited_ns,
            exits: exits_of(vm.pid())?,
            work_ns: 0,
        })
    }

    fn since(self, before: Self) -> Self {
        Self {
            ran_ns: self.ran_ns - before.ran_ns,
            waited_ns: self.waited_ns - before.waited_ns,
            exits: self.exits - before.exits,
            work_ns: 0,
        }
    }

    fn with_work(self, work_ns: u64) -> Self {
        Self { work_ns, ..self }
    }

    /// Of the time that it wanted its pCPU.
    fn waiting(&self) -> f64 {
        self.waited_ns as f64 / (self.ran_ns + self.waited_ns).max(1) as f64
    }

    fn exits_per_second(&self) -> f64 {
        self.exits as f64 * 1e9 / self.ran_ns.max(1) as f64
    }

    /// Whether it had its pCPU as beside the plain loop.
    fn undisturbed(&self, plain: &Self) -> bool {
        self.waits_little() && self.exits_per_second() <= plain.exits_per_second() + MOST_EXITS
    }

    fn waits_little(&self) -> bool {
        self.ran_ns > 0 && self.waiting() <= MOST_WAITING
    }

    fn json(&self, plain: &Self) -> Value {
        json!({
            "waiting": self.waiting(), "waiting_beside_plain": plain.waiting(),
            "exits_per_second": self.exits_per_second(),
            "exits_per_second_beside_plain": plain.exits_per_second(),
            "work_ratio": self.work_ns as f64 / plain.work_ns.max(1) as f64,
        })
    }
}

/// KVM's count of all exits of a VMM's guest.
fn exits_of(vmm: u32) -> Result<u64> {
    const STATISTICS: &str = "/sys/kernel/debug/kvm";
    let own = format!("{vmm}-");
    let folders = fs::read_dir(STATISTICS).context(STATISTICS)?;
    let folder = folders
        .filter_map(Result::ok)
        .find(|entry| entry.file_name().to_string_lossy().starts_with(&own))
        .with_context(|| format!("{STATISTICS} has no guest of process {vmm}"))?;
    sysfs::number(folder.path().join("exits"))
}

/// What was counted while a load lasted.
struct FloodCounts {
    vcpu: Counted,
    guest: Counted,
    turns: u64,
    grown_kib: u64,
    /// Clamps that were seen of the load's own vCPUs, and of the other guest's.
    seen: Vec<[u32; 3]>,
    clamps_hold: bool,
}

/// What the clamps are held to.
struct Clamps {
    /// Of the load's own vCPUs: never above.
    limits: [u32; 2],
    /// Of the other guest's vCPU: always this.
    beside: (u32, u32),
}

impl Clamps {
    /// The minima now, and whether they hold.
    fn look(&self, vm: &Vm, beside: &Vm) -> Result<([u32; 3], bool)> {
        let (own, other) = ([vm.clamp(0)?.0, vm.clamp(1)?.0], beside.clamp(0)?);
        let within = own
            .iter()
            .zip(self.limits)
            .all(|(own, limit)| *own <= limit);
        Ok(([own[0], own[1], other.0], within && other == self.beside))
    }
}

impl FloodCounts {
    /// This flood against the plain loop.
    fn row(&self, what: &str, plain: &Self) -> LabVerdict {
        // The exits of the vCPU's guest are those of the flood.
        let undisturbed = self.vcpu.waits_little() && self.guest.undisturbed(&plain.guest);
        let figures = json!({
            "what": what, "turns": self.turns, "rounds_of_each": ROUNDS,
            "other_vcpu": self.vcpu.json(&plain.vcpu),
            "other_guest": self.guest.json(&plain.guest), "vmm_grown_kib": self.grown_kib,
            "clamps_seen": self.seen,
        });
        let both = json!([figures["other_vcpu"], figures["other_guest"]]);
        LabVerdict::with_figures(figures)
            .check("others are undisturbed", undisturbed, both)
            .check("clamps hold", self.clamps_hold, &self.seen)
            .check("the VMM doesn't grow", self.grown_kib <= 64, self.grown_kib)
            .check("turns of the flood", self.turns > 1_000, self.turns)
    }
}

/// The others' work while vCPU 0 carries `load`, one after the other: what is busy beside them
/// is the load alone.
fn measure(vm: &mut Vm, beside: &mut Vm, load: &str, clamps: &Clamps) -> Result<FloodCounts> {
    vm.ask(format!("start load {load}"))?;
    // The first round fills what is filled once: buffers, page tables.
    vm.ask(format!("work 1 {TURNS}"))?;
    beside.ask(format!("work 0 {TURNS}"))?;
    let before_kib = vm.resident_kib()?;
    let before = [Counted::of(vm, 1)?, Counted::of(beside, 0)?];
    let (mut vcpu_ns, mut guest_ns) = (0, 0);
    let (mut seen, mut clamps_hold) = (Vec::new(), true);
    for _ in 0..ROUNDS {
        vcpu_ns += vm.number(format!("work 1 {TURNS}"))?;
        let (minima, hold) = clamps.look(vm, beside)?;
        seen.push(minima);
        clamps_hold &= hold;
        guest_ns += beside.number(format!("work 0 {TURNS}"))?;
    }
    let after = [Counted::of(vm, 1)?, Counted::of(beside, 0)?];
    let grown_kib = vm.resident_kib()?.saturating_sub(before_kib);
    Ok(FloodCounts {
        vcpu: after[0].since(before[0]).with_work(vcpu_ns),
        guest: after[1].since(before[1]).with_work(guest_ns),
        turns: vm.number("stop load")?,
        grown_kib,
        seen,
        clamps_hold,
    })
}
