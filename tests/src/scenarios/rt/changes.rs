// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Real-time vCPUs in their partition change their requests, one busy moment after the other. The
//! host's trace shows no dip of the frequency, the clamp of each request in force, no exit of the
//! bridge's registers to userspace, no wait of theirs for a lock at a request, and no other thread on
//! their pCPUs.

use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vcpufreq_bench::piped::threads;
use vcpufreq_bench::tracefs::Mmio;
use vcpufreq_host::CpuList;
use vcpufreq_tests::LabVerdict;

use crate::harness::dips::{CHANGES, LIGHT_CHANGES, LIGHT_US, dips, start_light, stop_light};
use crate::harness::kernel_threads::Company;
use crate::harness::plan::{GuestDevice, set_governor};
use crate::harness::policy::Policy;
use crate::harness::thread_facts::allowed;
use crate::harness::trace::exits::{Exits, SeenExits};
use crate::harness::trace::{self, Trace, TraceEvents, now_us};
use crate::harness::vm::{Vm, requests_of};

/// To switch events on patches the kernel's code, which is work on every CPU.
const PATCHED: Duration = Duration::from_secs(1);
/// Between looks at the clamps: a vCPU changes its request each 108 ms.
const LOOK_EVERY: Duration = Duration::from_millis(30);
/// Changes at which the frequency was no lower than both requests before: the others show nothing.
const TELLING: usize = CHANGES / 2;
/// The thread that carries out requests by the path `ioeventfd`.
const WORKER: &str = "requests";

/// A real-time vCPU and its pCPU.
#[derive(Debug)]
pub(super) struct RtVcpu<'a> {
    pub vcpu: usize,
    pub cpu: u32,
    pub policy: &'a Policy,
}

impl<'a> RtVcpu<'a> {
    pub(super) fn new(vcpu: usize, cpu: u32, policy: &'a Policy) -> Self {
        Self { vcpu, cpu, policy }
    }

    /// Of its thread.
    pub(super) fn name(&self) -> String {
        format!("vcpu{}", self.vcpu)
    }
}

/// A thread's clamp at a moment.
struct ClampLook {
    /// CLOCK_MONOTONIC in µs, after the look.
    time_us: u64,
    /// Effective `uclamp.min`.
    clamp: u32,
}

/// 100 changes on each of these vCPUs, at the same time.
pub(super) fn traced(vm: &mut Vm, vcpus: &[RtVcpu]) -> Result<LabVerdict> {
    for one in vcpus {
        set_governor(vm, one.vcpu, "userspace")?;
    }
    let device = GuestDevice::of(vm)?;
    let exits = Exits::watch_with_locks()?;
    let trace = Trace::start_with_registers()?;
    sleep(PATCHED);
    for one in vcpus {
        start_light(vm, one.vcpu, one.policy)?;
    }
    let mut looks: Vec<Vec<ClampLook>> = vcpus.iter().map(|_| Vec::new()).collect();
    let until = Instant::now() + LIGHT_CHANGES;
    while Instant::now() < until {
        sleep(LOOK_EVERY);
        look(vm, vcpus, &mut looks)?;
    }
    // Each takes as long as some changes do, and there are no looks meanwhile.
    for one in vcpus {
        stop_light(vm, one.vcpu)?;
    }
    let (seen, exits) = (trace.stop()?, exits.stop()?);
    let rows = vcpus.iter().zip(&looks);
    let rows = rows.map(|(one, looks)| of_vcpu(one, looks, &device, &seen, &exits));
    let rows = rows.collect::<Result<Vec<_>>>()?;
    let worker = worker(vm, vcpus, &seen)?;
    let exited = exits.all().exited;
    Ok(LabVerdict::default()
        .check_eq("KVM counts as many exits", &exits.counted, exited)
        .parts("vcpus", rows)
        .part("worker", worker))
}

/// Looks at each clamp.
fn look(vm: &Vm, vcpus: &[RtVcpu], looks: &mut [Vec<ClampLook>]) -> Result<()> {
    for (one, looks) in vcpus.iter().zip(looks) {
        let (clamp, _) = vm.clamp(one.vcpu)?;
        let time_us = now_us();
        looks.push(ClampLook { time_us, clamp });
    }
    Ok(())
}

fn of_vcpu(
    one: &RtVcpu,
    looks: &[ClampLook],
    device: &GuestDevice,
    seen: &TraceEvents,
    exits: &SeenExits,
) -> Result<LabVerdict> {
    let name = one.name();
    let requests = requests(one.vcpu, device, seen)?;
    let dips = dips(one.policy, &requests, &seen.frequencies, LIGHT_US);
    let (in_force, looked_at, strange) = clamps(one.policy, &requests, looks);
    let accesses = exits.at(device.trapping(one.vcpu..one.vcpu + 1));
    let interrupted = exits.interrupted(&name);
    let lock_waits = exits.lock_waits(&name, device.told_by(one.vcpu).0);
    let company = Company::of(&name, one.cpu, &seen.switches);
    let lost = trace::lost_on(one.cpu)?;
    let irq_work = company.counts.get(&format!("irq_work/{}", one.cpu));
    let figures = json!({
        "vcpu": one.vcpu, "frequency": dips.json(), "clamps_in_force": in_force,
        "clamps_looked_at": looked_at, "other_clamps": strange, "requests": accesses.trapped,
        "exits_to_userspace_by_the_bridge": accesses.exited, "exits_for_signals": interrupted,
        "waits_for_locks": lock_waits.waits.len(),
        "runs_of_irq_work": irq_work.copied().unwrap_or(0), "strangers": company.strangers,
        "times_switched_to": company.counts, "events_lost": lost,
    });
    let each_trapped = accesses.trapped > dips.changes as u64;
    Ok(LabVerdict::with_figures(figures)
        .check("no change dips", dips.none(), dips.json())
        .check(
            "enough come from above",
            dips.from_above >= TELLING,
            dips.from_above,
        )
        .check(
            "enough clamps are looked at",
            looked_at >= TELLING,
            looked_at,
        )
        .check_eq("each of them is in force", &in_force, looked_at)
        .check_eq("no clamp is another", &strange, 0)
        .check("requests are trapped", each_trapped, accesses.trapped)
        .check_eq("none exits", &accesses.exited, 0)
        .check_eq("no signal interrupts", &interrupted, 0)
        .check(
            "each request is looked at for locks",
            lock_waits.looked_at >= dips.changes as u64,
            lock_waits.looked_at,
        )
        .check_none("it waits for no lock at a request", &lock_waits.waits)
        .check(
            "no stranger runs there",
            company.strangers.is_empty(),
            &company.strangers,
        )
        .check_eq("no event is lost", &lost, 0))
}

