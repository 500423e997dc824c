// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain of libvirt's, started as docs/qemu.md says: XML with the `<shmem>` of
//! docs/examples/libvirt.xml, and the hook of docs/examples. The hook makes the device tree, and
//! starts and stops the server's socket with the domain; without options for the server libvirt
//! starts no domain. libvirt makes the vCPUs' cgroups and pins them; the server clamps those, on
//! every OPP, and puts them back. It does not complain while they are missing. No access leaves KVM for
//! userspace. A domain that is saved and restored, or migrated, has its requests again.
//!
//! By `--path ram` the same is of a domain without the device, with the `<memoryBacking>` of
//! docs/examples/libvirt-ram.xml; there no access traps into KVM, and a server that was killed is
//! followed by another.

mod daemon;
mod domain;
mod groups;
mod migration;
pub mod real_time;

use std::fs;
use std::thread::sleep;

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::host::begins;
use crate::harness::leftovers::leftovers;
use crate::harness::plan::{GuestDevice, Plan, last_of};
use crate::harness::policy::Policy;
use crate::harness::server::NO_GROUPS;
use crate::harness::vm::{BOOT, Vm};
use crate::harness::wait::{SOON, settled};
use crate::scenarios::device::driver::follows;
use crate::scenarios::device::opps::{SweepRow, sweep};
use crate::scenarios::qemu::moves::{in_force, pcpus, request};
use crate::scenarios::qemu::{accesses, ram};
use daemon::Daemon;
use domain::{LibvirtDomain, STARTED, STOPPED};
use groups::{VcpuGroup, still_clamped};

const XML: &str = "/run/lab.xml";
const SAVED: &str = "/run/lab.saved";
const PID_FILE: &str = "/run/libvirt/qemu/lab.pid";
/// Of the hook, with the options of another tree.
const OTHER_TREE: &str = "its <dtb> isn't the dtb of /etc/vcpufreq/lab.toml";
/// Of the hook, without options.
const NO_TREE: &str = "vcpufreq: domain lab: there is no /run/guest.dtb";

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let in_ram = plan.path.as_deref() == Some("ram");
    let domain = LibvirtDomain {
        name: "lab",
        pins: pcpus(&policies, false),
        pid_file: in_ram.then(|| PID_FILE.to_owned()),
    };
    domain::set_up(domain.pins.len())?;
    let (mut host, refused) = start(&domain)?;
    begins(1, 6, "the domain has booted");
    host.vm.settle(policies.len())?;
    let served = domain.states()?;
    let device = GuestDevice::of(&mut host.vm)?;
    let (last, policy) = last_of(&policies)?;
    let accesses = match in_ram {
        true => ram::accesses(&mut host.vm, &device, &policies)?,
        false => accesses(&mut host.vm, &device, last, policy)?,
    };
    plan.load_driver(&mut host.vm)?;
    begins(2, 6, "each OPP");
    let rows = each_opp(&mut host.vm, &policies)?;
    let mut groups = VcpuGroup::all(&host.vm, policies.len())?;
    let killed = in_ram.then(|| killed(&mut host.vm, &domain, &policies));
    let killed = killed.transpose().context("a killed server")?;
    begins(3, 6, "the domain is saved and restored");
    let restored = restored(&mut host, &domain, &policies, &groups)?;
    groups.extend(VcpuGroup::all(&host.vm, policies.len())?);
    begins(4, 6, "the domain is migrated");
    let migrated = migration::migrated(&mut host, &domain, &policies)?;
    begins(5, 6, "the domain has ended");
    let said = host.end()?;
    let server_said = fs::read_to_string(domain::SAID)?;
    let wrong = rows.iter().filter(|row| !row.exact()).count();
    let left = [leftovers()?, still_clamped(&groups)?].concat();
    let named = server_said.contains(NO_GROUPS);
    let wanted = if in_ram { OTHER_TREE } else { NO_TREE };
    let figures = json!({
        "refused_without_options": refused, "units": served,
        "opps_checked": rows.len(), "opps_wrong": wrong,
        "rows": rows.iter().map(SweepRow::json).collect::<Vec<_>>(),
        "left": left, "libvirt_said": said, "server_said": server_said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "without the right options it is refused",
            refused.contains(wanted),
            &refused,
        )
        .check_eq("the units have started", &served, STARTED)
        .part("accesses", accesses)
        .check_eq("no OPP is wrong", &wrong, 0)
        .parts("groups", groups.iter().map(VcpuGroup::verdict).collect())
        .parts("killed", killed.into_iter().collect())
        .part("restored", restored)
        .part("migrated", migrated)
        .check("the server finds groups", !named, &server_said)
        .check_none("nothing is left", &left))
}

