// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A real-time guest of QEMU's, behind `vcpufreq qemu --rt`: its vCPU is alone on its pCPU, and its
//! requests are in force. QEMU, its server or both are killed: then all is as it was. So it is when a
//! guest behind `rt exec` ends. What can't be is refused in one line.

use std::fs;
use std::process::Command;
use std::thread::sleep;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vcpufreq_bench::piped::threads;
use vcpufreq_host::CpuList;
use vcpufreq_tests::LabVerdict;

use super::inventory::{self, Inventory, bound_file};
use crate::harness::kernel_threads::Company;
use crate::harness::leftovers::left_soon;
use crate::harness::plan::{Plan, ask_for, set_governor};
use crate::harness::policy::Policy;
use crate::harness::rt_command::{command, succeeded};
use crate::harness::server::ServeProcess;
use crate::harness::sys::{CAP_SYS_NICE, drop_capabilities};
use crate::harness::sysfs;
use crate::harness::thread_facts::{allowed, scheduling};
use crate::harness::trace::{self, Trace};
use crate::harness::vm::{self, BOOT, SETTLED, Setup, Vm};
use crate::harness::vmm::{SOCKET, Vmm, behind, qemu_at, vcpu_name};
use crate::harness::wait::{SOON, settled};

const BOUND_US: &str = "50";
/// Priority and policy of a thread that isn't real-time.
const ORDINARY: &str = "0 0";
/// Kills of each kind.
const ROUNDS: usize = 2;
/// What `rt apply` has made for the guest.
const PARTITION: &str = "/sys/fs/cgroup/vcpufreq-rt.plc/rt";

/// The real-time vCPU's policy, both vCPUs' pCPUs, and the floor in kHz.
type GuestVcpus<'a> = (&'a Policy, [u32; 2], u32);

/// What is killed with SIGKILL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum KilledPart {
    Server,
    Qemu,
    Both,
}

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let (little, cpu) = (policies[0].cpu(), *policy.cpus.last().context("no CPU")?);
    let setup = setup(little, cpu);
    trace::off()?;
    let before = inventory::everything()?;
    let no_partition = refused(&setup, "is not set apart", &before)?;
    succeeded(&["apply", "--guest", &format!("plc={cpu}")])?;
    let applied = inventory::everything()?;
    let unlocked = Setup {
        locks_memory: false,
        ..setup.clone()
    };
    let shared = Setup {
        pins: vec![cpu.to_string(); 2],
        ..setup.clone()
    };
    let refused = [
        no_partition,
        refused(&unlocked, "-overcommit mem-lock=on", &applied)?,
        refused(&shared, "vCPU 1's alone", &applied)?,
        denied(&setup, &applied)?,
    ];
    let floor = *policy.opps.get(1).context("no second OPP")?;
    let setup = setup.with(&["--floor", &format!("1={floor}")]);
    let vcpus = (policy, [little, cpu], floor);
    let mut rounds = Vec::new();
    for killed in [KilledPart::Server, KilledPart::Qemu, KilledPart::Both].repeat(ROUNDS) {
        rounds.push(round(plan, &setup, vcpus, killed, &applied)?);
    }
    let by_serve = by_serve(plan, &setup, vcpus, &applied)?;
    let changed = inventory::changes(&applied, &inventory::everything()?);
    succeeded(&["restore"])?;
    let left = inventory::changes(&before, &inventory::everything()?);
    let by_exec = by_exec(plan, &setup, vcpus, &before)?;
    let figures = json!({ "refused": refused, "changed": changed, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .parts("rounds", rounds)
        .part("by_serve", by_serve)
        .part("by_exec", by_exec)
        .check_none("what apply set stays", &changed)
        .check_none("nothing is left", &left))
}

/// A guest of QEMU's whose second vCPU is real-time, on `cpu`.
pub(super) fn setup(little: u32, cpu: u32) -> Setup {
    let options = ["--rt", "1=fifo:1", "--resume-latency-us", BOUND_US];
    Setup {
        vmm: Vmm::Qemu,
        silent: true,
        locks_memory: true,
        ..Setup::mirroring(&[little, cpu]).with(&options)
    }
}

/// The line by which it is refused: one, exit code 2. Nothing differs from `before`.
fn refused(setup: &Setup, said: &str, before: &Inventory) -> Result<String> {
    refused_with(&mut vm::command(setup), said, before)
}

/// The same without the right to real-time policies.
fn denied(setup: &Setup, before: &Inventory) -> Result<String> {
    let mut command = vm::command(setup);
    drop_capabilities(&mut command, CAP_SYS_NICE);
    refused_with(&mut command, "the limit rtprio, which is 0", before)
}

fn refused_with(command: &mut Command, said: &str, before: &Inventory) -> Result<String> {
    let output = command.output()?;
    let changed = inventory::changes(before, &inventory::everything()?);
    let line = String::from_utf8_lossy(&output.stderr).into_owned();
    let told = line.lines().count() == 1 && line.contains(said);
    ensure!(told && output.status.code() == Some(2), "{said}: {line}");
    ensure!(changed.is_empty(), "{said}: changed {changed:?}");
    Ok(line)
}

