// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A request by `scx` makes no exit, is in force before the guest's next entry, writes no clamp and no
//! cgroup's file, without the host's module. Requests and other load of a pCPU add up. Nothing is
//! left of a vCPU that sleeps or has ended.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::{Instance, TraceLine, events};
use vcpufreq_host_bpf::ActuateBy;
use vcpufreq_tests::LabVerdict;
use vmm_sys_util::eventfd::EventFd;

use super::super::group::ClampGroup;
use super::super::requests::exits;
use super::super::sum::utilization;
use super::super::tiny_vm::Deed;
use super::super::vcpu::{FROM_KHZ, SET_PERF, STEP_KHZ, TinyVcpu, own_clamps, stores};
use super::service::{ServiceProcess, said, scx};
use super::{most, threads};
use crate::harness::console_commands::without_host_module;
use crate::harness::load::{self, Load};
use crate::harness::machine::mount_bpffs;
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::trace::probe::Probe;

/// Turns of the guest's loop in 4 ms: three instructions of 2 ns each.
const TURNS: u64 = 4_000_000 / 6;
/// Requests until the kernel's estimate is of the vCPU as it is.
const SETTLING: u64 = 24;
/// Each for what is in force.
const MANY: u64 = 20_000;
/// Each for another target, from [`FROM_KHZ`] to the maximum.
const FEW: u64 = 375;
/// Of these requests: a tick in a burst of 5 ms counts as much as a target.
const BURSTS: usize = 9;
/// More than one step of a target, which is of four fifths of a request.
const TARGET_STEP_KHZ: u32 = 2 * STEP_KHZ;
/// A request by scx of one by `exit`: it takes 42; on x86-64, where KVM emulates the instruction, up to
/// 57.
const AT_MOST_PERCENT: u64 = if cfg!(target_arch = "aarch64") {
    44
} else {
    60
};
/// Until little is left of what a vCPU has used: by half each 32 ms.
const REST: Duration = Duration::from_millis(300);
/// A vCPU that is seldom busy: what it uses counts little.
const PAUSE: Duration = Duration::from_millis(100);

pub fn run() -> Result<LabVerdict> {
    mount_bpffs()?;
    without_host_module(beside_service)
}

fn beside_service() -> Result<LabVerdict> {
    let service = ServiceProcess::start()?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    // For each change to be seen when it is made.
    let limit = format!("{}/schedutil/rate_limit_us", policy.path);
    let before = sysfs::text(&limit)?;
    sysfs::write(&limit, 0)?;
    let result = parts(policy);
    sysfs::write(&limit, before)?;
    let parts = result?;
    let status = said(&scx(&["status"])?).1;
    let nobody = status == format!("running, process {}, 0 vCPUs\n", service.pid());
    said(&scx(&["stop"])?);
    Ok(LabVerdict::default()
        .parts("parts", parts)
        .check("no vCPU is left", nobody, &status)
        .figure("status", status))
}

fn parts(policy: &Policy) -> Result<Vec<LabVerdict>> {
    let ((alone, load, vms, most), files) = files_written(|| {
        let alone = on_thread(|| alone(policy))?;
        let (load, vms) = (beside_load(policy)?, beside_vm(policy)?);
        Ok((alone, load, vms, most::run(policy, settled)?))
    })?;
    let cost = on_thread(|| cost(&alone))?;
    let (joins, keeps) = (on_thread(threads::joins)?, on_thread(threads::keeps)?);
    Ok(vec![alone, load, vms, most, files, cost, joins, keeps])
}

/// How many files of cgroups are written meanwhile.
fn files_written<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, LabVerdict)> {
    let _probe = Probe::set('p', "written", "cgroup_file_write")?;
    let trace = Instance::create("cgroups", 64)?;
    trace.enable(&["lab/written"])?;
    trace.start()?;
    let done = work();
    let text = stop(trace)?;
    let written = events(&text).count();
    let figures = json!({ "part": "files of cgroups", "written": written });
    let row = LabVerdict::with_figures(figures).check_eq("no file is written", &written, 0);
    Ok((done?, row))
}

