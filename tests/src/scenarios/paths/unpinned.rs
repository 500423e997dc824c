// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU that isn't pinned reads the frequency of the pCPU that it is on,
//! also after it moved.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::unpinned_page;
use crate::harness::frequency::let_ticks_pass;
use crate::harness::frequency::{look, stay_off};
use crate::harness::migration::Moved;
use crate::harness::migration::TICK_US;
use crate::harness::migration::like;
use crate::harness::migration::move_to;
use crate::harness::migration::scaled;
use crate::harness::migration::to_and_fro;
use crate::harness::plan::{Plan, cur_perf, registers};
use crate::harness::policy::Policy;
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::Vmm;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
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
    // By `exit`, for the trace to show what the guest reads. QEMU's guests read memory.
    let traced = plan.vmm == Vmm::Vcpufreq;
    let setup = Setup {
        vmm: plan.vmm,
        ..like(big)
    };
    let setup = if traced {
        setup.with(&["--path", "exit"])
    } else {
        setup
    };
    let mut vm = plan.guest(&setup)?;
    let base = registers(&mut vm)?;
    vm.ask("start busy busy 0")?;
    let mut rows = Vec::new();
    let mut right = true;
    let mut moves = Vec::new();
    let count = if traced { MOVES } else { 0 };
    for ends in to_and_fro(count, little, big) {
        moves.push(first_read_after_a_move(&vm, base, big, ends)?);
    }
    for policy in [little, big, little, big] {
        move_to(&vm, policy.cpu())?;
        let_ticks_pass();
        stay_off(policy, &vm)?;
        let look = look(policy, || cur_perf(&mut vm, base, 0))?;
        let (host, read) = (look.held, look.outcome);
        let (on, khz) = (vm.pcpu(0)?, host.most);
        let expected = scaled(big, policy, khz);
        right &= on == policy.cpu()
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
    let figures = json!({ "rows": rows, "moves": moves });
    Ok(LabVerdict::with_figures(figures)
        .check_rows("the first read after a move is true", &moves)
        .check("later reads are true", right, &rows))
}

/// The same by the path `ioeventfd` in a guest whose other vCPU is real-time, on the last pCPU.
pub fn beside_real_time(plan: &Plan) -> Result<LabVerdict> {
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

/// Moves after which the guest's first read is looked at.
const MOVES: usize = 10;

/// Moves the busy vCPU's thread, and checks the guest's first read of cur_perf on the other pCPU,
/// at its next tick: it is a frequency of that pCPU, at most one host call old.
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
