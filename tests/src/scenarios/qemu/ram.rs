// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A QEMU guest with nothing of this project in it, neither driver nor device: its registers are in
//! its RAM, and the kernel's own virtual-cpufreq drives them. Requests at, just below and just above
//! each OPP of the host take it to the OPP that they are for. No access traps into KVM. Beside an idle
//! guest the server sleeps, and beside a busy one it looks once a ms. After kill -9 the next
//! server takes it over. The same is of a QEMU that has shared memory of its own; one that has private
//! memory is refused.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_bench::piped::threads;
use vcpufreq_tests::LabVerdict;

use super::MANY;
use super::control::FREE;
use crate::harness::leftovers::left_soon;
use crate::harness::plan::{
    GuestDevice, Plan, cur_perf, first_cpus, last_of, let_load_decay, set_governor,
};
use crate::harness::policy::Policy;
use crate::harness::registers::PAGE;
use crate::harness::server::ServeProcess;
use crate::harness::sysfs;
use crate::harness::trace::exits::{Exits, TracedAccesses};
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::{self, Vmm};
use crate::scenarios::device::opps::{SweepRow, sweep_of};

/// No module of this project's.
const DRIVER: &str = "virtual-cpufreq";

/// What QEMU gets for memory of its own.
const OWN_MEMORY: [&str; 3] = [
    "memory-backend-memfd,id=own,size=256M,share=on",
    "memory-backend-file,id=own,size=256M,share=on,mem-path=/run/own",
    "memory-backend-memfd,id=own,size=256M,share=on,hugetlb=on,hugetlbsize=2M",
];
/// Huge pages of the last one.
const HUGE_PAGES: u32 = 128;
const HUGE: &str = "/proc/sys/vm/nr_hugepages";
const PRIVATE: &str = "memory-backend-ram,id=own,size=256M";
const REFUSED: &str = "give its memory object share=on";
/// How long the guest idles, and how often the server may run meanwhile: 25 times after the last
/// request, and then each time that a vCPU has run for 250 µs or a pCPU has changed its frequency. Awake
/// it runs each ms.
pub const IDLE: Duration = Duration::from_secs(10);
const MOST_WAKEUPS: u64 = 250;
/// How long its vCPUs are busy, and how often the server's thread may run meanwhile: each ms, and now and
/// then for the frequency. No bound is on its time: the emulated CPUs of the busy vCPUs take turns with
/// its own, so it seems to take some 300 us a turn.
pub const BUSY: Duration = Duration::from_secs(4);
const MOST_TURNS: u64 = 4_400;

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let free = Setup {
        vmm: Vmm::Qemu,
        silent: true,
        ..Setup::mirroring(&first_cpus(&policies))
    };
    let free = free.with(&["--clamp", "exact", "--rate-limit", "0"]);
    let setup = free.clone().with(&["--path", "ram"]);
    let mut vm = booted(&setup, None)?;
    let allowed = (0..policies.len()).map(|vcpu| vm.allowed(vcpu));
    let allowed: Vec<String> = allowed.collect::<Result<_>>()?;
    let device = GuestDevice::of(&mut vm)?;
    let mut rows = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        let requests = around_each(policy);
        let exact = SweepRow::exact;
        rows.extend(sweep_of(&mut vm, (vcpu, policy), &requests, exact)?);
        vm.ask("stop busy")?;
    }
    let accesses = accesses(&mut vm, &device, &policies)?;
    let idle = idle(&vm)?;
    let busy = busy(&mut vm, policies.len())?;
    let taken_over = taken_over(&mut vm, &device, &policies, free)?;
    vm.kill()?;
    // One that fails doesn't hide the others.
    let own = OWN_MEMORY.map(|memory| {
        let row = own(&setup, memory, &policies);
        row.unwrap_or_else(|error| LabVerdict::broken_off(&format!("{error:#}")))
    });
    let refused = refused(&setup)?;
    let wrong = rows.iter().filter(|row| !row.exact()).map(SweepRow::json);
    let wrong: Vec<Value> = wrong.collect();
    let figures = json!({
        "requests_checked": rows.len(), "wrong": wrong, "pinned": allowed,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no request is wrong", &wrong)
        .check_eq("each vCPU is pinned", &allowed, setup.pins)
        .part("accesses", accesses)
        .part("idle", idle)
        .part("busy", busy)
        .part("taken_over", taken_over)
        .parts("own_memory", own.into())
        .part("private_memory", refused))
}

