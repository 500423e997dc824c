// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain of libvirt's with a real-time vCPU, as the files of docs/examples have it: its XML, its
//! server's options, and the host that the hook prepares. libvirt pins and schedules the vCPU and
//! keeps other threads off its pCPU. The server takes that over, and leaves it as it was. The domain
//! starts, is saved and restored, and ends. The host's settings are as before while it does not run.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use vcpufreq_bench::piped::threads;
use vcpufreq_host::CpuList;
use vcpufreq_tests::LabVerdict;

use super::daemon::Daemon;
use super::domain::{self, LibvirtDomain, STARTED, STOPPED, TREE, shmem, write};
use super::groups::{VcpuGroup, still_clamped};
use crate::harness::host::begins;
use crate::harness::leftovers::left_soon;
use crate::harness::plan::{Plan, ask_for, set_governor};
use crate::harness::policy::Policy;
use crate::harness::rt_command::RECORD;
use crate::harness::sysfs;
use crate::harness::systemctl::systemctl;
use crate::harness::thread_facts::allowed;
use crate::harness::vm::{BOOT, Vm};
use crate::harness::vmm::{CMDLINE, INITRD, KERNEL, QEMU, vcpu_name};
use crate::harness::wait::{SOON, settled};
use crate::scenarios::rt::inventory::{self, Inventory, bound_file};

const EXAMPLE: &str = include_str!("../../../../../docs/examples/libvirt-rt.xml");
const OPTIONS: &str = include_str!("../../../../../docs/examples/serve-rt.toml");
const HOST: &str = include_str!("../../../../../docs/examples/rt.toml");
const HOST_FILE: &str = "/etc/vcpufreq-rt.toml";
const XML: &str = "/run/lab.xml";
const SAVED: &str = "/run/lab.saved";
const SERVICE: &str = "vcpufreq-serve@lab.service";
/// Of the examples: each vCPU's pCPU, the bound of that of the real-time one, and its floor.
const PINS: [u32; 2] = [1, 3];
const BOUND_US: &str = "50";
const FLOOR_KHZ: u32 = 1_200_000;
/// Of both vCPUs: priority and policy, as libvirt sets them.
const SCHEDULING: [&str; 2] = ["0 0", "1 1"];
const MEM_MIB: u64 = 256;
const HUGE_PAGES: &str = "/dev/hugepages";
/// Of systemd and libvirt. libvirt switches the cpuset controller on, and keeps it on.
const OF_OTHERS: [&str; 4] = [
    "/sys/fs/cgroup/cgroup.subtree_control",
    "/sys/fs/cgroup/init.scope",
    "/sys/fs/cgroup/machine",
    "/sys/fs/cgroup/system.slice",
];

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let domain = LibvirtDomain {
        name: "lab",
        pins: PINS.to_vec(),
        pid_file: None,
    };
    set_up(&domain)?;
    let mut host = Daemon::start(&domain)?;
    let before = inventory::everything()?;
    begins(1, 5, "the domain boots");
    start(&mut host).with_context(server_said)?;
    let served = domain.states()?;
    let doctor = doctor()?;
    plan.load_driver(&mut host.vm)?;
    set_governor(&mut host.vm, 1, "userspace")?;
    let started = in_force(&mut host.vm, policy)?;
    let mut groups = VcpuGroup::all(&host.vm, PINS.len())?;
    begins(2, 5, "its server ends, and another takes it over");
    let unserved = unserved(&host.vm)?;
    let taken_over = in_force(&mut host.vm, policy)?;
    begins(3, 5, "the domain is saved and restored");
    let restored = restored(&mut host, &domain, policy, &before)?;
    groups.extend(VcpuGroup::all(&host.vm, PINS.len())?);
    begins(4, 5, "the domain ends");
    host.power_off()?;
    let ended = settled(10 * SOON, || domain.states(), |now| now == STOPPED)?;
    let changed = settled(10 * SOON, || changes(&before), Vec::is_empty)?;
    let said = host.end()?;
    let left = [left_soon()?, still_clamped(&groups)?].concat();
    let figures = json!({
        "units": served, "doctor": doctor, "units_after_end": ended,
        "changed": changed, "left": left, "libvirt_said": said, "server_said": server_said(),
    });
    let blockers = doctor["said"]
        .as_str()
        .unwrap_or("BLOCKER")
        .matches("BLOCKER");
    let blockers = blockers.count();
    Ok(LabVerdict::with_figures(figures)
        .check_eq("the units have started", &served, STARTED)
        .check_eq("doctor finds nothing in the way", &blockers, 0)
        .check_eq("they end", &ended, STOPPED)
        .part("started", started)
        .part("unserved", unserved)
        .part("taken_over", taken_over)
        .part("restored", restored)
        .check_none("the host is as before", &changed)
        .check_none("nothing is left", &left))
}

