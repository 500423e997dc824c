// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest by `--actuator scx`. Its requests set no clamp as long as the service's scheduler is in
//! force, and become clamps within 100 ms when it is gone, for whatever reason.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use libbpf_rs::{ObjectBuilder, ProgramInput};
use serde_json::{Value, json};
use vcpufreq_host::effective_clamp;
use vcpufreq_host_bpf::ScxPins;
use vcpufreq_tests::LabVerdict;

use super::super::ext_server::ExtScheduler;
use super::deaths::stuck;
use super::service::{ServiceProcess, disabled, in_force, left, said, scx, sysrq, vm_refused};
use crate::harness::machine::mount_bpffs;
use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::{Vm, events};
use crate::harness::vmm::Vmm;
use crate::harness::wait::{SOON, settled};

/// Twice what the kernel takes to end it. A VMM looks each 25 ms.
const WITHIN_MS: u128 = 100;

/// How the scheduler goes, and what is there in its place.
type SchedulerEnd = fn(ServiceProcess) -> Result<Option<ExtScheduler>>;

const ENDS: [(&str, SchedulerEnd); 5] = [
    ("SysRq-S", |service| {
        sysrq()?;
        service.ended().map(|_| None)
    }),
    ("kill -9", |service| service.kill().map(|()| None)),
    ("stop", |service| {
        said(&scx(&["stop"])?);
        service.ended().map(|_| None)
    }),
    ("a target of 1,025", |service| {
        too_high_a_target()?;
        service.ended().map(|_| None)
    }),
    ("another scheduler", |service| {
        sysrq()?;
        service.ended()?;
        ExtScheduler::start("takes_all").map(Some)
    }),
];

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    mount_bpffs()?;
    let without = vm_refused()?;
    let named = without.contains("no vcpufreq scx service runs");
    let mut rows = Vec::new();
    for (name, end) in ENDS {
        let row = one(plan, end).with_context(|| name.to_owned())?;
        rows.push(LabVerdict::default().figure("end", name).part("seen", row));
    }
    // What a killed one leaves goes with the next.
    let left = left()?;
    let figures = json!({ "without_service": without, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check("without a service it is refused", named, &without)
        .parts("rows", rows)
        .check("nothing is left", left.is_empty(), &left))
}

fn one(plan: &Plan, end: SchedulerEnd) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    let pcpus = first_cpus(&policies);
    let service = ServiceProcess::start()?;
    let setup = plan.mirroring(&pcpus).with(&["--actuator", "scx"]);
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, vcpu, "userspace")?;
    let (khz, other) = (
        policy.at_least(policy.max() / 2),
        policy.at_least(policy.max() / 3),
    );
    ask_for(&mut vm, vcpu, khz)?;
    let before = vm.clamp(vcpu)?;
    let status = said(&scx(&["status"])?).1;
    let counted = status.ends_with(&format!(", {} vCPUs\n", pcpus.len()));
    let target = busy_target(&mut vm, vcpu)?;
    let (another, ms) = ended(&vm, vcpu, (policy.util(khz), 1024), || end(service))?;
    ask_for(&mut vm, vcpu, other)?;
    // By the worker, and no longer at once.
    let thread = (vm.pid(), vm.vcpu_tid(vcpu)?);
    let then_ms = until(thread, (policy.util(other), 1024), Instant::now())?;
    let told = target.as_u64() > Some(0) && self::target(vcpu)?.is_null();
    let pcpu_khz = busy_khz(&mut vm, vcpu, policy)?;
    vm.quit()?;
    // A server's events have requests alone.
    let serves = plan.vmm == Vmm::Qemu;
    let in_events = events()?.iter().any(|event| {
        let known = [
            "pcpu_khz",
            "own_util",
            "others_util",
            "target_sum",
            "target",
        ];
        event["event"] == "load"
            && event["vcpu"] == vcpu
            && known.iter().all(|key| event[key].is_u64())
    });
    if let Some(another) = another {
        another.end()?;
    }
    let stuck = stuck(&policies)?;
    let figures = json!({
        "clamp_before": before, "status": status, "clamp_after_ms": ms,
        "next_clamp_after_ms": then_ms, "asked_khz": other, "pcpu_khz": pcpu_khz, "stuck": stuck,
        "target": target, "in_events": in_events,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no clamp before", &before, (0, 1024))
        .check("the vCPUs are counted", counted, &status)
        .check("the target is told before, and not after", told, &target)
        .check("the load is in the events", in_events || serves, ())
        .check("a clamp soon", ms <= WITHIN_MS, ms)
        .check("the next one soon", then_ms <= WITHIN_MS, then_ms)
        .check("the pCPU runs at it", pcpu_khz >= other, pcpu_khz)
        .check_none("no pCPU is stuck", &stuck))
}