/// A request for another target against one by an exit with its clamp, in the same VM.
fn cost(alone: &LabVerdict) -> Result<LabVerdict> {
    let mut vcpu = TinyVcpu::new(ActuateBy::Nothing)?;
    let group = ClampGroup::with_current("scx")?;
    let by_exit = exits(&mut vcpu, &group)?;
    let by_scx = alone.get("new_virtual_ns").as_u64().context("no time")?;
    let percent = by_scx * 100 / by_exit.max(1);
    let figures = json!({
        "part": "cost", "scx_virtual_ns": by_scx, "exit_virtual_ns": by_exit, "percent": percent,
    });
    let little = by_scx * 100 <= by_exit * AT_MOST_PERCENT;
    Ok(LabVerdict::with_figures(figures).check("less than by exit", little, percent))
}

fn on_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("vcpu0".into());
        let running = thread.spawn_scoped(scope, work)?;
        running.join().map_err(|_| anyhow!("a vCPU panicked"))?
    })
}

/// Each OPP in turn, up and down, by a vCPU that has slept.
fn alone(policy: &Policy) -> Result<LabVerdict> {
    let (mut vcpu, _event) = settled(policy)?;
    let mut order = policy.opps.clone();
    order.extend(policy.opps.iter().rev());
    let (watch, before) = watch(policy)?;
    let mut exits = 0;
    for &khz in &order {
        std::thread::sleep(PAUSE);
        exits += vcpu.vm.run(request(khz), |_, _| ())?.exits;
    }
    let writes = writes(&stop(watch)?, policy, before)?;
    let counters = vcpu.counters()?;
    let clamps = own_clamps()?;
    let right = writes.iter().zip(&order);
    let right = right.filter(|(seen, khz)| policy.at_least(**khz) == seen.khz);
    let right = right.count();
    // What a thread of the kernel's uses is added.
    let mut above = writes.iter().zip(&order);
    let above = above.all(|(seen, khz)| seen.khz >= *khz);
    let few = stores(FEW, FROM_KHZ, TARGET_STEP_KHZ);
    let targets = targets_set(&mut vcpu, few)?;
    let bursts = (0..BURSTS).map(|_| {
        std::thread::sleep(REST);
        Ok(vcpu.timed(few, |_, _| ())?.1)
    });
    let mut bursts = bursts.collect::<Result<Vec<u64>>>()?;
    bursts.sort_unstable();
    let new_ns = bursts[BURSTS / 2];
    let (_, unchanged_ns) = vcpu.timed(stores(MANY, FROM_KHZ, 0), |_, _| ())?;
    let requests = u64::try_from(order.len())? + SETTLING;
    let in_kernel = counters.in_kernel + counters.unchanged == requests && counters.to_worker == 0;
    let (clamped, order_len) = (writes.len(), order.len());
    let wrong = wrong(&writes, &order, policy);
    let figures = json!({
        "part": "alone", "exits": exits, "clamps": clamps, "requests": requests,
        "in_kernel": counters.in_kernel, "right_before_entry": right,
        "unchanged_virtual_ns": unchanged_ns, "new_virtual_ns": new_ns, "targets_set": targets,
        "bursts_virtual_ns": bursts, "wrong": wrong,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no write exits", &exits, 0)
        .check_eq("no clamp is set", &clamps, (0, 1024))
        .check(
            "each is handled in the kernel",
            in_kernel,
            counters.in_kernel,
        )
        .check("each is seen", clamped == order_len, (clamped, order_len))
        .check("targets are set", targets * 100 >= FEW * 95, targets)
        .check("none is below its request", above, &wrong)
        .check(
            "but three are right before entry",
            right + 3 >= order.len(),
            &wrong,
        ))
}

/// How often the kernel gets a target while a vCPU that has slept makes these requests. What it uses
/// then is less than it asks for.
fn targets_set(vcpu: &mut TinyVcpu, deed: Deed) -> Result<u64> {
    let _probe = Probe::set('p', "target", "scx_bpf_cpuperf_set")?;
    let trace = Instance::create("targets", 256)?;
    trace.enable(&["lab/target"])?;
    std::thread::sleep(REST);
    trace.start()?;
    vcpu.vm.run(deed, |_, _| ())?;
    let text = stop(trace)?;
    Ok(u64::try_from(events(&text).count())?)
}

fn wrong(writes: &[AtEntry], order: &[u32], policy: &Policy) -> Value {
    let pairs = writes.iter().zip(order);
    let wrong = pairs.filter(|(seen, khz)| policy.at_least(**khz) != seen.khz);
    wrong
        .map(|(seen, khz)| json!({ "asked": khz, "at_entry": seen.khz }))
        .collect()
}

fn request(khz: u32) -> Deed {
    Deed {
        before: TURNS,
        times: 1,
        address: SET_PERF,
        value: khz,
        after: TURNS,
        ..Deed::default()
    }
}

/// The pCPU's frequency when a vCPU goes on after a write.
struct AtEntry {
    asked: u32,
    khz: u32,
}

/// The trace, and the frequency when it began, which no event has.
fn watch(policy: &Policy) -> Result<(Instance, u32)> {
    let trace = Instance::create("scx", 4096)?;
    trace.enable(&["kvm/kvm_mmio", "kvm/kvm_entry", "power/cpu_frequency"])?;
    let khz = policy.khz()?;
    trace.start()?;
    Ok((trace, khz))
}

fn stop(trace: Instance) -> Result<String> {
    trace.stop()?;
    let text = trace.text()?;
    trace.remove()?;
    Ok(text)
}

/// What is in force behind each write. `khz` is the frequency when the trace began.
fn writes(text: &str, policy: &Policy, mut khz: u32) -> Result<Vec<AtEntry>> {
    let mut seen = Vec::new();
    let mut writes: Option<(&str, u32)> = None;
    for line in events(text) {
        let TraceLine { thread, tail, .. } = line;
        match line.event {
            "cpu_frequency" if line.number("cpu_id")? == policy.cpu() => {
                khz = line.number("state")?;
            }
            "kvm_mmio" if tail.starts_with("mmio write ") && line.hex("gpa")? == SET_PERF => {
                writes = Some((thread, u32::try_from(line.hex("val")?)?));
            }
            "kvm_entry" => {
                if let Some((_, asked)) = writes.take_if(|(writer, _)| *writer == thread) {
                    seen.push(AtEntry { asked, khz });
                }
            }
            _ => (),
        }
    }
    Ok(seen)
}

/// One request beside a load of the host's, and beside more of it: the result of the formula.
fn beside_load(policy: &Policy) -> Result<LabVerdict> {
    let mut rows = Vec::new();
    let khz = policy.at_least(policy.max() / 3);
    let (mut most, mut within, mut own, mut highest) = (true, true, 0, Vec::new());
    for share in [0_u32, 25, 50] {
        // Short, for its utilization to be steady.
        let period = Duration::from_millis(2);
        let beside =
            (share > 0).then(|| Load::periodic(policy.cpu(), period, period * share / 100));
        std::thread::sleep(Duration::from_millis(500));
        let seen = beside_one(policy, khz);
        if let Some(load) = beside {
            load.stop()?;
        }
        let (all, at) = seen?;
        if share == 0 {
            own = all;
        }
        let others = all.saturating_sub(own);
        // Of a task that sleeps, a part has decayed; of one that runs, the estimate counts.
        let low = sum(policy, khz, others * 3 / 4);
        let high = sum(policy, khz, others * 5 / 4 + 16);
        // The band is of the load's usual utilization: one OPP beyond it are requests at its peak.
        let above = policy.at_least(high + 1);
        let right = at.iter().filter(|at| (low..=high).contains(at)).count();
        most &= !at.is_empty() && 2 * right > at.len();
        within &= at.iter().all(|at| (low..=above).contains(at));
        highest.extend(at.iter().max().copied());
        rows.push(json!({
            "share": share, "others_util": others, "at_khz": at, "low_khz": low, "high_khz": high,
        }));
    }
    let grows = highest.last() > highest.first();
    let figures = json!({ "part": "beside load", "asked_khz": khz, "rows": rows });
    Ok(LabVerdict::with_figures(figures)
        .check("most requests are in the load's band", most, &rows)
        .check("all are within an OPP of it", within, &rows)
        .check("more load brings more", grows, &highest))
}

/// The frequency of a request beside so much utilization.
fn sum(policy: &Policy, khz: u32, others: u32) -> u32 {
    let util = policy.util(khz) + others * 5 / 4;
    let wanted = u64::from(policy.max()) * u64::from(util) / u64::from(policy.capacity);
    policy.at_least(u32::try_from(wanted).unwrap_or(u32::MAX))
}

/// The pCPU's utilization most of the time, and the frequency behind some requests.
fn beside_one(policy: &Policy, khz: u32) -> Result<(u32, Vec<u32>)> {
    let ready = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        // What is done to look is not to be done on that pCPU.
        let looker = scope.spawn(|| {
            load::pin(0)?;
            while !ready.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(10));
            }
            let (watch, before) = watch(policy)?;
            let mut others = Vec::new();
            while ready.load(SeqCst) {
                others.push(utilization(policy.cpu())?);
                std::thread::sleep(Duration::from_millis(15));
            }
            anyhow::Ok((stop(watch)?, before, others))
        });
        let asked = on_thread(|| ask_often(policy, khz, &ready));
        ready.store(false, SeqCst);
        let seen = looker.join().map_err(|_| anyhow!("a thread panicked"))?;
        asked.and(seen)
    })?;
    let (text, before, mut others) = seen;
    // Seldom the vCPU's own too.
    others.sort_unstable();
    let others = *others.get(others.len() / 2).context("no look")?;
    let all = writes(&text, policy, before)?;
    let all = all.iter().filter(|one| one.asked == khz);
    // The first is beside the start of the trace.
    Ok((others, all.skip(1).map(|one| one.khz).collect()))
}

