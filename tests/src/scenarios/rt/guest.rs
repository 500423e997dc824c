// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq run --rt`, or `vcpufreq qemu --rt`, on a real RT kernel. Real-time vCPUs are alone on their pCPUs. Their
//! requests move the frequency, never below the floor. Nothing is left when the VMM is killed.
//!
//! While a vCPU sleeps, the frequency is that of the other pCPUs of its policy. So the last pCPU has a
//! policy of its own (topology 4+3+1), or a guest of QEMU's has one real-time vCPU there, and the
//! policy's other CPU is set apart, too (2+2).

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::piped::threads;
use vcpufreq_host::CpuList;
use vcpufreq_tests::LabVerdict;

use super::changes::{self, RtVcpu};
use super::inventory::{self, Inventory, bound_file};
use super::order;
use super::pages;
use super::served;
use crate::harness::dips::CHANGES;
use crate::harness::frequency::vcpu_runs_at;
use crate::harness::plan::{Plan, ask_for, let_load_decay, set_governor};
use crate::harness::policy::Policy;
use crate::harness::rt_command::{ended, succeeded};
use crate::harness::sysfs;
use crate::harness::thread_facts::allowed;
use crate::harness::trace;
use crate::harness::uclamp::RT_DEFAULT;
use crate::harness::vm::{self, Setup, Vm};
use crate::harness::vmm::Vmm;

/// Times that a load is begun, at most, until the pCPU runs at what was asked for.
const LOADS: usize = 5;
const BOUND_US: &str = "50";
const HUGE_MIB: u64 = 256;
const PROFILE: &str = "/run/deadline.toml";
/// A load of 40 % on vCPU 1. While the vCPU sleeps, another pCPU's look at the blocked load lets the
/// frequency fall, 4 ms after and later: with a lighter load that is most of a period. With a load
/// of 50 % the lowest two OPPs are both stable: at the second the utilization of a busy time, and a
/// quarter, is above the lowest, so that the frequency stays where a kernel thread has put it.
pub(super) const PERIODIC: &str = "busy periodic 1 20000 8000";
/// The bridge's threads, and the one that writes `--events`.
const OF_THE_BRIDGE: [&str; 3] = ["requests", "maintenance", "events"];

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let [.., shared, big] = &policies[..] else {
        bail!("fewer than two policies; use the topology 4+3+1");
    };
    let little = policies[0].cpu();
    if let [beside, cpu] = big.cpus[..] {
        ensure!(plan.vmm == Vmm::Qemu, "without QEMU use the topology 4+3+1");
        trace::off()?;
        let before = inventory::everything()?;
        let vcpus = [RtVcpu::new(1, cpu, big)];
        return of_qemu(plan, &before, little, (&vcpus, &[beside, cpu]));
    }
    let cpu = big.cpu();
    ensure!(
        big.cpus == [cpu],
        "CPU {cpu} shares its policy with two or more; use the topology 4+3+1"
    );
    let beside = *shared.cpus.last().context("no CPU")?;
    // On a CPU with a policy of its own schedutil holds the frequency while the vCPU is busy. A dip
    // shows on the other CPU: the SCHED_RR vCPU's, or by `ioeventfd` the SCHED_FIFO one's.
    let both = [RtVcpu::new(1, cpu, big), RtVcpu::new(2, beside, shared)];
    let swapped = [RtVcpu::new(1, beside, shared), RtVcpu::new(2, cpu, big)];
    trace::off()?;
    let before = inventory::everything()?;
    if plan.vmm == Vmm::Qemu {
        return of_qemu(plan, &before, little, (&both, &[beside, cpu]));
    }
    let interleaved = order::run((little, cpu))?;
    succeeded(&["apply", "--guest", &format!("plc={beside},{cpu}")])?;
    let floor = *big.opps.get(1).context("no second OPP")?;
    // Before anything has bound the VMM's threads, as looks at the frequency do.
    let by_kernel = by_kernel(plan, little, &swapped)?;
    let mut vm = rt_guest(plan, little, &both)?;
    let alone = alone(plan, &vm, &both)?;
    let rows = requests(&mut vm, big, floor)?;
    let changes = changes::traced(&mut vm, &both)?;
    let refused = second_guest(cpu)?;
    let others_refused = order::others((beside, cpu))?;
    let occupied = ended(&["restore"], 2).is_ok();
    vm.kill()?;
    sleep(Duration::from_secs(1));
    let bound = sysfs::text(bound_file(cpu))?;
    succeeded(&["restore"])?;
    let left = inventory::changes(&before, &inventory::everything()?);
    let others = other_policies(plan, little, cpu)?;
    let gib_page = pages::gib_page(plan, cpu)?;
    let left_after = inventory::changes(&before, &inventory::everything()?);
    let figures = json!({
        "requests": rows, "second_guest_refused": refused,
        "restore_refused_while_it_ran": occupied,
        "bound_after_kill": bound, "left": left, "left_after_them": left_after,
    });
    Ok(LabVerdict::with_figures(figures)
        .part("by_kernel", by_kernel)
        .part("alone", alone)
        .part("changes", changes)
        .part("interleaved", interleaved)
        .part("others_refused", others_refused)
        .part("other_policies", others)
        .part("gib_page", gib_page)
        .check_rows("each request", &rows)
        .check("a second guest is refused", refused, ())
        .check("restore is refused while it runs", occupied, ())
        .check_eq("the latency is free after a kill", &bound, "0")
        .check_none("nothing is left", &left)
        .check_none("nothing is left after the others", &left_after))
}

