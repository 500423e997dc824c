// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's own QEMU with a device of shared memory: its guest boots by KVM, finds the device,
//! reads what `vcpufreq serve` has written, and is answered. No access but one to an absent peer's
//! doorbell leaves KVM for userspace. When a server ends, or is killed, each vCPU's thread has the clamp
//! that it had before.

pub mod control;
pub mod deaths;
pub mod debian;
pub mod efi;
#[cfg(feature = "bpf")]
mod exit_reader;
#[cfg(feature = "bpf")]
pub mod late;
pub mod libvirt;
pub mod life;
pub mod moves;
pub mod ram;
pub mod service;

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_host::{SchedAttr, Tid};
use vcpufreq_tests::LabVerdict;

use crate::harness::leftovers::own_cgroups;
use crate::harness::plan::{GuestDevice, cur_perf, first_cpus, last_of};
use crate::harness::policy::Policy;
use crate::harness::registers::PAGE;
use crate::harness::server::ServeProcess;
use crate::harness::stats;
use crate::harness::sysfs;
use crate::harness::trace::exits::{Exits, SeenExits, TracedAccesses};
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::{SOCKET, qemu_at};
use crate::harness::wait::{SOON, settled};

/// Accesses of each kind.
const MANY: u64 = 100_000;
/// And where each is timed, or leaves KVM.
const FEW: u64 = 500;
/// Of a peer that isn't there, for the first vCPU.
const ABSENT: u64 = 7 << 16;
/// In which the server has answered by far.
const ANSWERED: Duration = Duration::from_millis(20);
/// The clamp of a thread that has none of its own,
const FREE: (u32, u32) = (0, 1024);
/// and one that it has of its own, which no request here sets.
const OWN: (u32, u32) = (128, 768);

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let pins = first_cpus(&policies);
    let setup = Setup {
        silent: true,
        // The answer to a request is known then.
        ..Setup::mirroring(&pins).with(&["--cur-perf", "request", "--rate-limit", "0"])
    };
    let vcpus = pins.len();
    let server = ServeProcess::start(&setup)?;
    let started = Instant::now();
    let mut vm = Vm::spawn(&mut qemu_at(SOCKET, &setup))?;
    vm.expect("@ready", BOOT)?;
    let boot_ms = started.elapsed().as_millis();
    vm.settle(vcpus)?;
    let allowed: Vec<String> = (0..vcpus).map(|n| vm.allowed(n)).collect::<Result<_>>()?;
    let device = GuestDevice::of(&mut vm)?;
    let answers = policies.iter().enumerate();
    let answers = answers.map(|(vcpu, policy)| answer(&mut vm, &device, vcpu, policy));
    let answers: Vec<LabVerdict> = answers.collect::<Result<_>>()?;
    let (last, policy) = last_of(&policies)?;
    let accesses = accesses(&mut vm, &device, last, policy)?;
    let memory = json!({
        "qemu_resident_kib": vm.resident_kib()?, "host_available_kib": available_kib()?,
    });
    let counted = || {
        let stats = stats::at(server.pid())?;
        let counted = (0..vcpus).map(|vcpu| {
            let written = if vcpu == last { 2 + MANY + FEW } else { 2 };
            stats::counted_once(&stats["vcpus"][vcpu], written)
        });
        Ok(counted.collect::<Vec<bool>>())
    };
    // The server pauses after so many requests.
    let counted = settled(SOON, counted, |all| !all.contains(&false))?;
    let mut guest = ServedGuest {
        vm: &mut vm,
        device: &device,
        policies: &policies,
    };
    let freed = [
        guest.freed(FREE, || server.stop())?,
        guest.freed_by_killed(&setup)?,
        guest.freed_by_killed(&setup.clone().with(&["--actuator", "thread"]))?,
    ];
    let said = vm.quit()?;
    let once = counted.iter().all(|counted| *counted);
    let figures = json!({
        "boot_virtual_ms": boot_ms, "pinned": allowed,
        "counted_once": counted, "memory": memory, "qemu_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("each vCPU is pinned", &allowed, setup.pins)
        .parts("freed", freed.into())
        .parts("answers", answers)
        .part("accesses", accesses)
        .check("QEMU says nothing", said.is_empty(), &said)
        .check("each request is counted once", once, &counted))
}

/// A guest whose servers come and go.
struct ServedGuest<'a> {
    vm: &'a mut Vm,
    device: &'a GuestDevice,
    policies: &'a [Policy],
}