/// A guest with the kernel's driver, and with this memory object if one is named.
fn booted(setup: &Setup, memory: Option<&str>) -> Result<Vm> {
    let mut vm = Vm::boot_prepared(setup, |qemu| with_memory(qemu, memory))?;
    let plan = Plan {
        protected: false,
        driver: DRIVER.to_owned(),
        path: None,
        vmm: Vmm::Qemu,
    };
    plan.load_driver(&mut vm)?;
    Ok(vm)
}

fn with_memory(qemu: &mut Command, memory: Option<&str>) {
    if let Some(memory) = memory {
        qemu.args(["-object", memory, "-machine", "memory-backend=own"]);
    }
}

/// The folder in procfs of the thread that reads requests.
fn reader(vm: &Vm) -> Result<String> {
    let process = vm.vm_process().context("no process of the VM")?;
    let mut all = threads(process)?.into_iter();
    let reader = all.find(|(_, name)| name == "requests");
    let (tid, _) = reader.context("no thread reads requests")?;
    Ok(format!("/proc/{process}/task/{tid}"))
}

/// How often that thread has slept.
pub fn turns(vm: &Vm) -> Result<u64> {
    let status = format!("{}/status", reader(vm)?);
    sysfs::field(status, "voluntary_ctxt_switches")
}

/// How often it runs beside a guest whose vCPUs are busy and request nothing new.
fn busy(vm: &mut Vm, vcpus: usize) -> Result<LabVerdict> {
    let thread = reader(vm)?;
    for vcpu in 0..vcpus {
        vm.ask(format!("start busy{vcpu} busy {vcpu}"))?;
    }
    let_load_decay();
    let (turns_before, (ran_before, _)) = (turns(vm)?, sysfs::ran_and_waited_ns(&thread)?);
    sleep(BUSY);
    let (ran, _) = sysfs::ran_and_waited_ns(&thread)?;
    let turns = turns(vm)? - turns_before;
    for vcpu in 0..vcpus {
        vm.ask(format!("stop busy{vcpu}"))?;
    }
    let figures = json!({
        "turns": turns, "ran_ns": ran - ran_before, "seconds": BUSY.as_secs(),
    });
    Ok(LabVerdict::with_figures(figures).check(
        "it looks once a ms",
        (1..=MOST_TURNS).contains(&turns),
        turns,
    ))
}

/// How often it wakes beside a guest that idles.
fn idle(vm: &Vm) -> Result<LabVerdict> {
    let before = turns(vm)?;
    sleep(IDLE);
    let wakeups = turns(vm)? - before;
    let figures = json!({ "wakeups": wakeups, "seconds": IDLE.as_secs() });
    let seldom = wakeups <= MOST_WAKEUPS;
    Ok(LabVerdict::with_figures(figures).check("it seldom wakes", seldom, wakeups))
}

/// The clamps after requests for the highest OPPs, and whether they are for those.
fn requested(vm: &mut Vm, device: &GuestDevice, policies: &[Policy]) -> Result<LabVerdict> {
    let mut clamps = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        // Another governor's request would take the place of these.
        set_governor(vm, vcpu, "userspace")?;
        for khz in [policy.min(), policy.max()] {
            vm.ask(format!("poke {vcpu} {} {khz}", device.set_perf(vcpu)))?;
            let util = policy.util(khz);
            clamps.push((vm.settled_clamp(vcpu, (util, util))?, util));
        }
    }
    let right = clamps.iter().all(|(clamp, util)| *clamp == (*util, *util));
    let figures = json!({ "clamps_and_wanted": clamps });
    Ok(LabVerdict::with_figures(figures).check("requests are in force", right, &clamps))
}

/// After kill -9 of the server its clamps are gone, and the next one's are there. When that ends,
/// the guest reads its maximum.
fn taken_over(
    vm: &mut Vm,
    device: &GuestDevice,
    policies: &[Policy],
    setup: Setup,
) -> Result<LabVerdict> {
    vm.kill_prefix()?;
    let free = |vm: &Vm| {
        let clamps = (0..policies.len()).map(|vcpu| vm.settled_clamp(vcpu, FREE));
        clamps.collect::<Result<Vec<_>>>()
    };
    let killed = free(vm)?;
    let server = ServeProcess::start(&setup.with(&["--pid", &vm.pid().to_string()]))?;
    let requested = requested(vm, device, policies)?;
    let said = server.stop()?;
    let after = free(vm)?;
    let read = (0..policies.len()).map(|vcpu| cur_perf(vm, device.base, vcpu));
    let read: Vec<u32> = read.collect::<Result<_>>()?;
    let most = policies.iter().map(Policy::max);
    let mut all = [&killed, &after].into_iter().flatten();
    let free = all.all(|clamp| *clamp == FREE);
    let reads_most = read.iter().copied().eq(most);
    let figures = json!({ "clamps_after": [killed, after], "said": said });
    Ok(LabVerdict::with_figures(figures)
        .part("requested", requested)
        .check("each vCPU reads the maximum", reads_most, &read)
        .check("no clamp without a server", free, [&killed, &after]))
}

