// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads that don't leave the guest and writes that don't leave the kernel: their effect. Their cost
//! for the vCPU is reported; `paths` has its bounds. On a host without uclamp reads are the same, and
//! requests are counted.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::json;
use vcpufreq_device::VcpuId;
use vcpufreq_host_bpf::{ActuateBy, ApplyOutcome, BpfCounters, BpfEvent, HostModule};
use vcpufreq_tests::LabVerdict;

use super::ceilings;
use super::group::{ClampGroup, has_uclamp, write_util};
use super::programs::{BASE, histogram, like, start};
use super::settled;
use super::tiny_vm::{Deed, RAM, TinyVm};
use super::vcpu::{
    BURST, FLOOD, FROM_KHZ, ONE, OTHERS_SET_PERF, PER_SECOND, SET_PERF, STEP_KHZ, TinyVcpu,
    by_other, most_passed, others_counters, own_clamp, set_limit, stores, the_one_that_waits,
};
use crate::harness::policy::Policy;
use crate::harness::sys::set_deadline;
use crate::harness::{console_commands, load};

const MANY: u64 = 100_000;

pub fn run() -> Result<LabVerdict> {
    let uclamp = has_uclamp();
    if uclamp {
        console_commands::insmod("vcpufreq_host", "")?;
    }
    let thread = std::thread::Builder::new().name("vcpu0".into());
    let running = thread.spawn(move || if uclamp { clamped() } else { counted() })?;
    let result = running.join().map_err(|_| anyhow!("the vCPU panicked"))??;
    if uclamp {
        console_commands::unload_host_module()?;
    }
    Ok(result)
}

fn loads(address: u64) -> Deed {
    Deed {
        times: MANY,
        address,
        read: true,
        ..Deed::default()
    }
}