/// What a guest of QEMU's has in common with that; scenario `rt-qemu` has what it is refused, and kills
/// of its server.
fn of_qemu(
    plan: &Plan,
    before: &Inventory,
    little: u32,
    (vcpus, set_apart): (&[RtVcpu], &[u32; 2]),
) -> Result<LabVerdict> {
    let fifo = vcpus.first().context("no real-time vCPU")?;
    let [first, second] = set_apart;
    succeeded(&["apply", "--guest", &format!("plc={first},{second}")])?;
    let floor = *fifo.policy.opps.get(1).context("no second OPP")?;
    let mut vm = rt_guest(plan, little, vcpus)?;
    let scheduled = ["1 1", "2 2"].into_iter().zip(vcpus);
    let scheduled = scheduled.map(|(how, one)| (how, one.cpu));
    let all: Vec<_> = std::iter::once(("0 0", little)).chain(scheduled).collect();
    let alone = served::alone(&vm, &all)?;
    let rows = requests(&mut vm, fifo.policy, floor)?;
    let changes = changes::traced(&mut vm, vcpus)?;
    vm.quit()?;
    succeeded(&["restore"])?;
    let deadline = deadline(plan, little, fifo.cpu)?;
    let left = inventory::changes(before, &inventory::everything()?);
    let figures = json!({ "requests": rows, "left": left });
    let seldom = irq_work_is_seldom(&changes)?;
    Ok(LabVerdict::with_figures(figures)
        .part("irq_work", seldom)
        .part("alone", alone)
        .check_rows("each request", &rows)
        .part("changes", changes)
        .part("deadline", deadline)
        .check_none("nothing is left", &left))
}

/// A housekeeping vCPU on `little`, a SCHED_FIFO one whose floor is the second OPP, and a SCHED_RR
/// one, if there are two.
fn rt_guest(plan: &Plan, little: u32, vcpus: &[RtVcpu]) -> Result<Vm> {
    let fifo = vcpus.first().context("no real-time vCPU")?;
    let floor = format!("1={}", fifo.policy.opps.get(1).context("no second OPP")?);
    let mut options = vec!["--resume-latency-us", BOUND_US, "--floor", &floor];
    for policy in ["1=fifo:1", "2=rr:2"].into_iter().take(vcpus.len()) {
        options.extend(["--rt", policy]);
    }
    let cpus = std::iter::once(little).chain(vcpus.iter().map(|one| one.cpu));
    let setup = plan.real_time(&cpus.collect::<Vec<_>>()).with(&options);
    boot(plan, &setup)
}

/// The same guest by the path `ioeventfd`, whose worker puts each request into force, from elsewhere.
fn by_kernel(plan: &Plan, little: u32, vcpus: &[RtVcpu; 2]) -> Result<LabVerdict> {
    let plan = Plan {
        driver: plan.driver.clone(),
        path: Some("ioeventfd".to_owned()),
        vmm: Vmm::Vcpufreq,
        protected: false,
    };
    let mut vm = rt_guest(&plan, little, vcpus)?;
    let alone = alone(&plan, &vm, vcpus)?;
    let changes = changes::traced(&mut vm, vcpus)?;
    vm.quit()?;
    let seldom = irq_work_is_seldom(&changes)?;
    let by = &changes.get("worker")["path"];
    Ok(LabVerdict::default()
        .part("irq_work", seldom)
        .check_eq("by ioeventfd", &by, "ioeventfd")
        .part("alone", alone)
        .part("changes", changes))
}

/// It would run for each change of the frequency if these woke the worker.
fn irq_work_is_seldom(changes: &LabVerdict) -> Result<LabVerdict> {
    let seldom = |row: &Value| row["runs_of_irq_work"].as_u64() < Some(CHANGES as u64 / 2);
    let rows = changes.get("vcpus").as_array().context("no vCPUs")?;
    Ok(LabVerdict::default().check("irq_work seldom runs", rows.iter().all(seldom), rows))
}