/// A guest of a QEMU with this memory object.
fn own(setup: &Setup, memory: &str, policies: &[Policy]) -> Result<LabVerdict> {
    let is_huge = memory.contains("hugetlb");
    sysfs::write(HUGE, if is_huge { HUGE_PAGES } else { 0 })?;
    let mut vm = booted(setup, Some(memory))?;
    let device = GuestDevice::of(&mut vm)?;
    let row = requested(&mut vm, &device, policies)?;
    let row = row.figure("memory", memory).figure("said", vm.quit()?);
    sysfs::write(HUGE, 0)?;
    Ok(row)
}

/// A QEMU with private memory: it ends, with a line.
fn refused(setup: &Setup) -> Result<LabVerdict> {
    let mut qemu = vmm::command(setup);
    with_memory(&mut qemu, Some(PRIVATE));
    let ended = qemu.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&ended.stderr);
    let named = said.lines().filter(|line| line.contains(REFUSED)).count();
    let left = left_soon()?;
    let code = ended.status.code();
    let figures = json!({ "said": said, "left": left, "exit_code": code });
    Ok(LabVerdict::with_figures(figures)
        .check("it is named once", named == 1, &said)
        .check_eq("the exit code", &code, Some(2))
        .check_none("nothing is left", &left))
}

/// Requests at each OPP, just below and just above it, and the OPP that each is for. A clamp has 1,024
/// steps: the least request above an OPP that is another one is a step above.
fn around_each(policy: &Policy) -> Vec<(u32, u32)> {
    let next = policy.opps.iter().skip(1);
    let pairs = policy.opps.iter().zip(next.map(Some).chain([None]));
    let requests = pairs.flat_map(|(&opp, next)| {
        let above = next.map(|&next| (a_step_above(policy, opp), next));
        [(opp - 1, opp), (opp, opp)].into_iter().chain(above)
    });
    requests.collect()
}

/// The least request whose clamp is above that of `opp`.
fn a_step_above(policy: &Policy, opp: u32) -> u32 {
    let step = u64::from(policy.util(opp) + 1) * u64::from(policy.reference);
    let khz = step.div_ceil(u64::from(policy.capacity));
    u32::try_from(khz).unwrap_or(u32::MAX)
}

/// Which of a vCPU's accesses leave the guest.
pub fn accesses(vm: &mut Vm, device: &GuestDevice, policies: &[Policy]) -> Result<LabVerdict> {
    let (vcpu, policy) = last_of(policies)?;
    let opps: Vec<_> = policy.opps.iter().map(u32::to_string).collect();
    let (read, write) = (device.cur_perf(vcpu), device.set_perf(vcpu));
    let exits = Exits::watch()?;
    vm.number(format!("loads {vcpu} {read:#x} {MANY}"))?;
    vm.number(format!("stores {vcpu} {write} {MANY} {}", opps.join(" ")))?;
    let seen = exits.stop()?;
    let pages = device.base..read + PAGE;
    // The console's registers do.
    let others = seen.all().trapped;
    let none = seen.at(pages) == TracedAccesses::default();
    let figures = json!({
        "reads": MANY, "requests": MANY, "trapped_elsewhere": others,
        "of_both": seen.json(), "kvm_counts_exits": seen.counted,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("there is no doorbell", device.bell.is_none(), ())
        .check("no access leaves", none, seen.json())
        .check("KVM counts as many", seen.agrees(), seen.json())
        .check("others leave", others > 0, others))
}

#[cfg(test)]
mod tests {
    //! Promise: each OPP is requested from below, at it, and the next one from a step above.
    use super::*;

    #[test]
    fn requests_are_around_each_opp() {
        let policy = Policy {
            path: String::new(),
            cpus: vec![0],
            opps: vec![500_000, 1_000_000],
            capacity: 512,
            reference: 1_000_000,
            limit: 1_000_000,
        };
        let around = around_each(&policy);
        assert_eq!(
            around,
            [
                (499_999, 500_000),
                (500_000, 500_000),
                (501_954, 1_000_000),
                (999_999, 1_000_000),
                (1_000_000, 1_000_000),
            ]
        );
        assert_eq!(policy.util(501_953), policy.util(500_000));
        assert_eq!(policy.util(501_954), policy.util(500_000) + 1);
    }
}
