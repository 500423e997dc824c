// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frequency that a pCPU runs at, without the measurement in it: a look
//! at sysfs is itself a task, whose load the host's governor answers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use vcpufreq_bench::piped::threads;
use vcpufreq_bench::tracefs::FrequencyEvent;

use crate::harness::policy::Policy;
use crate::harness::trace::{Span, Trace, now_us};
use crate::harness::vm::Vm;
use crate::harness::vmm::vcpu_name;

/// Looks that are taken until one is as it should be, or is undisturbed: the
/// promises are about a vCPU with no other runnable task beside it.
pub const LOOKS: u32 = 25;
/// What others may run in the 20 ms of a look on all the policy's pCPUs, in µs.
const DISTURBED_US: u64 = 300;

/// The frequency that a policy runs at for most of 20 ms, in kHz; a look at
/// which it isn't `wanted` counts when nothing but vCPUs ran meanwhile.
pub fn host_runs_at(policy: &Policy, vm: &mut Vm, wanted: u32) -> Result<u32> {
    runs_at((policy, vm), wanted, |look| look.held.most)
}

/// The same of the time in which a vCPU ran. While it sleeps, the policy's other pCPUs decide.
pub fn vcpu_runs_at(policy: &Policy, vm: &mut Vm, wanted: u32) -> Result<u32> {
    runs_at((policy, vm), wanted, |look| look.most_of_vcpus)
}

fn runs_at(
    (policy, vm): (&Policy, &mut Vm),
    wanted: u32,
    seen: impl Fn(&LookResult<()>) -> u32,
) -> Result<u32> {
    stay_off(policy, vm)?;
    let mut khz = 0;
    for _ in 0..LOOKS {
        let look = look(policy, || Ok(()))?;
        khz = seen(&look);
        if khz == wanted || !look.disturbed {
            break;
        }
    }
    Ok(khz)
}

/// What a look saw.
#[derive(Debug)]
pub struct LookResult<T> {
    /// The frequencies.
    pub held: FrequencySpan,
    /// The one that it had for most of the time in which a vCPU ran there; of the whole time, if none
    /// did or nothing switched.
    pub most_of_vcpus: u32,
    /// Other tasks ran beside the vCPU, or much on the policy's other pCPUs.
    pub disturbed: bool,
    /// What came of what was done at its end.
    pub outcome: T,
}

/// Looks at a policy's frequency for 20 ms, then does something.
pub fn look<T>(policy: &Policy, then: impl FnOnce() -> Result<T>) -> Result<LookResult<T>> {
    look_after(policy, || Ok(()), then)
}

/// Does something, lets its effects come about, looks at a policy's frequency
/// for 20 ms, then does something else.
pub fn look_after<T>(
    policy: &Policy,
    first: impl FnOnce() -> Result<()>,
    then: impl FnOnce() -> Result<T>,
) -> Result<LookResult<T>> {
    let trace = Trace::start()?;
    // In this order: a change between the two would be in neither otherwise.
    let at_start = policy.khz()?;
    let started = now_us();
    first()?;
    let_ticks_pass();
    // What was done until now was a task too: let its load go by.
    let_ticks_pass();
    let span = undisturbed();
    let outcome = then()?;
    let seen = trace.stop()?;
    let beside = seen.others_ran(&[policy.cpu()], (started, span.1));
    let disturbed = beside > 0 || seen.others_ran(&policy.cpus, span) > DISTURBED_US;
    let held = held_frequency(policy, &seen.frequencies, at_start, span);
    let ran = seen.vcpus_ran(&policy.cpus, span);
    let times = times_at(policy, &seen.frequencies, at_start, &ran);
    Ok(LookResult {
        most_of_vcpus: most(&times).unwrap_or(held.most),
        held,
        disturbed,
        outcome,
    })
}

