// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The same by the path `kernel`, where a read is a plain load from a page that
//! a worker keeps: how soon after a move the page shows the new pCPU. The guest
//! loads all the time, and stores what is new to it in a register, which exits:
//! so the host's trace has the moment.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::unpinned::{TICK_US, like, move_to, scaled};
use super::{Plan, Policy, let_ticks_pass, registers};
use crate::sys::drop_bpf_capabilities;
use crate::trace::Trace;
use crate::vm::Vm;

const MOVES: usize = 20;
/// perftbl_sel: whatever is written there does no harm, and exits.
const SELECT: u64 = 0x0c;

/// Ticks within which the page follows where nothing tells the worker of moves:
/// it looks each 4 ms, or after 20 times as long as its last look took.
const TICKS_UNTOLD: u64 = 9;

/// With perf events the page follows within a tick; without, at the worker's
/// next look.
pub fn run(plan: &Plan, little: &Policy, big: &Policy) -> Result<Value> {
    let with = moves(plan, (little, big), "follows migrations", |_| ())?;
    let without = moves(plan, (little, big), "every 4 ms", drop_bpf_capabilities)?;
    let within = |ticks| {
        move |row: &&Value| {
            row["after_us"]
                .as_u64()
                .is_some_and(|us| us <= ticks * TICK_US)
        }
    };
    let held = with.iter().all(|row| within(1)(&row))
        && without.iter().all(|row| within(TICKS_UNTOLD)(&row));
    let json = |rows: &[Value]| {
        json!({
            "moves": rows.len(), "within_a_tick": rows.iter().filter(within(1)).count(),
            "longest_us": rows.iter().filter_map(|row| row["after_us"].as_u64()).max(),
            "rows": rows,
        })
    };
    Ok(json!({
        "held": held, "with_perf_events": json(&with), "without": json(&without),
    }))
}

/// Moves a busy vCPU to and fro; `said` is how the VMM says that it keeps the page.
fn moves(
    plan: &Plan,
    (little, big): (&Policy, &Policy),
    said: &str,
    prepare: impl FnOnce(&mut Command),
) -> Result<Vec<Value>> {
    let setup = like(big).with(&["--path", "kernel", "--explain"]);
    let mut vm = Vm::boot_prepared(&setup, prepare)?;
    plan.load_driver(&mut vm)?;
    let base = registers(&mut vm)?;
    vm.ask(format!("start echo echo 0 {base:#x} {:#x}", base + SELECT))?;
    let mut rows = Vec::new();
    for n in 0..MOVES {
        let (from, to) = if n % 2 == 0 {
            (big, little)
        } else {
            (little, big)
        };
        rows.push(seen_after_a_move(&vm, base, big, (from, to))?);
    }
    let errors = vm.quit()?;
    let line = errors.lines().find(|line| line.contains("cur_perf"));
    ensure!(
        line.is_some_and(|line| line.contains(said)),
        "not as planned: {errors}"
    );
    Ok(rows)
}

/// How long after its arrival on another pCPU the vCPU loads a frequency of
/// that one, and that it was one of then.
fn seen_after_a_move(
    vm: &Vm,
    base: u64,
    own: &Policy,
    (from, to): (&Policy, &Policy),
) -> Result<Value> {
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
    let arrived = arrived.context("the vCPU did not move")?.time_us;
    let had = |khz: u32| u64::from(scaled(own, to, khz));
    let of_it = |value: u64| to.opps.iter().any(|&khz| had(khz) == value);
    let mut told = seen.writes.iter().filter(|write| {
        write.address == base + SELECT && write.time_us >= arrived && of_it(write.value)
    });
    let Some(told) = told.next() else {
        return Ok(json!({ "moved_to": to.cpu(), "after_us": null }));
    };
    let changes = seen
        .frequencies
        .iter()
        .filter(|event| event.cpu == to.cpu() && (arrived..told.time_us).contains(&event.time_us));
    let at_arrival = seen.frequency_at(to.cpu(), arrived).unwrap_or(at_start);
    let mut true_values = std::iter::once(at_arrival).chain(changes.map(|event| event.khz));
    let right = true_values.any(|khz| had(khz) == told.value);
    let after_us = right.then_some(told.time_us - arrived);
    Ok(json!({ "moved_to": to.cpu(), "reads_khz": told.value, "after_us": after_us }))
}
