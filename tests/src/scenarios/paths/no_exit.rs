// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads of cur_perf and writes of set_perf, 100,000 of each and a whole ramp:
//! which of them leave KVM for userspace; registers in RAM have no trap at
//! all. The same by the path `exit` shows that the counts would see them.

use std::ops::Range;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::cur_perf::asked_for;
use crate::harness::plan::{
    GuestDevice, Plan, ask_for, first_cpus, last_of, let_load_decay, registers, set_governor,
};
use crate::harness::policy::Policy;
use crate::harness::registers::PAGE;
use crate::harness::trace::exits::{Exits, SeenExits, TracedAccesses};
use crate::harness::vm::{Setup, Vm};

/// Accesses of each kind.
const MANY: u64 = 100_000;
/// And by the path `exit`.
const FEW: u64 = 500;
/// Pages that are looked at.
const VCPUS_AT_MOST: u64 = 16;
/// Bytes of all registers with the padding, or of shared memory and its doorbell.
const REGION: u64 = 0x3_0000;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = Setup {
        silent: true,
        ..plan.mirroring(&first_cpus(&policies))
    };
    let mut vm = plan.guest(&setup)?;
    let shared = GuestDevice::of(&mut vm)?.bell.is_some();
    let tight = accesses(&mut vm, &policies, MANY)?;
    let ramp = ramp(&mut vm, &policies)?;
    let said = vm.quit()?;

    let exit = Setup {
        silent: true,
        ..Setup::mirroring(&first_cpus(&policies)).with(&[
            "--path",
            "exit",
            "--cur-perf",
            "request",
        ])
    };
    let mut vm = plan.guest(&exit)?;
    let control = accesses(&mut vm, &policies, FEW)?;
    let (last, policy) = last_of(&policies)?;
    for khz in [policy.max(), policy.min()] {
        ask_for(&mut vm, last, khz)?;
    }
    let report = asked_for(&mut vm, last, policy, policy.min())?;
    vm.quit()?;

    // The kernel's own driver lets a domain's CPUs ask for it, and no others. Of a doorbell
    // or of registers in RAM it isn't seen.
    let in_ram = plan.path.as_deref() == Some("ram");
    let by_others =
        shared || in_ram || (ramp.by_other_vcpus > 0) == (plan.driver == "vcpufreq_guest");
    let by_exit = control.region.exited >= 2 * FEW;
    let figures = json!({
        "accesses": tight.json(), "ramp": ramp.json(), "vmm_said": said,
        "control_by_exit": control.json(),
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "each write is trapped, in RAM none",
            tight.set_perf.trapped == if in_ram { 0 } else { MANY },
            tight.json(),
        )
        .check("no access exits", tight.region.exited == 0, tight.json())
        .check("KVM counts as many", tight.exits_agree, tight.json())
        .check(
            "no access of a ramp exits",
            ramp.region.exited == 0,
            ramp.json(),
        )
        .check(
            "a ramp has traps, in RAM none",
            (ramp.region.trapped > 0) != in_ram,
            ramp.json(),
        )
        .check("KVM counts a ramp's", ramp.exits_agree, ramp.json())
        .check("a ramp's are by the vCPUs that may", by_others, ramp.json())
        .check(
            "by exit each write exits",
            control.set_perf.exited == FEW,
            control.json(),
        )
        .check("by exit each read exits", by_exit, control.json())
        .part("report_request_by_exit", report))
}

/// What came of some accesses.
struct AccessCounts {
    /// Of the vCPU's set_perf.
    set_perf: TracedAccesses,
    /// Of all registers.
    region: TracedAccesses,
    /// Writes of a vCPU's set_perf by another vCPU: the scheduler has given that one work.
    by_other_vcpus: u64,
    /// KVM counts as many exits as were traced.
    exits_agree: bool,
    read_ns: f64,
    /// Median and 99th percentile.
    write_ns: String,
    all: Value,
}

impl AccessCounts {
    fn of(seen: &SeenExits, base: u64, set_perf: Range<u64>, ns: (f64, String)) -> Self {
        Self {
            set_perf: seen.at(set_perf),
            region: seen.at(base..base + REGION),
            by_other_vcpus: (0..VCPUS_AT_MOST)
                .map(|vcpu| seen.by_others_than(&format!("vcpu{vcpu}"), base + PAGE * vcpu + 4))
                .sum(),
            exits_agree: seen.agrees(),
            read_ns: ns.0,
            write_ns: ns.1,
            all: seen.json(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "set_perf_trapped": self.set_perf.trapped, "exited": self.region.exited,
            "read_virtual_ns": self.read_ns, "write_virtual_ns_median_p99": self.write_ns,
            "by_other_vcpus": self.by_other_vcpus, "kvm_counts_the_same_exits": self.exits_agree, "by_address": self.all,
        })
    }
}

/// Reads and writes the registers of the last vCPU in tight loops. Its driver
/// asks for nothing meanwhile, but reads cur_perf at each tick.
fn accesses(vm: &mut Vm, policies: &[Policy], count: u64) -> Result<AccessCounts> {
    let vcpu = policies.len() - 1;
    let policy = policies.last().context("no policy")?;
    for vcpu in 0..policies.len() {
        set_governor(vm, vcpu, "userspace")?;
    }
    let device = GuestDevice::of(vm)?;
    let (base, page) = (device.base, device.cur_perf(vcpu));
    let opps: Vec<_> = policy.opps.iter().map(u32::to_string).collect();
    let (set_perf, opps) = (device.set_perf(vcpu), opps.join(" "));
    let trap = device.bell.map_or(page + 4, |(bell, _)| bell);
    let read = |count| format!("loads {vcpu} {page:#x} {count}");
    let write = |count| format!("stores {vcpu} {set_perf} {count} {opps}");
    // How long it takes is asked without the trace, which takes time too.
    let read_ns = vm.number(read(FEW))? as f64 / FEW as f64;
    let line = format!("store-times {vcpu} {set_perf} {FEW} {opps}");
    let ns = (read_ns, vm.ask(line)?);
    let exits = Exits::watch()?;
    vm.number(read(count))?;
    vm.number(write(count))?;
    Ok(AccessCounts::of(&exits.stop()?, base, trap..trap + 4, ns))
}

/// An idle guest under schedutil becomes busy, and idle again.
fn ramp(vm: &mut Vm, policies: &[Policy]) -> Result<AccessCounts> {
    for vcpu in 0..policies.len() {
        set_governor(vm, vcpu, "schedutil")?;
    }
    let base = registers(vm)?;
    let exits = Exits::watch()?;
    for vcpu in 0..policies.len() {
        vm.ask(format!("start idle periodic {vcpu} 20000 200"))?;
        let_load_decay();
        vm.ask(format!("start busy busy {vcpu}"))?;
        let_load_decay();
        vm.ask("stop busy")?;
        let_load_decay();
        vm.ask("stop idle")?;
    }
    Ok(AccessCounts::of(
        &exits.stop()?,
        base,
        base + 4..base + 8,
        (0.0, String::new()),
    ))
}