/// Binds the agent, and all of the VMM but its vCPUs, to the last CPU of another policy, if there is one
/// that they may have (a real-time guest's are set apart): the host's governor would answer their load.
/// On a first CPU they could delay a vCPU.
pub fn stay_off(policy: &Policy, vm: &Vm) -> Result<()> {
    let all = Policy::all()?;
    for other in all.iter().filter(|other| other.path != policy.path) {
        let mut cpu = CpuSet::new();
        let last = other.cpus.last().context("no CPU")?;
        cpu.set(usize::try_from(*last)?)?;
        match sched_setaffinity(Pid::this(), &cpu) {
            // Of another partition, or offline.
            Err(Errno::EINVAL) => continue,
            done => done.context("moving the agent")?,
        }
        return bind(&cpu, vm);
    }
    Ok(())
}

fn bind(cpu: &CpuSet, vm: &Vm) -> Result<()> {
    for pid in [std::process::id(), vm.pid(), vm.program()] {
        for (tid, name) in threads(pid)? {
            if vcpu_name(&name).is_some() {
                continue;
            }
            match sched_setaffinity(Pid::from_raw(tid), cpu) {
                // It has ended meanwhile.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => return Err(error).with_context(|| format!("moving thread {name}")),
            }
        }
    }
    Ok(())
}

/// Sleeps, so that the measurement isn't a task on a pCPU that is measured;
/// from when to when, in µs of CLOCK_MONOTONIC.
fn undisturbed() -> Span {
    let from = now_us();
    std::thread::sleep(Duration::from_millis(20));
    (from, now_us())
}

/// A policy's frequency over a span of time.
#[derive(Debug, Clone)]
pub struct FrequencySpan {
    /// The one that it had for most of the time.
    pub most: u32,
    /// The lowest.
    pub lowest: u32,
    /// Those that it had from the end of the span on.
    pub since: Vec<u32>,
}

/// From the trace: `at_start` is the frequency before the trace began.
fn held_frequency(
    policy: &Policy,
    seen: &[FrequencyEvent],
    at_start: u32,
    span: Span,
) -> FrequencySpan {
    let times = times_at(policy, seen, at_start, &[span]);
    let own = seen.iter().filter(|event| event.cpu == policy.cpu());
    let (before, after): (Vec<&FrequencyEvent>, Vec<_>) =
        own.partition(|event| event.time_us < span.1);
    let at_end = before.last().map_or(at_start, |event| event.khz);
    let since = std::iter::once(at_end)
        .chain(after.into_iter().map(|event| event.khz))
        .collect();
    FrequencySpan {
        most: most(&times).unwrap_or(at_end),
        lowest: times.keys().next().copied().unwrap_or(at_end),
        since,
    }
}

/// For how long of these spans the policy had each frequency, in µs.
fn times_at(
    policy: &Policy,
    seen: &[FrequencyEvent],
    at_start: u32,
    spans: &[Span],
) -> BTreeMap<u32, u64> {
    let mut time_at = BTreeMap::new();
    for &(from, to) in spans {
        let (mut khz, mut since) = (at_start, from);
        let own = seen.iter().filter(|event| event.cpu == policy.cpu());
        for event in own.take_while(|event| event.time_us < to) {
            let until = event.time_us.max(from);
            *time_at.entry(khz).or_insert(0) += until - since;
            (khz, since) = (event.khz, until);
        }
        *time_at.entry(khz).or_insert(0) += to - since;
    }
    time_at.retain(|_, time| *time > 0);
    time_at
}

fn most(times: &BTreeMap<u32, u64>) -> Option<u32> {
    let longest = times.iter().max_by_key(|&(_, time)| time);
    longest.map(|(&khz, _)| khz)
}

/// Lets the host's ticks pass: a new clamp shows in the frequency at the
/// next scheduler event, at the latest the next tick but one (4 ms each).
pub fn let_ticks_pass() {
    std::thread::sleep(Duration::from_millis(40));
}