fn round(
    plan: &Plan,
    setup: &Setup,
    (policy, [little, cpu], floor): GuestVcpus<'_>,
    killed: KilledPart,
    applied: &Inventory,
) -> Result<LabVerdict> {
    let mut vm = Vm::boot_real_time(setup)?;
    plan.load_driver(&mut vm)?;
    let clamps = in_force(&mut vm, (policy, floor))?;
    let alone = alone(&vm, &[(ORDINARY, little), ("1 1", cpu)])?;
    let mut goes_on = None;
    if killed != KilledPart::Qemu {
        vm.kill_prefix()?;
    }
    if killed == KilledPart::Server {
        goes_on = Some(as_before(&vm, cpu)?);
    }
    vm.kill()?;
    let changed = changed_soon(applied)?;
    if killed != KilledPart::Qemu {
        // What has no guardian: the record by which a server would take the VM over.
        Command::new("/bin/vcpufreq").arg("cleanup").output()?;
    }
    let mut left = left_soon()?;
    // That of `rt apply`.
    left.retain(|path| !path.contains("vcpufreq-rt."));
    let figures = json!({
        "killed": format!("{killed:?}"), "clamps": clamps, "changed": changed, "left": left,
    });
    let mut verdict = LabVerdict::with_figures(figures)
        .part("alone", alone)
        .check_none("the guardian puts all back", &changed)
        .check_none("nothing is left", &left)
        .check_eq("requests are in force", &clamps, [true, true]);
    if let Some(goes_on) = goes_on {
        verdict = verdict.part("goes_on", goes_on);
    }
    Ok(verdict)
}

/// By a server that QEMU connects to, and that ends before QEMU does.
fn by_serve(
    plan: &Plan,
    setup: &Setup,
    (policy, [little, cpu], floor): GuestVcpus<'_>,
    applied: &Inventory,
) -> Result<LabVerdict> {
    let server = ServeProcess::start(setup)?;
    let (mut vm, from_the_start) = traced_start(setup, cpu)?;
    plan.load_driver(&mut vm)?;
    let clamps = in_force(&mut vm, (policy, floor))?;
    let alone = alone(&vm, &[(ORDINARY, little), ("1 1", cpu)])?;
    let said = server.stop()?;
    let goes_on = as_before(&vm, cpu)?;
    vm.quit()?;
    let changed = changed_soon(applied)?;
    let figures = json!({ "clamps": clamps, "server_said": said });
    Ok(LabVerdict::with_figures(figures)
        .part("from_the_start", from_the_start)
        .part("alone", alone)
        .check_eq("requests are in force", &clamps, [true, true])
        .part("goes_on", goes_on)
        .check_none("all is put back", &changed))
}

/// A QEMU with a thread for I/O, and what ran on the real-time vCPU's pCPU from before its first
/// instruction until the guest's userspace.
fn traced_start(setup: &Setup, cpu: u32) -> Result<(Vm, LabVerdict)> {
    let mut qemu = qemu_at(SOCKET, setup);
    qemu.args(["-object", "iothread,id=disk"]);
    let trace = Trace::start()?;
    let mut vm = Vm::spawn(&mut qemu)?;
    vm.expect("@ready", BOOT)?;
    let seen = trace.stop()?;
    let lost = trace::lost_on(cpu)?;
    let Company { counts, strangers } = Company::of("vcpu1", cpu, &seen.switches);
    let names: Vec<String> = threads(vm.pid())?
        .into_iter()
        .map(|(_, name)| name)
        .collect();
    let has_thread = names.iter().any(|name| name == "IO disk");
    let figures = json!({ "times_switched_to": counts, "threads": names });
    let verdict = LabVerdict::with_figures(figures)
        .check("QEMU has a thread for I/O", has_thread, &names)
        .check("its vCPU runs there", counts.contains_key("vcpu1"), &counts)
        .check(
            "no other thread of QEMU's ever ran there",
            strangers.is_empty(),
            &strangers,
        )
        .check_eq("no event is lost", &lost, 0);
    Ok((vm, verdict))
}