/// libvirt with the domain, booted; and why the domain did not start without its options.
fn start(domain: &LibvirtDomain) -> Result<(Daemon, String)> {
    domain::write(XML, &domain.xml()?)?;
    domain.make_console()?;
    if domain.pid_file.is_some() {
        domain::write("/etc/vcpufreq/lab.toml", "dtb = '/run/other.dtb'\n")?;
    }
    let mut host = Daemon::start(domain)?;
    let refused = host.virsh(&["create", XML]);
    domain.write_options()?;
    host.virsh(&["create", XML])?;
    host.vm.expect("@ready", BOOT)?;
    host.find_qemu()?;
    let refused = refused.err().context("a domain without a server")?;
    Ok((host, refused.to_string()))
}

fn each_opp(vm: &mut Vm, policies: &[Policy]) -> Result<Vec<SweepRow>> {
    let mut rows = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        rows.extend(sweep(vm, vcpu, policy, SweepRow::exact)?);
        vm.ask("stop busy")?;
    }
    Ok(rows)
}

/// Kills the server while each vCPU requests its highest OPP: the service manager's next one has its
/// requests in force.
fn killed(vm: &mut Vm, domain: &LibvirtDomain, policies: &[Policy]) -> Result<LabVerdict> {
    request(vm, policies, Policy::max)?;
    let before = domain.service("MainPID")?;
    kill(Pid::from_raw(before.parse()?), Signal::SIGKILL)?;
    let again = || domain.service("MainPID");
    let next = settled(10 * SOON, again, |now| *now != before && now != "0")?;
    sleep(SOON);
    let in_force = in_force(vm, policies, Policy::max)?;
    let figures = json!({ "server": before, "next": next });
    Ok(LabVerdict::with_figures(figures)
        .check("another has followed", next != before && next != "0", &next)
        .part("in_force", in_force))
}

/// Saves the domain while each vCPU requests its highest OPP, and restores it. What becomes of that.
fn restored(
    host: &mut Daemon,
    domain: &LibvirtDomain,
    policies: &[Policy],
    groups: &[VcpuGroup],
) -> Result<LabVerdict> {
    request(&mut host.vm, policies, Policy::max)?;
    host.virsh(&["save", domain.name, SAVED])?;
    let left = settled(10 * SOON, || still_clamped(groups), Vec::is_empty)?;
    let saved = settled(10 * SOON, || domain.states(), |now| now == STOPPED)?;
    host.virsh(&["restore", SAVED])?;
    fs::remove_file(SAVED)?;
    host.find_qemu()?;
    let again = settled(10 * SOON, || domain.states(), |now| now == STARTED)?;
    sleep(SOON);
    let in_force = in_force(&host.vm, policies, Policy::max)?;
    let follows = follows(&mut host.vm, policies).map_err(|error| format!("{error:#}"));
    let figures = json!({
        "follows": follows.as_ref().err(), "units_while_saved": saved, "units_after": again,
        "left_while_saved": left,
    });
    Ok(LabVerdict::with_figures(figures)
        .part("in_force", in_force)
        .check("the host follows", follows.is_ok(), follows.err())
        .check_none("nothing is left while it is saved", &left)
        .check_eq("the units stop", &saved, STOPPED)
        .check_eq("they start again", &again, STARTED))
}