/// `MANY` reads, beside as many loads from the guest's memory.
fn reads(vcpu: &mut TinyVcpu) -> Result<LabVerdict> {
    let (_, load_ns) = vcpu.timed(loads(RAM), |_, _| ())?;
    let (outcome, read_ns) = vcpu.timed(loads(BASE), |_, _| ())?;
    let (read, khz) = read_beside_host(vcpu)?;
    let trapped = vcpu.counters()?.reads;
    let figures = json!({
        "exits": outcome.exits, "trapped": trapped, "read_khz": read, "host_khz": khz,
        "load_virtual_ns": load_ns, "read_virtual_ns": read_ns,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no read exits", &outcome.exits, 0)
        .check_eq("none is trapped", &trapped, 0)
        .check("it is true", read == khz, (read, khz)))
}

/// What the guest reads and what the host reads, while that is the same before and after: the
/// governor has just found a busy thread.
fn read_beside_host(vcpu: &mut TinyVcpu) -> Result<(u32, u32)> {
    for _ in 0..100 {
        let before = vcpu.policy.khz()?;
        let (outcome, _) = vcpu.timed(loads(BASE), |_, _| ())?;
        if vcpu.policy.khz()? == before {
            return Ok((outcome.read, before));
        }
    }
    bail!("the host's frequency never stands still")
}

/// With the module, on a host with uclamp.
fn clamped() -> Result<LabVerdict> {
    let group = ClampGroup::with_current("requests")?;
    let mut vcpu = TinyVcpu::new(ActuateBy::Kfunc)?;
    let module = HostModule::open(1, 1)?;
    module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    let by_exit = exits(&mut vcpu, &group)?;
    let _event = vcpu.vm.swallow(SET_PERF)?;
    let _others = vcpu.vm.swallow(OTHERS_SET_PERF)?;
    let reads = reads(&mut vcpu)?;
    let writes = writes(&mut vcpu, by_exit)?;
    let limit = limit(&mut vcpu, &module)?;
    let overtaken = overtaken(&mut vcpu, &module)?;
    let raced = raced(&mut vcpu, &module)?;
    let waits = waits_over_policy(&mut vcpu, &module)?;
    let settled = settled::rows(&mut vcpu, &module)?;
    let ceilings = ceilings::row(&mut vcpu, &module)?;
    let deadline = deadline(&mut vcpu)?;
    drop((_event, _others));
    drop(vcpu);
    let for_others = deadline_for_others(&module)?;
    let applied = module.applied(0)?;
    let figures = json!({
        "applied": applied.applied, "clamp_after_ns": histogram(&applied.after_ns),
    });
    Ok(LabVerdict::with_figures(figures)
        .part("reads", reads)
        .part("writes", writes)
        .part("limit", limit)
        .part("overtaken", overtaken)
        .part("raced", raced)
        .part("waits_over_policy", waits)
        .part("settled", settled)
        .part("ceilings", ceilings)
        .part("deadline", deadline)
        .part("deadline_for_others", for_others)
        .check_eq("no clamp is refused", &applied.refused, 0))
}

/// Each of these changes the clamp: 2 800 kHz are one step of 1 024.
const CHANGES: u64 = 500;

/// What a write costs by an exit, with the same clamp by the same file.
pub(super) fn exits(vcpu: &mut TinyVcpu, group: &ClampGroup) -> Result<u64> {
    let policy = vcpu.policy.clone();
    let mut failed = 0;
    let deed = stores(CHANGES, FROM_KHZ, STEP_KHZ);
    // The programs see these too, and have nothing to do with them.
    let actuate = std::mem::replace(&mut vcpu.how.actuate, ActuateBy::Nothing);
    vcpu.host.set_policy(ONE, vcpu.how.clone())?;
    let (outcome, ns) = vcpu.timed(deed, |_, khz| {
        failed += u32::from(write_util(&group.min, policy.util(khz)).is_err());
    })?;
    ensure!(
        failed == 0 && outcome.exits == CHANGES,
        "the control failed"
    );
    write_util(&group.min, 0)?;
    vcpu.how.actuate = actuate;
    vcpu.host.set_policy(ONE, vcpu.how.clone())?;
    Ok(ns)
}

fn writes(vcpu: &mut TinyVcpu, by_exit_ns: u64) -> Result<LabVerdict> {
    let before = vcpu.counters()?;
    let (changing, changed_ns) = vcpu.timed(stores(CHANGES, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let between = vcpu.counters()?;
    let last = FROM_KHZ + 99_999;
    let (outcome, ns) = vcpu.timed(stores(MANY, FROM_KHZ, 1), |_, _| ())?;
    let after = vcpu.counters()?;
    let clamp = own_clamp()?;
    let requests = after.requests - between.requests;
    let handled = |from: &BpfCounters, to: &BpfCounters| {
        to.in_kernel - from.in_kernel + to.unchanged - from.unchanged
    };
    let exits = changing.exits + outcome.exits;
    let (handled, changes) = (
        handled(&between, &after),
        between.in_kernel - before.in_kernel,
    );
    let figures = json!({
        "exits": outcome.exits, "requests": requests, "clamps": after.in_kernel - between.in_kernel,
        "unchanged": after.unchanged - between.unchanged, "clamp": clamp,
        "virtual_ns": ns, "with_clamp_virtual_ns": changed_ns,
        "by_exit_with_clamp_virtual_ns": by_exit_ns,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no write exits", &exits, 0)
        .check_eq("each is counted", &requests, MANY)
        .check_eq("each is handled in the kernel", &handled, MANY)
        .check_eq("each change is a clamp", &changes, CHANGES)
        .check_eq("the last one is in force", &clamp, vcpu.policy.util(last)))
}

/// A flood over the limit: few clamps, one event, and the last value in the end.
fn limit(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    set_limit(vcpu, true)?;
    let before = vcpu.counters()?;
    let started = Instant::now();
    let (_, _) = vcpu.timed(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let most = most_passed(PER_SECOND, BURST, started);
    let after = vcpu.counters()?;
    let (events, served) = serve(vcpu, module)?;
    let clamp = own_clamp()?;
    let last = FROM_KHZ + STEP_KHZ * 599;
    set_limit(vcpu, false)?;
    let passed = after.in_kernel - before.in_kernel;
    let limited = after.limited - before.limited;
    let within = (u64::from(BURST)..=most).contains(&passed);
    let figures = json!({
        "requests": FLOOD, "passed": passed, "at_most": most, "limited": limited, "events": events, "clamp": clamp,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("one event", &events, 1)
        .check("what waits is served", served, ())
        .check(
            "each is counted",
            passed + limited == FLOOD,
            (passed, limited),
        )
        .check("within the limit", within, (passed, most))
        .check_eq("the last one is in force", &clamp, vcpu.policy.util(last)))
}

/// What waits for a token is older than what another vCPU of the domain asks for meanwhile.
fn overtaken(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    set_limit(vcpu, true)?;
    vcpu.vm.run(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let newer = FROM_KHZ + STEP_KHZ;
    let outcome = vcpu.vm.run(by_other(newer), |_, _| ())?;
    let at_once = own_clamp()?;
    let (events, served) = serve(vcpu, module)?;
    let clamp = own_clamp()?;
    set_limit(vcpu, false)?;
    let wanted = vcpu.policy.util(newer);
    let clamps = [at_once, clamp];
    let figures = json!({ "events": events, "clamp_at_once": at_once, "clamp": clamp });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no write exits", &outcome.exits, 0)
        .check_eq("one event", &events, 1)
        .check("what waits is served", served, ())
        .check_eq("the newer one stays", &clamps, [wanted; 2]))
}

/// Another vCPU of the domain writes while a request that waited for a token is put into force: its
/// request is put into force, too, and each of the two has one outcome.
fn raced(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    set_limit(vcpu, true)?;
    vcpu.vm.run(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let newer = FROM_KHZ + STEP_KHZ;
    let before = others_counters(&vcpu.host)?;
    let waiting = the_one_that_waits(vcpu)?;
    let (host, vm) = (&vcpu.host, &mut vcpu.vm);
    let mut calls = 0;
    let settled = host.apply_waiting(&waiting, |domain, clamp| {
        calls += 1;
        if calls == 1 {
            vm.run(by_other(newer), |_, _| ())?;
        }
        anyhow::Ok(module.apply(domain, clamp)?)
    });
    let after = others_counters(&vcpu.host)?;
    let clamp = own_clamp()?;
    set_limit(vcpu, false)?;
    let wanted = vcpu.policy.util(newer);
    let in_force =
        matches!(settled, ApplyOutcome::InForce(clamp) if u32::from(clamp.min.get()) == wanted);
    // Unchanged, where the module finds it in force.
    let handled = |counted: &BpfCounters| counted.in_kernel + counted.unchanged;
    let by_kernel = handled(&after) - handled(&before);
    let (outcome, seen) = (format!("{settled:?}"), (calls, by_kernel, clamp));
    let figures = json!({
        "clamps_of_worker": calls, "outcome": outcome, "others_by_kernel": by_kernel,
        "clamp": clamp,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("the newer one is in force", in_force, &outcome)
        .check_eq("after two calls", &seen, (2, 1, wanted)))
}

/// A request that waits for the worker is served after the policy has changed.
fn waits_over_policy(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    vcpu.how.actuate = ActuateBy::Worker;
    vcpu.host.set_policy(ONE, vcpu.how.clone())?;
    let asked = FROM_KHZ + 2 * STEP_KHZ;
    vcpu.vm.run(stores(1, asked, 0), |_, _| ())?;
    let waiting = the_one_that_waits(vcpu)?;
    vcpu.how.actuate = ActuateBy::Kfunc;
    vcpu.host.set_policy(ONE, vcpu.how.clone())?;
    let settled = vcpu
        .host
        .apply_waiting(&waiting, |domain, clamp| module.apply(domain, clamp));
    let clamp = own_clamp()?;
    let in_force = matches!(settled, ApplyOutcome::InForce(_));
    let outcome = format!("{settled:?}");
    let figures = json!({ "outcome": outcome, "clamp": clamp });
    Ok(LabVerdict::with_figures(figures)
        .check("what waits is in force", in_force, &outcome)
        .check_eq("its clamp", &clamp, vcpu.policy.util(asked)))
}

/// Serves the requests that wait; how many, and whether all are in force.
fn serve(vcpu: &TinyVcpu, module: &HostModule) -> Result<(usize, bool)> {
    let worker = vcpu.host.worker()?;
    let events: Vec<_> = worker.wait(Duration::from_millis(100))?.collect();
    let mut served = true;
    for event in &events {
        let BpfEvent::Waiting(waiting) = event else {
            bail!("an event other than a waiting request: {event:?}");
        };
        served &= waiting.not_before_ns.is_some();
        let apply = |domain, clamp| module.apply(domain, clamp);
        served &= matches!(
            vcpu.host.apply_waiting(waiting, apply),
            ApplyOutcome::InForce(_)
        );
    }
    Ok((events.len(), served))
}

/// Clamps mean nothing to a SCHED_DEADLINE thread: counted, and the host goes on.
fn deadline(vcpu: &mut TinyVcpu) -> Result<LabVerdict> {
    // Its affinity has to be that of its root domain.
    load::unpin()?;
    set_deadline(Duration::from_millis(5), Duration::from_millis(10))?;
    let before = vcpu.counters()?;
    vcpu.vm.run(stores(10, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let after = vcpu.counters()?;
    let count = after.not_applicable - before.not_applicable;
    let figures = json!({ "requests": 10, "not_applicable": count });
    Ok(LabVerdict::with_figures(figures).check_eq("none is applicable", &count, 10))
}

/// Of a vCPU in another domain, it may ask for one that clamps do mean something to: the worker
/// has that put into force.
fn deadline_for_others(module: &HostModule) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let [mut own, mut other] = [like(policy, 1)?, like(policy, 0)?];
    for how in [&mut own, &mut other] {
        how.actuate = ActuateBy::Kfunc;
    }
    let host = start(&policies, vec![own, other])?;
    host.register_thread(ONE)?;
    let mut vm = TinyVm::new(Some((BASE, host.pages())))?;
    let _others = vm.swallow(OTHERS_SET_PERF)?;
    let before = module.applied(0)?.applied;
    vm.run(by_other(FROM_KHZ), |_, _| ())?;
    let worker = host.worker()?;
    let events: Vec<_> = worker.wait(Duration::from_millis(100))?.collect();
    let apply = |domain, clamp| module.apply(domain, clamp);
    let in_force = |waiting| matches!(host.apply_waiting(waiting, apply), ApplyOutcome::InForce(_));
    let served = events
        .iter()
        .filter(|event| matches!(event, BpfEvent::Waiting(waiting) if in_force(waiting)));
    let (count, served) = (events.len(), served.count());
    let applied = module.applied(0)?.applied - before;
    let counters = host.counters(VcpuId(1)).context("no vCPU")?;
    let counts = (count, served, applied, counters.not_applicable);
    let figures = json!({
        "events": count, "served": served, "applied": applied,
        "not_applicable": counters.not_applicable,
    });
    Ok(LabVerdict::with_figures(figures).check_eq(
        "the worker puts it into force",
        &counts,
        (1, 1, 1, 0),
    ))
}

/// On a host without uclamp.
fn counted() -> Result<LabVerdict> {
    let mut vcpu = TinyVcpu::new(ActuateBy::Nothing)?;
    let _event = vcpu.vm.swallow(SET_PERF)?;
    let reads = reads(&mut vcpu)?;
    let (outcome, ns) = vcpu.timed(stores(MANY, FROM_KHZ, 1), |_, _| ())?;
    let counters = vcpu.counters()?;
    let (requests, not_applicable) = (counters.requests, counters.not_applicable);
    let figures = json!({
        "uclamp": false,
        "writes": {
            "requests": requests, "not_applicable": not_applicable,
            "exits": outcome.exits, "virtual_ns": ns,
        },
    });
    Ok(LabVerdict::with_figures(figures)
        .part("reads", reads)
        .check_eq("each write is counted", &requests, MANY)
        .check_eq("none is applicable", &not_applicable, MANY)
        .check_eq("no write exits", &outcome.exits, 0))
}