/// A vCPU's requests in order: time in µs and kHz. In shared memory a request is a store, which KVM
/// does not see: the server's events have its value, and the doorbell behind it has its time.
fn requests(vcpu: usize, device: &GuestDevice, seen: &TraceEvents) -> Result<Vec<(u64, u32)>> {
    let (address, ring) = device.told_by(vcpu);
    let of_vcpu =
        |write: &&Mmio| write.address == address && ring.is_none_or(|ring| write.value == ring);
    let writes = seen.writes.iter().filter(of_vcpu);
    if ring.is_none() {
        return writes
            .map(|write| Ok((write.time_us, u32::try_from(write.value)?)))
            .collect();
    }
    let rings: Vec<u64> = writes.map(|write| write.time_us).collect();
    let first = *rings.first().context("no doorbell was rung")?;
    let taken = requests_of(vcpu)?.into_iter();
    let taken: Vec<_> = taken.filter(|(time, _)| *time >= first).collect();
    // Else a request's time would be another one's.
    let next = rings.iter().skip(1).copied().chain([u64::MAX]);
    let each = rings.iter().zip(next).zip(&taken);
    let own = each
        .clone()
        .all(|((from, to), (time, _))| (*from..to).contains(time));
    ensure!(
        own && rings.len() == taken.len(),
        "vCPU {vcpu} rang {} times, and the server took {} requests",
        rings.len(),
        taken.len()
    );
    Ok(each.map(|((from, _), (_, khz))| (*from, *khz)).collect())
}

/// Changes whose clamp was the thread's before the next one; the number of changes that began and
/// ended during the looks; and looks that found neither the old nor the new clamp.
fn clamps(policy: &Policy, requests: &[(u64, u32)], looks: &[ClampLook]) -> (usize, usize, usize) {
    let (mut in_force, mut looked_at, mut strange) = (0, 0, 0);
    let first = looks.first().map_or(u64::MAX, |look| look.time_us);
    let last = looks.last().map_or(0, |look| look.time_us);
    for changes in requests.windows(3) {
        let [(_, old), (from, new), (next, _)] = *changes else {
            continue;
        };
        if from < first || next > last {
            continue;
        }
        looked_at += 1;
        let within = looks
            .iter()
            .filter(|look| (from..next).contains(&look.time_us));
        let within: Vec<u32> = within.map(|look| look.clamp).collect();
        let (old, new) = (policy.util(old), policy.util(new));
        in_force += usize::from(within.contains(&new));
        strange += within
            .iter()
            .filter(|&&clamp| clamp != old && clamp != new)
            .count();
    }
    (in_force, looked_at, strange)
}

/// The thread that carries out requests: where it may run, and where it ran. Where no BPF program does
/// it first, this thread sets the clamps.
fn worker(vm: &Vm, vcpus: &[RtVcpu], seen: &TraceEvents) -> Result<LabVerdict> {
    let (process, tid) = worker_of(vm).context("no thread carries out requests")?;
    let allowed: CpuList = allowed(process, tid)?.parse()?;
    let path = crate::harness::stats::of(vm)?["vcpus"][1]["path"].clone();
    let runs = seen.switches.iter().filter(|switch| switch.next.1 == tid);
    let ran_on: BTreeSet<u32> = runs.clone().map(|switch| switch.cpu).collect();
    let apart = |one: &RtVcpu| !allowed.contains(one.cpu) && !ran_on.contains(&one.cpu);
    let apart = vcpus.iter().all(apart);
    let count = runs.count();
    let figures = json!({
        "path": path, "allowed_on": allowed.to_string(), "ran_on": ran_on, "runs": count,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("it keeps off the vCPUs' pCPUs", apart, &ran_on)
        .check(
            "it runs for each change",
            path == "bpf" || count >= CHANGES,
            count,
        ))
}

/// The process and the thread: `vcpufreq run` itself, or what serves QEMU's guest.
fn worker_of(vm: &Vm) -> Option<(u32, i32)> {
    let processes = [Some(vm.pid()), vm.vm_process()].into_iter().flatten();
    processes.into_iter().find_map(|process| {
        let mut threads = threads(process).ok()?.into_iter();
        let (tid, _) = threads.find(|(_, name)| name == WORKER)?;
        Some((process, tid))
    })
}
