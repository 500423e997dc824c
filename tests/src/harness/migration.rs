// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU that is not pinned, and its moves among pCPUs.

use std::iter;

use anyhow::{Context as _, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::harness::frequency::let_ticks_pass;
use crate::harness::policy::Policy;
use crate::harness::trace::{Trace, TraceEvents};
use crate::harness::vm::{Setup, Vm};

/// A guest with a vCPU like a CPU of this policy, that may run anywhere.
pub fn like(policy: &Policy) -> Setup {
    // A capacity is given for the highest frequency of a table: one without boost.
    let opps = policy.opps.iter().filter(|opp| **opp <= policy.reference);
    let table: Vec<String> = opps.map(u32::to_string).collect();
    let table = format!("0={}", table.join(","));
    let capacity = format!("0={}", policy.capacity);
    // On another CPU than it mirrors, what it gets is no entry of its table.
    let mut setup = Setup::default().with(&["--clamp", "floor", "--cur-perf", "exact"]);
    setup.pins.push(String::new());
    setup.with(&["--table", &table, "--capacity", &capacity])
}

/// A guest's tick.
pub const TICK_US: u64 = 4_000;

/// The busy vCPU's move to another pCPU, as the host's trace shows it.
pub struct Moved<'a> {
    /// The trace.
    pub seen: TraceEvents,
    /// When its thread runs there first.
    pub arrived_us: u64,
    to: &'a Policy,
    at_arrival_khz: u32,
}

impl<'a> Moved<'a> {
    /// Moves the thread.
    pub fn trace(vm: &Vm, from: &Policy, to: &'a Policy) -> Result<Self> {
        move_to(vm, from.cpu())?;
        let_ticks_pass();
        let trace = Trace::start_with_registers()?;
        let at_start = to.khz()?;
        move_to(vm, to.cpu())?;
        let_ticks_pass();
        let seen = trace.stop()?;
        let tid = vm.vcpu_tid(0)?;
        let mut switches = seen.switches.iter().filter(|one| one.cpu == to.cpu());
        let arrived = switches.find(|switch| switch.next.1 == tid);
        let arrived_us = arrived.context("the vCPU did not move")?.time_us;
        let at_arrival_khz = seen.frequency_at(to.cpu(), arrived_us).unwrap_or(at_start);
        Ok(Self {
            seen,
            arrived_us,
            to,
            at_arrival_khz,
        })
    }

    /// What that pCPU ran at from the arrival until then, in the unit of a vCPU like a CPU of `own`.
    pub fn true_khz(&self, own: &Policy, until_us: u64) -> Vec<u32> {
        let meanwhile = self.arrived_us..until_us;
        let changes = self.seen.frequencies.iter();
        let changes = changes
            .filter(|event| event.cpu == self.to.cpu() && meanwhile.contains(&event.time_us));
        iter::once(self.at_arrival_khz)
            .chain(changes.map(|event| event.khz))
            .map(|khz| scaled(own, self.to, khz))
            .collect()
    }
}

/// From where to where, to and fro.
pub fn to_and_fro<'a>(
    moves: usize,
    little: &'a Policy,
    big: &'a Policy,
) -> impl Iterator<Item = (&'a Policy, &'a Policy)> {
    [(big, little), (little, big)]
        .into_iter()
        .cycle()
        .take(moves)
}

/// A pCPU's frequency in the unit of a vCPU that mirrors a CPU of `vcpu`: unchanged on such a CPU,
/// scaled by capacity per kHz elsewhere.
pub fn scaled(vcpu: &Policy, pcpu: &Policy, khz: u32) -> u32 {
    let [capacity, reference] = [pcpu.capacity, pcpu.reference].map(u128::from);
    let [own_capacity, own_reference] = [vcpu.capacity, vcpu.reference].map(u128::from);
    let scaled = own_reference * capacity * u128::from(khz) / (reference * own_capacity);
    u32::try_from(scaled).unwrap_or(u32::MAX)
}

/// Has the first vCPU's thread run there and nowhere else.
pub fn move_to(vm: &Vm, cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(usize::try_from(cpu)?)?;
    sched_setaffinity(Pid::from_raw(vm.vcpu_tid(0)?), &set).context("moving the vCPU's thread")
}