/// Boots, and loads the driver.
pub(super) fn boot(plan: &Plan, setup: &Setup) -> Result<Vm> {
    let mut vm = Vm::boot_real_time(setup)?;
    plan.load_driver(&mut vm)?;
    Ok(vm)
}

/// Only the vCPUs' threads may run on their pCPUs, and these threads only there.
fn alone(plan: &Plan, vm: &Vm, vcpus: &[RtVcpu; 2]) -> Result<LabVerdict> {
    let mut intruders = Vec::new();
    let mut of_vcpus = Vec::new();
    let threads = threads(vm.pid())?;
    let names: Vec<&str> = threads.iter().map(|(_, name)| name.as_str()).collect();
    // Or there was nothing to keep off.
    let by_exit = plan.path.as_deref() == Some("exit");
    let mut bridges = OF_THE_BRIDGE.iter().skip(usize::from(by_exit));
    let bridges = bridges.all(|name| names.contains(name));
    for (tid, name) in &threads {
        let allowed: CpuList = allowed(vm.pid(), *tid)?.parse()?;
        if let Some(one) = vcpus.iter().find(|one| *name == one.name()) {
            of_vcpus.push((allowed.as_slice() == [one.cpu], allowed.to_string()));
        } else if vcpus.iter().any(|one| allowed.contains(one.cpu)) {
            intruders.push(format!("{name} on {allowed}"));
        }
    }
    let scheduling: Vec<String> = (0..=2)
        .map(|vcpu| vm.scheduling(vcpu))
        .collect::<Result<_>>()?;
    let locked: u64 = sysfs::field(format!("/proc/{}/status", vm.pid()), "VmLck")?;
    let bounds = [vcpus[0].cpu, vcpus[1].cpu, 0].map(|cpu| sysfs::text(bound_file(cpu)));
    let bounds = bounds.into_iter().collect::<Result<Vec<_>>>()?;
    let each_on_its_own = of_vcpus.iter().all(|(right, _)| *right);
    let figures = json!({
        "threads": names, "other_threads_there": intruders,
        "vcpus_allowed_on": of_vcpus, "priorities_and_policies": scheduling, "locked_kib": locked,
        "bounds_us": bounds,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no other thread may run there", &intruders)
        .check("the bridge has its threads", bridges, &names)
        .check("both vCPUs are found", of_vcpus.len() == 2, &of_vcpus)
        .check("each on its pCPU alone", each_on_its_own, &of_vcpus)
        .check_eq("scheduled as written", &scheduling, ["0 0", "1 1", "2 2"])
        .check("memory is locked", locked >= HUGE_MIB * 1024, locked)
        .check_eq("latencies are bound", &bounds, [BOUND_US, BOUND_US, "0"]))
}

/// Asks for a frequency, starts [`PERIODIC`] when the last one's load has decayed, and looks at what
/// the pCPU runs at, after `settle`. The load is busy for a fixed time, so that its utilization
/// grows with the frequency: after a higher OPP it could stay above the request. A kernel thread
/// that has run there meanwhile may have raised the frequency, which schedutil holds until the CPU
/// idles. So the load is restarted a few times, until the frequency is as `wanted`. All that it ran
/// at; the load goes on.
pub(super) fn runs_under_load(
    (vm, policy): (&mut Vm, &Policy),
    (khz, wanted): (u32, u32),
    settle: impl Fn(),
) -> Result<Vec<u32>> {
    let mut ran_at = Vec::new();
    loop {
        ask_for(vm, 1, khz)?;
        let_load_decay();
        vm.ask(format!("start {PERIODIC}"))?;
        settle();
        let runs_at = vcpu_runs_at(policy, vm, wanted)?;
        ran_at.push(runs_at);
        if runs_at == wanted || ran_at.len() == LOADS {
            return Ok(ran_at);
        }
        vm.ask("stop busy")?;
    }
}

/// Each OPP up and down: the clamp is the request's or the floor's, and so is the frequency of a
/// vCPU whose load alone needs less.
fn requests(vm: &mut Vm, policy: &Policy, floor: u32) -> Result<Vec<Value>> {
    set_governor(vm, 1, "userspace")?;
    let mut rows = Vec::new();
    for &khz in policy.opps.iter().chain(policy.opps.iter().rev()) {
        let wanted = khz.max(floor);
        let ran_at = runs_under_load((&mut *vm, policy), (khz, wanted), || ())?;
        let (min, _) = vm.clamp(1)?;
        vm.ask("stop busy")?;
        let right = min == policy.util(wanted) && ran_at.last() == Some(&wanted);
        rows.push(json!({
            "asked_khz": khz, "uclamp_min": min, "ran_at_khz": ran_at, "right": right,
        }));
    }
    Ok(rows)
}

/// Another guest on the same pCPU: one line, exit code 2.
fn second_guest(cpu: u32) -> Result<bool> {
    let setup = Setup {
        silent: true,
        ..Setup::mirroring(&[cpu]).with(&["--rt", "0=fifo:1"])
    };
    let output = vm::command(&setup).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let told = said.lines().count() == 1 && said.contains("already");
    ensure!(told, "a second guest: {said}");
    Ok(output.status.code() == Some(2))
}

/// RR with huge pages, and DEADLINE, whose requests don't apply.
fn other_policies(plan: &Plan, little: u32, cpu: u32) -> Result<LabVerdict> {
    let rr = round_robin(plan, little, cpu)?;
    let deadline = deadline(plan, little, cpu)?;
    Ok(LabVerdict::default()
        .part("rr", rr)
        .part("deadline", deadline))
}

/// Without a partition, and with the kernel's own default for real-time threads: the clamp follows
/// each request, up and down, and before the first there is none.
fn round_robin(plan: &Plan, little: u32, cpu: u32) -> Result<LabVerdict> {
    let pages = "/proc/sys/vm/nr_hugepages";
    let before = sysfs::text(pages)?;
    sysfs::write(pages, HUGE_MIB / 2)?;
    let rt_default = sysfs::text(RT_DEFAULT)?;
    sysfs::write(RT_DEFAULT, 1024)?;
    let options = ["--rt", "1=rr:2", "--hugepages", "2M"];
    let mut vm = Vm::boot_real_time(&plan.mirroring(&[little, cpu]).with(&options))?;
    let at_start = vm.clamp(1)?.0;
    plan.load_driver(&mut vm)?;
    let scheduling = vm.scheduling(1)?;
    let free = huge_pages_free()?;
    set_governor(&mut vm, 1, "userspace")?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let mut clamps = Vec::new();
    for khz in [policy.min(), policy.max(), policy.min()] {
        ask_for(&mut vm, 1, khz)?;
        clamps.push((policy.util(khz), vm.clamp(1)?.0));
    }
    vm.quit()?;
    sysfs::write(pages, before)?;
    sysfs::write(RT_DEFAULT, rt_default)?;
    let right = clamps.iter().all(|(asked, clamp)| asked == clamp);
    let figures = json!({
        "priority_and_policy": scheduling, "clamp_at_start": at_start,
        "huge_pages_free": free, "asked_and_clamp": clamps,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("scheduled as written", &scheduling, "2 2")
        .check_eq("memory is huge pages", &free, 0)
        .check_eq("no clamp at the start", &at_start, 0)
        .check("requests are in force", right, &clamps))
}

/// With admission control as it is: in a partition of its own pCPU, and refused without one. A
/// guest of QEMU's has to have one, whatever its real-time policy.
fn deadline(plan: &Plan, little: u32, cpu: u32) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let own = policies.iter().find(|policy| policy.cpus.contains(&cpu));
    // Of a small CPU the kernel gives out as much less as its capacity is less.
    let runtime_us = 8000 * own.context("no such CPU")?.capacity / 1024;
    let policy = format!("1=deadline:{runtime_us}/10000");
    let setup = plan.real_time(&[little, cpu]).with(&["--rt", &policy]);
    let why = match plan.vmm {
        Vmm::Qemu => "is not set apart",
        Vmm::Vcpufreq | Vmm::Crosvm => "root domain",
    };
    let alone = Setup {
        silent: true,
        ..setup.clone()
    };
    let refused = vm::command(&alone).output()?;
    let refused =
        refused.status.code() == Some(2) && String::from_utf8_lossy(&refused.stderr).contains(why);
    std::fs::write(PROFILE, "[settings]\ncpuset = 'root'\n")?;
    succeeded(&[
        "apply",
        "--profile",
        PROFILE,
        "--guest",
        &format!("plc={cpu}"),
    ])?;
    let mut vm = boot(plan, &setup)?;
    let scheduling = vm.scheduling(1)?;
    set_governor(&mut vm, 1, "userspace")?;
    ask_for(&mut vm, 1, policies.last().context("no policy")?.min())?;
    let said = vm.quit()?;
    succeeded(&["restore"])?;
    let counted = said.contains("not applicable") && !said.contains("not applicable 0");
    let figures = json!({
        "refused_without_partition": refused,
        "priority_and_policy": scheduling, "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("refused without a partition", refused, ())
        .check_eq("scheduled as written", &scheduling, "0 6")
        .check("requests aren't applicable", counted, &said))
}

fn huge_pages_free() -> Result<u64> {
    sysfs::field("/proc/meminfo", "HugePages_Free")
}
