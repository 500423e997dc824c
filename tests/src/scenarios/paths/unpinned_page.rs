// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The same by the path `ioeventfd`, where a read is a plain load from a page that
//! a worker keeps: how soon after a move the page shows the new pCPU. The guest
//! loads all the time, and stores what is new to it in a register, which exits:
//! so the host's trace has the moment.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::Mmio;
use vcpufreq_tests::LabVerdict;

use crate::harness::migration::{Moved, TICK_US, like, scaled, to_and_fro};
use crate::harness::plan::{Plan, registers};
use crate::harness::policy::Policy;
use crate::harness::sys::drop_bpf_capabilities;
use crate::harness::trace::exits::kvm_statistic;
use crate::harness::vm::{Setup, Vm};

const MOVES: usize = 20;
/// perftbl_sel: whatever is written there does no harm, and exits.
const SELECT: u64 = 0x0c;
/// KVM's count of exits for a signal, of all guests that there are.
const SIGNALS: &str = "signal_exits";
/// The worker's thread.
const WORKER: &str = "requests";

/// How soon after a move the page is true. With perf events the vCPU's thread gets a signal at each
/// move, there and back, and updates the page before the guest goes on: within a tick, and the
/// first value is true. Without, the worker looks each tick: within a tick of its first run since
/// the arrival, for an emulated host runs its CPUs in turn.
pub fn run(plan: &Plan, little: &Policy, big: &Policy) -> Result<LabVerdict> {
    let setup = by_kernel(like(big));
    let with = with_perf_events(plan, Vm::boot(&setup)?, (little, big))?;
    let vm = Vm::boot_prepared(&setup, drop_bpf_capabilities)?;
    let (without, _) = moves(plan, vm, (little, big), "every 4 ms")?;
    let soon = within_a_tick(&without, "after_run_us");
    let without = summary(&without);
    Ok(with
        .check("without perf events within a tick", soon, &without)
        .figure("without", without))
}

/// A guest by that path; the VMM prints why.
pub fn by_kernel(setup: Setup) -> Setup {
    setup.with(&["--path", "ioeventfd", "--explain"])
}

/// The part with perf events alone, of such a guest's first vCPU.
pub fn with_perf_events(plan: &Plan, vm: Vm, ends: (&Policy, &Policy)) -> Result<LabVerdict> {
    let (with, signals) = moves(plan, vm, ends, "follows migrations")?;
    let first_is_true = with.iter().all(|row| row["first_is_true"] == true);
    let soon = within_a_tick(&with, "after_us");
    let summary = summary(&with);
    let figures = json!({ "with_perf_events": summary, "signals": signals });
    Ok(LabVerdict::with_figures(figures)
        .check("within a tick", soon, &summary)
        .check("the first read is true", first_is_true, &summary)
        .check("each move has a signal", signals >= MOVES as u64, signals))
}

fn within_a_tick(rows: &[Value], key: &str) -> bool {
    let mut all = rows.iter().map(|row| row[key].as_u64());
    all.all(|us| us.is_some_and(|us| us <= TICK_US))
}

fn summary(rows: &[Value]) -> Value {
    let all: Vec<_> = rows.iter().filter_map(after).collect();
    json!({
        "moves": rows.len(), "within_a_tick": all.iter().filter(|us| **us <= TICK_US).count(),
        "median_us": middle(rows), "longest_us": all.iter().max(), "rows": rows,
    })
}

fn after(row: &Value) -> Option<u64> {
    row["after_us"].as_u64()
}

/// The median of how long it took, if it never took for ever.
fn middle(rows: &[Value]) -> Option<u64> {
    let mut all: Vec<_> = rows.iter().map(after).collect::<Option<_>>()?;
    all.sort_unstable();
    all.get(all.len() / 2).copied()
}

/// Moves a busy vCPU to and fro; `said` is the line of a VMM that keeps the page.
/// With the number of exits for a signal meanwhile.
fn moves(
    plan: &Plan,
    mut vm: Vm,
    (little, big): (&Policy, &Policy),
    said: &str,
) -> Result<(Vec<Value>, u64)> {
    plan.load_driver(&mut vm)?;
    let base = registers(&mut vm)?;
    vm.ask(format!("start echo echo 0 {base:#x} {:#x}", base + SELECT))?;
    let mut rows = Vec::new();
    let signals = kvm_statistic(SIGNALS)?;
    for ends in to_and_fro(MOVES, little, big) {
        rows.push(seen_after_a_move(&vm, base, big, ends)?);
    }
    let signals = kvm_statistic(SIGNALS)? - signals;
    let errors = vm.quit()?;
    let line = errors.lines().find(|line| line.contains("cur_perf"));
    ensure!(
        line.is_some_and(|line| line.contains(said)),
        "not as planned: {errors}"
    );
    Ok((rows, signals))
}

/// How long after its arrival on another pCPU the vCPU loads a frequency of that one, and that
/// it was one of since. What a worker looked up before the arrival, when the thread was
/// already there but the frequency hadn't moved yet, isn't: the next look counts.
fn seen_after_a_move(
    vm: &Vm,
    base: u64,
    own: &Policy,
    (from, to): (&Policy, &Policy),
) -> Result<Value> {
    let moved = Moved::trace(vm, from, to)?;
    let of_it = |value: u64| {
        let mut opps = to.opps.iter();
        opps.any(|&khz| u64::from(scaled(own, to, khz)) == value)
    };
    let is_true = |told: &&Mmio| {
        let mut true_values = moved.true_khz(own, told.time_us).into_iter();
        true_values.any(|khz| u64::from(khz) == told.value)
    };
    let mut told = moved.seen.writes.iter().filter(|write| {
        write.address == base + SELECT && write.time_us >= moved.arrived_us && of_it(write.value)
    });
    let first_is_true = told.clone().next().is_some_and(|first| is_true(&first));
    let Some(told) = told.find(is_true) else {
        return Ok(json!({ "moved_to": to.cpu(), "after_us": null }));
    };
    // One that ran at the arrival may have looked before it.
    let mut runs = moved
        .seen
        .switches
        .iter()
        .filter(|switch| switch.next.0 == WORKER && switch.time_us >= moved.arrived_us);
    let ran_us = runs.next().map_or(told.time_us, |switch| switch.time_us);
    Ok(json!({
        "moved_to": to.cpu(), "reads_khz": told.value, "first_is_true": first_is_true,
        "after_us": told.time_us.saturating_sub(moved.arrived_us),
        "after_run_us": told.time_us.saturating_sub(ran_us),
    }))
}
