// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A Linux guest of many vCPUs, in turn on the pCPUs: each has its policy, each
//! request clamps that vCPU's thread and no other, and none leaves KVM. An access
//! of the last vCPU costs what it costs a guest that has no other.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::{Plan, ask_for, cur_perf, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::registers::PAGE;
use crate::harness::trace::exits::Exits;
use crate::harness::vm::{BOOT, Setup, Vm};

/// All emulated CPUs share one stream of instructions, and idle vCPUs that tick use it up. vCPUs
/// that are online from the start tick until the kernel has chosen its clock, so they come online
/// after the guest's boot. And PSCI's standby, which an RT kernel has, makes each tick more than
/// twice as dear (docs/design.md).
const CMDLINE: &str = "maxcpus=1 cpuidle.off=1";
/// Unless the scenario's name has another number.
const VCPUS: usize = 64;
/// What Linux takes for each CPU comes on top of the usual.
const MEM_MIB: u32 = 512;
const CPUS: &str = "/sys/devices/system/cpu";
/// Reads and writes of which the median counts.
const READS: &str = "50 50";
const WRITES: u32 = 100;
/// What an access may cost more than with one vCPU.
const DEARER: f64 = 1.1;

/// `many-vcpus`, or `many-vcpus:COUNT`.
pub fn run(plan: &Plan, name: &str) -> Result<LabVerdict> {
    let count = match name.split_once(':') {
        Some((_, count)) => count.parse().context("many-vcpus:COUNT")?,
        None => VCPUS,
    };
    ensure!(count > 1, "many-vcpus:{count}: at least 2");
    let policies = Policy::all()?;
    let homes = homes(&policies, count);
    let one = Costs::of_one(plan, homes.last().context("no vCPU")?)?;
    let began = Instant::now();
    // It needn't settle: it hadn't with 64 vCPUs after 30 s, and what is checked is
    // no time.
    let mut vm = Vm::start(&setup(plan, &homes))?;
    vm.expect("@ready", BOOT)?;
    for vcpu in 1..count {
        vm.ask(format!("write {CPUS}/cpu{vcpu}/online 1"))?;
    }
    let online = vm.ask(format!("read {CPUS}/online"))?;
    plan.load_driver(&mut vm)?;
    let boot_ms = u64::try_from(began.elapsed().as_millis())?;
    let resident_kib = vm.resident_kib()?;
    for vcpu in 0..count {
        set_governor(&mut vm, vcpu, "userspace")?;
    }
    let base = registers(&mut vm)?;
    let exits = Exits::watch()?;
    let mut wrong = Vec::new();
    let pcpus: usize = policies.iter().map(|policy| policy.cpus.len()).sum();
    for round in 0..2 {
        // Unlike those of the next vCPU on the pCPU, and of the round before.
        let asked = |vcpu: usize| {
            let opps = &homes[vcpu].1.opps;
            opps[(vcpu / pcpus + round) % opps.len()]
        };
        for vcpu in 0..count {
            ask_for(&mut vm, vcpu, asked(vcpu))?;
        }
        for (vcpu, (_, policy)) in homes.iter().enumerate() {
            let util = policy.util(asked(vcpu));
            // By the path `ioeventfd` the worker may have to wait for a pCPU.
            let clamp = vm.settled_clamp(vcpu, (util, util))?;
            if clamp != (util, util) {
                wrong.push(json!({ "vcpu": vcpu, "round": round, "util": util, "clamp": clamp }));
            }
        }
    }
    let untrue = untrue_reads(&mut vm, base, &homes)?;
    let seen = exits.stop()?;
    let utils: Result<Vec<_>> = (0..count).map(|vcpu| vm.util_avg(vcpu)).collect();
    let busiest = utils?.into_iter().max();
    let of_all = seen.at(base..base + PAGE * count as u64);
    let exits_wanted = plan.path.as_deref() == Some("exit");
    let (_, policy) = homes.last().context("no vCPU")?;
    let costs = Costs::of(&mut vm, count - 1, policy)?;
    let said = vm.quit()?;
    let figures = json!({
        "vcpus": count, "online": online, "highest_util_of_a_vcpu": busiest, "wrong": wrong, "untrue": untrue,
        "set_perf_trapped": of_all.trapped, "exited": of_all.exited,
        "boot_virtual_ms": boot_ms, "vmm_resident_kib": resident_kib, "vmm_said": said,
        "read_and_write_ns": costs.json(), "with_one_vcpu": one.json(),
    });
    let as_the_path_has = (of_all.exited > 0) == exits_wanted;
    Ok(LabVerdict::with_figures(figures)
        .check_none("no clamp is wrong", &wrong)
        .check_eq("all are online", &online, format!("0-{}", count - 1))
        .check(
            "costs as with one vCPU",
            costs.like(&one),
            [costs.json(), one.json()],
        )
        .check_none("no read is untrue", &untrue)
        // In the second round each asks for another one than before.
        .check(
            "each makes a request",
            of_all.trapped >= count as u64,
            of_all.trapped,
        )
        .check("exits as the path has them", as_the_path_has, of_all.exited))
}