/// What a user has put on the host before the first domain starts.
fn set_up(domain: &LibvirtDomain) -> Result<()> {
    domain::set_up(PINS.len())?;
    domain.make_console()?;
    write(XML, &xml(domain)?)?;
    write("/etc/vcpufreq/lab.toml", OPTIONS)?;
    write(HOST_FILE, HOST)?;
    sysfs::write("/proc/sys/vm/nr_hugepages", MEM_MIB / 2)?;
    fs::create_dir_all(HUGE_PAGES)?;
    let (none, flags) = (None::<&str>, MsFlags::empty());
    mount(none, HUGE_PAGES, Some("hugetlbfs"), flags, none)?;
    Ok(())
}

/// The example, with what a guest of the lab needs.
fn xml(domain: &LibvirtDomain) -> Result<String> {
    let (name, console) = (domain.name, domain.console());
    let mut xml = EXAMPLE.replace("NAME", name);
    ensure!(xml.contains(shmem(name, PINS.len())?.trim()), "{xml}");
    let memory = format!("</name>\n  <memory unit='MiB'>{MEM_MIB}</memory>");
    let boot = format!(
        "<kernel>{KERNEL}</kernel><initrd>{INITRD}</initrd>
    <cmdline>console=ttyAMA0 {CMDLINE}</cmdline>
    <dtb>{TREE}</dtb>"
    );
    let devices = format!(
        "<devices>
    <emulator>{QEMU}</emulator>
    <controller type='usb' model='none'/>
    <serial type='pipe'><source path='{console}'/></serial>"
    );
    for (of_example, here) in [
        ("</name>", &*memory),
        ("<dtb>/var/lib/libvirt/guest.dtb</dtb>", &boot),
        ("<features>", "<features><gic version='3'/>"),
        ("<devices>", &devices),
    ] {
        let times = xml.matches(of_example).count();
        ensure!(times == 1, "{of_example}: {times} in the example");
        xml = xml.replace(of_example, here);
    }
    Ok(xml)
}

fn start(host: &mut Daemon) -> Result<()> {
    host.virsh(&["create", XML])?;
    host.vm.expect("@ready", BOOT)?;
    host.find_qemu()
}

/// What the servers have printed.
fn server_said() -> String {
    fs::read_to_string(domain::SAID).unwrap_or_default()
}

/// Of the domain, as its user asks before it is in use.
fn doctor() -> Result<Value> {
    let mut doctor = Command::new("/bin/vcpufreq");
    let ran = doctor.args(["doctor", "--domain", "lab"]).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(json!({
        "code": ran.status.code(), "said": text(&ran.stdout), "errors": text(&ran.stderr),
    }))
}

/// Threads, memory and host of a domain that is served, and clamps of requests.
fn in_force(vm: &mut Vm, policy: &Policy) -> Result<LabVerdict> {
    let mut clamps = Vec::new();
    let mut exact = true;
    for khz in [policy.max(), policy.min()] {
        ask_for(vm, 1, khz)?;
        let wanted = (policy.util(khz.max(FLOOR_KHZ)), 1024);
        clamps.push(vm.settled_clamp(1, wanted)?);
        exact &= clamps.last() == Some(&wanted);
    }
    let as_libvirt_has_it = as_libvirt_has_it(vm)?;
    let bound = sysfs::text(bound_file(PINS[1]))?;
    let prepared = fs::exists(RECORD)?;
    let figures = json!({ "clamps": clamps, "bound_us": bound, "host_prepared": prepared });
    Ok(LabVerdict::with_figures(figures)
        .check("clamps are exact", exact, &clamps)
        .part("as_libvirt_has_it", as_libvirt_has_it)
        .check_eq("the pCPU's latency is bound", &bound, BOUND_US)
        .check("the host is prepared", prepared, ()))
}

