// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frequency that a pCPU runs at, without the measurement in it: a look
//! at sysfs is itself a task, whose load the host's governor answers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::Policy;
use crate::trace::{FrequencyEvent, Trace, now_us};
use crate::vm::{Vm, threads};

/// The frequency that a policy runs at for most of 20 ms, in kHz.
pub fn host_runs_at(policy: &Policy, vm: &Vm) -> Result<u32> {
    stay_off(policy, vm)?;
    let at_start = policy.khz()?;
    let trace = Trace::frequencies()?;
    // The look before was a task too: let its load go by.
    std::thread::sleep(Duration::from_millis(30));
    let span = undisturbed();
    Ok(held_frequency(policy, &trace.stop()?.frequencies, at_start, span).most)
}

/// Binds the agent, and all of the VMM but its vCPUs, to a CPU of another
/// policy, if there is one: what they do is a load that the host's governor
/// answers.
pub fn stay_off(policy: &Policy, vm: &Vm) -> Result<()> {
    let all = Policy::all()?;
    let Some(other) = all.iter().find(|other| other.path != policy.path) else {
        return Ok(());
    };
    let mut cpu = CpuSet::new();
    cpu.set(usize::try_from(other.cpu())?)?;
    for pid in [std::process::id(), vm.pid()] {
        for (tid, name) in threads(pid)? {
            if !name.starts_with("vcpu") {
                sched_setaffinity(Pid::from_raw(tid), &cpu)
                    .with_context(|| format!("moving thread {name}"))?;
            }
        }
    }
    Ok(())
}

/// Sleeps, so that the measurement isn't a task on a pCPU that is measured;
/// from when to when, in µs of CLOCK_MONOTONIC.
pub fn undisturbed() -> (u64, u64) {
    let from = now_us();
    std::thread::sleep(Duration::from_millis(20));
    (from, now_us())
}

/// A policy's frequency over a span of time.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// The one that it had for most of the time.
    pub most: u32,
    /// The lowest.
    pub lowest: u32,
}

/// From the trace: `at_start` is the frequency before the trace began.
pub fn held_frequency(
    policy: &Policy,
    seen: &[FrequencyEvent],
    at_start: u32,
    span: (u64, u64),
) -> Held {
    let (from, to) = span;
    let mut time_at = BTreeMap::new();
    let (mut khz, mut since) = (at_start, from);
    for event in seen
        .iter()
        .filter(|event| event.cpu == policy.cpu() && event.time_us < to)
    {
        let until = event.time_us.max(from);
        *time_at.entry(khz).or_insert(0) += until - since;
        (khz, since) = (event.khz, until);
    }
    *time_at.entry(khz).or_insert(0) += to - since;
    time_at.retain(|_, time| *time > 0);
    let most = time_at
        .iter()
        .max_by_key(|&(_, time)| time)
        .map_or(khz, |(&khz, _)| khz);
    Held {
        most,
        lowest: time_at.keys().next().copied().unwrap_or(khz),
    }
}