/// Behind `rt exec`, which sets the pCPU apart before QEMU starts, and puts all back at its end.
fn by_exec(
    plan: &Plan,
    setup: &Setup,
    (policy, [little, cpu], floor): GuestVcpus<'_>,
    before: &Inventory,
) -> Result<LabVerdict> {
    let guest = vm::command(setup);
    let mut exec = command(&["exec", "--guest", &format!("plc={cpu}"), "--"]);
    let mut vm = Vm::spawn(exec.arg(guest.get_program()).args(guest.get_args()))?;
    vm.expect("@ready", BOOT)?;
    sleep(SETTLED);
    let exec = vm.program();
    let children = fs::read_to_string(format!("/proc/{exec}/task/{exec}/children"))?;
    let mut children = children.split(' ').filter_map(|pid| pid.parse().ok());
    vm.set_vmm(children.find_map(behind).context("no QEMU")?);
    plan.load_driver(&mut vm)?;
    let clamps = in_force(&mut vm, (policy, floor))?;
    let alone = alone(&vm, &[(ORDINARY, little), ("1 1", cpu)])?;
    vm.quit()?;
    let left = inventory::changes(before, &inventory::everything()?);
    let figures = json!({ "clamps": clamps, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .part("alone", alone)
        .check_eq("requests are in force", &clamps, [true, true])
        .check_none("nothing is left", &left))
}

/// Whether requests for the highest OPP and the lowest are in force on vCPU 1, which has this floor.
fn in_force(vm: &mut Vm, (policy, floor): (&Policy, u32)) -> Result<Vec<bool>> {
    set_governor(vm, 1, "userspace")?;
    let mut clamps = Vec::new();
    for khz in [policy.max(), policy.min()] {
        ask_for(vm, 1, khz)?;
        let wanted = policy.util(khz.max(floor));
        clamps.push(vm.settled_clamp(1, (wanted, 1024))? == (wanted, 1024));
    }
    Ok(clamps)
}

/// What soon after a kill isn't as `rt apply` has left it, before `cleanup` or another start.
pub(super) fn changed_soon(applied: &Inventory) -> Result<Vec<String>> {
    let changed = || Ok(inventory::changes(applied, &inventory::everything()?));
    settled(SOON, changed, Vec::is_empty)
}

/// QEMU's threads, by where they may run, how they are scheduled, and their cgroup. The vCPUs in order,
/// the real-time ones last: priority and policy, and pCPU.
pub(super) fn alone(vm: &Vm, vcpus: &[(&str, u32)]) -> Result<LabVerdict> {
    let pid = vm.pid();
    let is_real_time = |how: &str| how != ORDINARY;
    let real_time: Vec<u32> = vcpus
        .iter()
        .filter_map(|(how, cpu)| is_real_time(how).then_some(*cpu))
        .collect();
    let mut wrong = Vec::new();
    for (tid, name) in threads(pid)? {
        let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/task/{tid}/{file}"));
        let (Ok(allowed), Ok(group), Ok(stat)) = (allowed(pid, tid), of("cgroup"), of("stat"))
        else {
            // It has ended.
            continue;
        };
        let (allowed, how): (CpuList, _) = (allowed.parse()?, scheduling(&stat)?);
        let mut numbered = (0..).zip(vcpus);
        let own = numbered.find(|(vcpu, _)| vcpu_name(&name) == Some(format!("vcpu{vcpu}").into()));
        let path = group.trim_end().trim_start_matches("0::");
        let members = fs::read_to_string(format!("/sys/fs/cgroup{path}/cgroup.threads"))?;
        let is_member = members.lines().any(|member| member == tid.to_string());
        let (wanted, is_pinned) = match own {
            Some((_, (wanted, cpu))) => (*wanted, allowed.as_slice() == [*cpu]),
            None => (
                ORDINARY,
                !real_time.iter().any(|cpu| allowed.contains(*cpu)),
            ),
        };
        let part = if is_real_time(wanted) { "rt" } else { "rest" };
        let right = is_pinned
            && how == wanted
            && is_member
            && group.contains(&format!("/vcpufreq-rt.plc/{part}/"));
        if !right && of("stat").is_ok() {
            wrong.push(format!("{name} on {allowed} with {how} in {group}"));
        }
    }
    let bounds: Vec<String> = real_time
        .iter()
        .map(|cpu| sysfs::text(bound_file(*cpu)))
        .collect::<Result<_>>()?;
    let partition = sysfs::text(format!("{PARTITION}/cpuset.cpus.partition"))?;
    let status = |name| sysfs::field::<u64>(format!("/proc/{pid}/status"), name);
    let (locked, resident) = (status("VmLck")?, status("VmRSS")?);
    let bound = bounds.iter().all(|bound| bound == BOUND_US);
    let figures = json!({
        "wrong": wrong, "locked_resident_kib": [locked, resident], "bounds_us": bounds,
        "partition": partition,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("each thread is in its place", &wrong)
        .check_eq("the partition is in force", &partition, "isolated")
        .check("memory is locked", locked >= resident, (locked, resident))
        .check("latencies are bound", bound, &bounds))
}

/// Whether a QEMU whose server was killed is soon as it was before.
fn as_before(vm: &Vm, cpu: u32) -> Result<LabVerdict> {
    let pid = vm.pid();
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let look = || {
        let of_vcpu = vm.vcpu_tid(1)?;
        let group = fs::read_to_string(format!("/proc/{pid}/task/{of_vcpu}/cgroup"))?;
        let allowed: CpuList = vm.allowed(1)?.parse()?;
        Ok((vm.scheduling(1)?, group == own, allowed.contains(cpu)))
    };
    let wanted = ("0 0".to_owned(), true, false);
    let found = settled(SOON, look, |found| *found == wanted)?;
    let figures = json!({ "found": found });
    Ok(LabVerdict::with_figures(figures).check_eq("its threads are as before", &found, wanted))
}