/// Whether each thread runs where libvirt has put it, and as it has scheduled it; memory is locked.
fn as_libvirt_has_it(vm: &Vm) -> Result<LabVerdict> {
    let pid = vm.pid();
    let mut wrong = Vec::new();
    for (tid, name) in threads(pid)? {
        let list: CpuList = allowed(pid, tid)?.parse()?;
        let mut vcpus = (0..).zip(PINS);
        let own = vcpus.find(|(vcpu, _)| vcpu_name(&name) == Some(format!("vcpu{vcpu}").into()));
        let right = match own {
            Some((_, cpu)) => list.as_slice() == [cpu],
            None => !list.contains(PINS[1]),
        };
        if !right {
            wrong.push(format!("{name} on {list}"));
        }
    }
    let scheduling = [vm.scheduling(0)?, vm.scheduling(1)?];
    let status = |name| sysfs::field::<u64>(format!("/proc/{pid}/status"), name);
    let (locked, there) = (status("VmLck")?, status("VmRSS")?);
    let huge = status("HugetlbPages")?;
    let figures = json!({
        "wrong": wrong, "priorities_and_policies": scheduling,
        "locked_resident_huge_kib": [locked, there, huge],
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("each thread is on its CPU", &wrong)
        .check_eq("vCPUs are scheduled as written", &scheduling, SCHEDULING)
        .check("memory is locked", locked >= there, (locked, there))
        .check_eq("memory is huge pages", &huge, MEM_MIB * 1024))
}

/// What is left of a server that has ended while the domain runs; then there is another.
fn unserved(vm: &Vm) -> Result<LabVerdict> {
    systemctl(&["stop", SERVICE])?;
    let found = as_libvirt_has_it(vm)?;
    let bound = sysfs::text(bound_file(PINS[1]))?;
    systemctl(&["start", SERVICE])?;
    let figures = json!({ "bound_us": bound });
    Ok(LabVerdict::with_figures(figures)
        .part("as_libvirt_has_it", found)
        .check("the pCPU's latency is free", bound != BOUND_US, &bound))
}

/// Saves the domain while the real-time vCPU requests its highest OPP, and restores it. The host is as
/// before in between.
fn restored(
    host: &mut Daemon,
    domain: &LibvirtDomain,
    policy: &Policy,
    before: &Inventory,
) -> Result<LabVerdict> {
    ask_for(&mut host.vm, 1, policy.max())?;
    host.virsh(&["save", domain.name, SAVED])?;
    let saved = settled(10 * SOON, || domain.states(), |now| now == STOPPED)?;
    let changed = settled(10 * SOON, || changes(before), Vec::is_empty)?;
    host.virsh(&["restore", SAVED]).with_context(server_said)?;
    fs::remove_file(SAVED)?;
    host.find_qemu()?;
    let again = settled(10 * SOON, || domain.states(), |now| now == STARTED)?;
    let wanted = (policy.util(policy.max()), 1024);
    let requested = host.vm.settled_clamp(1, wanted)?;
    let in_force = in_force(&mut host.vm, policy)?;
    let figures = json!({
        "units_while_saved": saved, "changed_while_saved": changed,
        "units_after": again, "requested": requested,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("the units stop", &saved, STOPPED)
        .check_none("the host is as before while it is saved", &changed)
        .check_eq("they start again", &again, STARTED)
        .check_eq("the request is in force", &requested, wanted)
        .part("in_force", in_force))
}

/// Settings that differ from before.
fn changes(before: &Inventory) -> Result<Vec<String>> {
    let mut changed = inventory::changes(before, &inventory::everything()?);
    changed.retain(|path| !OF_OTHERS.iter().any(|group| path.starts_with(group)));
    Ok(changed)
}