/// A vCPU that asks for the least and, when it has slept, for this.
fn ask_often(policy: &Policy, khz: u32, ready: &AtomicBool) -> Result<()> {
    let (mut vcpu, _event) = settled(policy)?;
    ready.store(true, SeqCst);
    for _ in 0..12 {
        std::thread::sleep(PAUSE);
        for (khz, after) in [(khz, TURNS / 4), (policy.min(), 0)] {
            let deed = Deed {
                before: 0,
                after,
                ..request(khz)
            };
            vcpu.vm.run(deed, |_, _| ())?;
        }
    }
    Ok(())
}

/// A vCPU of which the kernel has forgotten how busy it was when it was made.
fn settled(policy: &Policy) -> Result<(TinyVcpu, EventFd)> {
    let mut vcpu = TinyVcpu::new(ActuateBy::Scx)?;
    let event = vcpu.vm.swallow(SET_PERF)?;
    for _ in 0..SETTLING {
        std::thread::sleep(Duration::from_millis(20));
        let short = Deed {
            before: 0,
            after: 0,
            ..request(policy.min())
        };
        vcpu.vm.run(short, |_, _| ())?;
    }
    Ok((vcpu, event))
}

/// Two VMs' vCPUs on one pCPU: each has asked, and both are runnable.
fn beside_vm(policy: &Policy) -> Result<LabVerdict> {
    let part = policy.at_least(policy.max() / 3);
    let done = AtomicBool::new(false);
    let (seen, sum) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut vcpu = TinyVcpu::new(ActuateBy::Scx)?;
            let _event = vcpu.vm.swallow(SET_PERF)?;
            while !done.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(30));
                vcpu.vm.run(request(part), |_, _| ())?;
            }
            anyhow::Ok(())
        });
        std::thread::sleep(Duration::from_millis(200));
        let seen = on_thread(|| {
            let mut vcpu = TinyVcpu::new(ActuateBy::Scx)?;
            let _event = vcpu.vm.swallow(SET_PERF)?;
            let (watch, before) = watch(policy)?;
            for _ in 0..20 {
                std::thread::sleep(Duration::from_millis(37));
                vcpu.vm.run(request(part), |_, _| ())?;
            }
            writes(&stop(watch)?, policy, before)
        });
        done.store(true, SeqCst);
        other.join().map_err(|_| anyhow!("a vCPU panicked"))??;
        anyhow::Ok((seen?, policy.at_least(2 * part)))
    })?;
    let mut at: Vec<u32> = seen.iter().map(|one| one.khz).collect();
    at.sort_unstable();
    at.dedup();
    let reached = at.iter().any(|khz| *khz >= sum);
    let figures = json!({ "part": "two VMs", "each_khz": part, "sum_khz": sum, "seen_khz": at });
    Ok(LabVerdict::with_figures(figures).check("the sum is reached", reached, &at))
}