/// Ends the scheduler; virtual ms from the last look that finds it in force until that clamp is the
/// vCPU's.
fn ended<T>(
    vm: &Vm,
    vcpu: usize,
    clamp: (u32, u32),
    end: impl FnOnce() -> Result<T>,
) -> Result<(T, u128)> {
    let (pins, thread) = (ScxPins::open()?, (vm.pid(), vm.vcpu_tid(vcpu)?));
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| until(thread, clamp, last_in_force(&pins)?));
        let done = end()?;
        let ms = watcher.join().map_err(|_| anyhow!("a thread panicked"))??;
        Ok((done, ms))
    })
}

/// Waits for the scheduler's end. Returns the time of the last look that found it in force, both by the
/// kernel's files and by what VMMs look at.
fn last_in_force(pins: &ScxPins) -> Result<Instant> {
    let start = Instant::now();
    let mut last = start;
    loop {
        let look = Instant::now();
        if !in_force() || !pins.is_on() {
            return Ok(last);
        }
        last = look;
        ensure!(start.elapsed() < 10 * SOON, "the scheduler does not end");
        sleep(Duration::from_millis(1));
    }
}

/// Waits until that clamp is the thread's of the process; virtual ms since then.
fn until((pid, tid): (u32, i32), clamp: (u32, u32), since: Instant) -> Result<u128> {
    let file = format!("/proc/{pid}/task/{tid}/sched");
    let look = || effective_clamp(&sysfs::text(&file)?).context("the kernel shows no clamp");
    let now = settled(SOON, look, |now| *now == clamp)?;
    ensure!(now == clamp, "the clamp is {now:?}, not {clamp:?}");
    Ok(since.elapsed().as_millis())
}

/// By a program of somebody else's, loaded meanwhile.
fn too_high_a_target() -> Result<()> {
    let object = ObjectBuilder::default().open_file("/lab/bpf/target.bpf.o")?;
    let object = object.load().context("target.bpf.o")?;
    let program = object.progs_mut().next().context("no program")?;
    program.test_run(ProgramInput::default())?;
    disabled().map(drop)
}

/// The target that the stats have once the vCPU has been seen busy. It uses less than it asks for.
pub fn busy_target(vm: &mut Vm, vcpu: usize) -> Result<Value> {
    vm.ask(format!("start light periodic {vcpu} 20000 4000"))?;
    // It is 0 while the vCPU sleeps.
    let target = settled(
        10 * SOON,
        || target(vcpu),
        |target| target.as_u64() > Some(0),
    );
    vm.ask("stop light")?;
    target
}

/// The highest frequency of its pCPU while the vCPU has a little to do.
fn busy_khz(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<u32> {
    vm.ask(format!("start light periodic {vcpu} 20000 4000"))?;
    let mut highest = 0;
    for _ in 0..100 {
        highest = highest.max(policy.khz()?);
        sleep(Duration::from_millis(2));
    }
    vm.ask("stop light")?;
    Ok(highest)
}

/// What `stats` has of the target of the vCPU's pCPU.
fn target(vcpu: usize) -> Result<Value> {
    let output = Command::new("/bin/vcpufreq")
        .args(["stats", "--json"])
        .output()?;
    let stats: Value = serde_json::from_slice(&output.stdout).context("stats --json")?;
    Ok(stats["vcpus"][vcpu]["target"].clone())
}