/// Medians of what an access takes the vCPU, in ns.
struct Costs {
    read: f64,
    write: f64,
    /// Of the guest, when it has just booted.
    resident_kib: u64,
}

impl Costs {
    /// A vCPU's; its policy is left to userspace.
    fn of(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<Self> {
        let resident_kib = vm.resident_kib()?;
        let page = registers(vm)? + PAGE * vcpu as u64;
        let mut median = |line: String| -> Result<f64> {
            let answer = vm.ask(line)?;
            let median = answer.split(' ').next().context("no median")?;
            median.parse().context("median")
        };
        let opps: Vec<_> = policy.opps.iter().map(u32::to_string).collect();
        let (set_perf, opps) = (page + 4, opps.join(" "));
        Ok(Self {
            read: median(format!("load-times {vcpu} {page:#x} {READS}"))?,
            write: median(format!("store-times {vcpu} {set_perf:#x} {WRITES} {opps}"))?,
            resident_kib,
        })
    }

    /// In a guest of one vCPU, on this pCPU.
    fn of_one(plan: &Plan, home: &(u32, &Policy)) -> Result<Self> {
        let mut vm = plan.guest(&setup(plan, std::slice::from_ref(home)))?;
        set_governor(&mut vm, 0, "userspace")?;
        let costs = Self::of(&mut vm, 0, home.1)?;
        vm.quit()?;
        Ok(costs)
    }

    /// Neither costs much more than the other guest's.
    fn like(&self, other: &Self) -> bool {
        self.read <= other.read * DEARER && self.write <= other.write * DEARER
    }

    fn json(&self) -> Value {
        json!({ "read": self.read, "write": self.write, "vmm_resident_kib": self.resident_kib })
    }
}

/// The vCPUs that read what is no OPP of their pCPU.
fn untrue_reads(vm: &mut Vm, base: u64, homes: &[(u32, &Policy)]) -> Result<Vec<Value>> {
    let mut untrue = Vec::new();
    for (vcpu, (_, policy)) in homes.iter().enumerate() {
        let khz = cur_perf(vm, base, vcpu)?;
        if !policy.opps.contains(&khz) {
            untrue.push(json!({ "vcpu": vcpu, "reads_khz": khz }));
        }
    }
    Ok(untrue)
}

/// The pCPU of each vCPU, and its policy.
fn homes(policies: &[Policy], count: usize) -> Vec<(u32, &Policy)> {
    let pcpus = policies.iter().flat_map(|policy| {
        let cpus = policy.cpus.iter();
        cpus.map(move |cpu| (*cpu, policy))
    });
    let pcpus: Vec<_> = pcpus.collect();
    pcpus.into_iter().cycle().take(count).collect()
}

/// Each vCPU like its pCPU, in a domain of its own.
fn setup(plan: &Plan, homes: &[(u32, &Policy)]) -> Setup {
    let pcpus: Vec<_> = homes.iter().map(|(pcpu, _)| *pcpu).collect();
    let mut setup = Setup {
        silent: true,
        mem_mib: Some(MEM_MIB),
        cmdline: CMDLINE.into(),
        ..plan.mirroring(&pcpus).with(&["--clamp", "exact"])
    };
    let domains = (0..homes.len()).map(|vcpu| format!("--domain={vcpu}={vcpu}"));
    setup.options.extend(domains);
    setup
}
