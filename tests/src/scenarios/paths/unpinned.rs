// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU that isn't pinned reads the frequency of the pCPU that it is on,
//! also after it moved.

use std::iter;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::unpinned_page;
use crate::harness::frequency::{look, stay_off};
use crate::harness::trace::{Seen, Trace};
use crate::harness::vm::{Setup, Vm};
use crate::scenarios::{Plan, Policy, cur_perf, let_ticks_pass, registers};

pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let (little, big) = (
        policies.first().context("no policy")?,
        policies.last().context("no policy")?,
    );
    ensure!(
        little.cpu() != big.cpu(),
        "needs two policies: take another topology"
    );
    if plan.path.as_deref() == Some("ioeventfd") {
        return unpinned_page::run(plan, little, big);
    }
    // By `exit`, for the trace to show what the guest reads.
    let mut vm = plan.guest(&like(big).with(&["--path", "exit"]))?;
    let base = registers(&mut vm)?;
    vm.ask("start busy busy 0")?;
    let mut rows = Vec::new();
    let mut held = true;
    let mut moves = Vec::new();
    for ends in to_and_fro(MOVES, little, big) {
        moves.push(first_read_after_a_move(&vm, base, big, ends)?);
    }
    held &= moves.iter().all(|one| one["right"] == true);
    for policy in [little, big, little, big] {
        move_to(&vm, policy.cpu())?;
        let_ticks_pass();
        stay_off(policy, &vm)?;
        let look = look(policy, || cur_perf(&mut vm, base, 0))?;
        let (host, read) = (look.held, look.outcome);
        let (on, khz) = (vm.pcpu(0)?, host.most);
        let expected = scaled(big, policy, khz);
        held &= on == policy.cpu()
            && host
                .since
                .iter()
                .any(|&khz| read == scaled(big, policy, khz));
        rows.push(json!({
            "pcpu": on, "moved_to": policy.cpu(), "host_khz": khz,
            "guest_reads_khz": read, "expected_khz": expected,
        }));
    }
    vm.quit()?;
    Ok(json!({ "held": held, "rows": rows, "moves": moves }))
}

/// The same by the path `ioeventfd` in a guest whose other vCPU is real-time, on the last pCPU.
pub fn beside_real_time(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let (little, big) = (
        policies.first().context("no policy")?,
        policies.last().context("no policy")?,
    );
    let [.., rt] = big.cpus[..] else {
        bail!("the last policy has no CPU");
    };
    ensure!(
        little.cpu() != big.cpu() && rt != big.cpu(),
        "needs two policies, and two CPUs in the last one: take another topology"
    );
    let mut setup = unpinned_page::by_kernel(like(big)).with(&["--rt", "1=fifo:1"]);
    setup.pins.push(rt.to_string());
    let mut vm = Vm::start(&setup)?;
    vm.expect("@ready", BOOT)?;
    // A real-time thread has no utilization to settle by.
    vm.settle(1)?;
    unpinned_page::with_perf_events(plan, vm, (little, big))
}

/// A guest with a vCPU like a CPU of this policy, that may run anywhere.
pub fn like(policy: &Policy) -> Setup {
    let table: Vec<String> = policy.opps.iter().map(u32::to_string).collect();
    let table = format!("0={}", table.join(","));
    let capacity = format!("0={}", policy.capacity);
    // On another CPU than it mirrors, what it gets is no entry of its table.
    let mut setup = Setup::default().with(&["--clamp", "floor", "--cur-perf", "exact"]);
    setup.pins.push(String::new());
    setup.with(&["--table", &table, "--capacity", &capacity])
}

/// Boot of a guest.
const BOOT: Duration = Duration::from_secs(120);
/// Moves after which the guest's first read is looked at.
const MOVES: usize = 10;
/// A guest's tick.
pub const TICK_US: u64 = 4_000;

/// The busy vCPU's move to another pCPU, as the host's trace shows it.
pub struct Moved<'a> {
    /// The trace.
    pub seen: Seen,
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

/// Moves the busy vCPU's thread, and looks at the first read of cur_perf that
/// the guest makes on the other pCPU, at its next tick: it is a frequency of
/// that pCPU, at most one host call old.
fn first_read_after_a_move(
    vm: &Vm,
    base: u64,
    own: &Policy,
    (from, to): (&Policy, &Policy),
) -> Result<Value> {
    let moved = Moved::trace(vm, from, to)?;
    let mut reads = moved.seen.reads.iter().filter(|read| {
        read.address == base && read.cpu == to.cpu() && read.time_us > moved.arrived_us
    });
    let read = reads.next().context("the guest read nothing")?;
    let true_values = moved.true_khz(own, read.time_us);
    let after_us = read.time_us - moved.arrived_us;
    let right = true_values.iter().any(|khz| u64::from(*khz) == read.value);
    Ok(json!({
        "moved_to": to.cpu(), "reads_khz": read.value, "true_khz": true_values,
        "after_us": after_us, "right": right && after_us <= 2 * TICK_US,
    }))
}

/// A pCPU's frequency in the unit of a vCPU that is like a CPU of `vcpu`:
/// itself on such a CPU, scaled by what it can do per kHz elsewhere.
pub fn scaled(vcpu: &Policy, pcpu: &Policy, khz: u32) -> u32 {
    let [capacity, max, own_capacity, own_max] =
        [pcpu.capacity, pcpu.max(), vcpu.capacity, vcpu.max()].map(u128::from);
    let scaled = own_max * capacity * u128::from(khz) / (max * own_capacity);
    u32::try_from(scaled).unwrap_or(u32::MAX)
}

/// Has the first vCPU's thread run there and nowhere else.
pub fn move_to(vm: &Vm, cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(usize::try_from(cpu)?)?;
    sched_setaffinity(Pid::from_raw(vm.vcpu_tid(0)?), &set).context("moving the vCPU's thread")
}