impl ServedGuest<'_> {
    /// Whether each vCPU's thread is clamped while it requests something, and has the clamp `before`
    /// when `end` has ended the server; no cgroup is left then.
    fn freed(
        &mut self,
        before: (u32, u32),
        end: impl FnOnce() -> Result<String>,
    ) -> Result<LabVerdict> {
        for (vcpu, policy) in self.policies.iter().enumerate() {
            let set_perf = self.device.set_perf(vcpu);
            self.vm
                .ask(format!("poke {vcpu} {set_perf} {}", policy.max()))?;
        }
        let wanted = |policy: &Policy| (policy.util(policy.max()), 1024);
        let served = self.clamps(&wanted)?;
        let said = end()?;
        let after = self.clamps(&|_| before)?;
        let groups = settled(SOON, own_cgroups, Vec::is_empty)?;
        let clamped = served.iter().copied().eq(self.policies.iter().map(wanted));
        let as_before = after.iter().all(|clamp| *clamp == before);
        let figures = json!({
            "while_served": served, "after": after, "cgroups_left": groups, "server_said": said,
        });
        Ok(LabVerdict::with_figures(figures)
            .check("clamped while it is served", clamped, &served)
            .check("then as before", as_before, &after)
            .check_none("no cgroup is left", &groups))
    }

    /// The same of a server that takes the VM over, whose threads have clamps of their own, and is
    /// killed. Nothing but what its guardian puts back frees them.
    fn freed_by_killed(&mut self, setup: &Setup) -> Result<LabVerdict> {
        let (min, max) = OWN;
        for vcpu in 0..self.policies.len() {
            let tid = Tid::new(self.vm.vcpu_tid(vcpu)?).context("a thread's number")?;
            SchedAttr::clamp(min, max).set(tid)?;
        }
        let server = ServeProcess::start(setup)?;
        self.freed(OWN, || {
            drop(server);
            Ok(String::new())
        })
    }

    fn clamps(&self, wanted: &dyn Fn(&Policy) -> (u32, u32)) -> Result<Vec<(u32, u32)>> {
        let each = self.policies.iter().enumerate();
        let each = each.map(|(vcpu, policy)| self.vm.settled_clamp(vcpu, wanted(policy)));
        each.collect()
    }
}

/// A vCPU asks for its highest OPP, and for its lowest, and reads them.
fn answer(vm: &mut Vm, device: &GuestDevice, vcpu: usize, policy: &Policy) -> Result<LabVerdict> {
    let mut read = Vec::new();
    for khz in [policy.max(), policy.min()] {
        vm.ask(format!("poke {vcpu} {} {khz}", device.set_perf(vcpu)))?;
        sleep(ANSWERED);
        read.push(cur_perf(vm, device.base, vcpu)?);
    }
    let ends = [policy.max(), policy.min()];
    let figures = json!({ "read": read });
    Ok(LabVerdict::with_figures(figures).check_eq("it reads what it asks for", &read, ends))
}

/// Which of a vCPU's accesses leave the guest, and KVM; and what they cost.
fn accesses(vm: &mut Vm, device: &GuestDevice, vcpu: usize, policy: &Policy) -> Result<LabVerdict> {
    let opps: Vec<_> = policy.opps.iter().map(u32::to_string).collect();
    let opps = opps.join(" ");
    let (bell, _) = device.bell.context("a device without a doorbell")?;
    let (read, write) = (device.cur_perf(vcpu), device.set_perf(vcpu));
    let read_ns = vm.ask(format!("load-times {vcpu} {read:#x} 20 1000"))?;
    let load_ns = vm.ask(format!("ram-times {vcpu} - 20 1000"))?;
    let request_ns = vm.ask(format!("store-times {vcpu} {write} {FEW} {opps}"))?;
    let exits = Exits::watch()?;
    vm.number(format!("loads {vcpu} {read:#x} {MANY}"))?;
    vm.number(format!("stores {vcpu} {write} {MANY} {opps}"))?;
    let seen = exits.stop()?;
    let exits = Exits::watch()?;
    vm.number(format!("stores {vcpu} {bell:#x} {FEW} {ABSENT}"))?;
    let control = exits.stop()?;
    let memory = seen.at(device.base - PAGE..read + PAGE);
    let accesses = |trapped, exited| TracedAccesses { trapped, exited };
    let of_bell = |seen: &SeenExits| seen.at(bell..bell + 4);
    let agree = [&seen, &control].into_iter().all(SeenExits::agrees);
    let figures = json!({
        "reads": MANY, "requests": MANY, "of_both": seen.json(),
        "absent_peer": control.json(), "kvm_counts_exits": seen.counted,
        "read_virtual_ns_median_p99": read_ns, "load_virtual_ns_median_p99": load_ns,
        "request_virtual_ns_median_p99": request_ns,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "no access to memory leaves",
            memory == accesses(0, 0),
            seen.json(),
        )
        .check(
            "no doorbell exits",
            of_bell(&seen) == accesses(MANY, 0),
            seen.json(),
        )
        .check(
            "an absent peer's does",
            of_bell(&control) == accesses(FEW, FEW),
            control.json(),
        )
        .check("KVM counts as many", agree, (seen.json(), control.json())))
}

/// Memory that the host could still give.
fn available_kib() -> Result<u64> {
    sysfs::field("/proc/meminfo", "MemAvailable")
}
