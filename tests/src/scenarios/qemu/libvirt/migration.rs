// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Live migration to another libvirt, with its own server, which the hook starts there. libvirt
//! moves no domain within one host: the other one has a name, a number and a state of its own.

use std::fs;
use std::process::Command;
use std::thread::sleep;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::daemon::Daemon;
use super::domain::{self, LibvirtDomain, STARTED, STOPPED};
use super::groups::{VcpuGroup, still_clamped};
use crate::harness::policy::Policy;
use crate::harness::wait::{SOON, settled};
use crate::scenarios::device::driver::follows;
use crate::scenarios::qemu::moves::{in_force, pcpus, request};

const XML: &str = "/run/moved.xml";

/// Moves the domain while each vCPU requests its highest OPP. What becomes of that, until its end.
pub fn migrated(
    source: &mut Daemon,
    from: &LibvirtDomain,
    policies: &[Policy],
) -> Result<LabVerdict> {
    let to = LibvirtDomain {
        name: "moved",
        pins: pcpus(policies, true),
        pid_file: None,
    };
    to.make_console()?;
    let mut target = Daemon::start_elsewhere(&to)?;
    let to = LibvirtDomain {
        pid_file: match from.pid_file {
            Some(_) => Some(target.pid_file(to.name)?),
            None => None,
        },
        ..to
    };
    to.write_options()?;
    request(&mut source.vm, policies, Policy::max)?;
    let groups = VcpuGroup::all(&source.vm, policies.len())?;
    migrate(source, from, &target, &to)?;
    sleep(SOON);
    let there = groups.iter().filter(|group| group.exists());
    let left_there: Vec<Value> = there.map(|group| group.verdict().json()).collect();
    let units = [
        settled(10 * SOON, || from.states(), |now| now == STOPPED)?,
        settled(10 * SOON, || to.states(), |now| now == STARTED)?,
    ];
    target.find_qemu()?;
    let in_force = in_force(&target.vm, policies, Policy::max)?;
    let moved = VcpuGroup::all(&target.vm, policies.len())?;
    let follows = follows(&mut target.vm, policies).map_err(|error| format!("{error:#}"));
    target.power_off()?;
    let ended = settled(10 * SOON, || to.states(), |now| now == STOPPED)?;
    // Both have groups above them in common.
    let clamped = || Ok([still_clamped(&groups)?, still_clamped(&moved)?].concat());
    let left = settled(10 * SOON, clamped, Vec::is_empty)?;
    let said = target.end()?;
    let figures = json!({
        "follows": follows.as_ref().err(), "units": units, "units_after_end": ended,
        "left_at_source": left_there, "left": left, "libvirt_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .part("in_force", in_force)
        .check("the host follows", follows.is_ok(), follows.err())
        .parts("groups", moved.iter().map(VcpuGroup::verdict).collect())
        .check(
            "the source's units have stopped",
            units[0] == STOPPED,
            &units,
        )
        .check("the target's have started", units[1] == STARTED, &units)
        .check_eq("they end", &ended, STOPPED)
        .check_none("no group is left at the source", &left_there)
        .check_none("no group is left clamped", &left))
}

fn migrate(
    source: &Daemon,
    from: &LibvirtDomain,
    target: &Daemon,
    to: &LibvirtDomain,
) -> Result<()> {
    let mut loopback = Command::new("/bin/busybox");
    let status = loopback.args(["ifconfig", "lo", "up"]).status()?;
    ensure!(status.success(), "no loopback interface");
    // As on the other host: it has its own console, server and pCPUs.
    let mut xml = source.virsh(&["dumpxml", "--migratable", from.name])?;
    let mut changes = vec![(from.console(), to.console())];
    if from.pid_file.is_none() {
        changes.push((from.server(), to.server()));
    }
    for (vcpu, (old, new)) in from.pins.iter().zip(&to.pins).enumerate() {
        changes.push((
            LibvirtDomain::pin(vcpu, *old),
            LibvirtDomain::pin(vcpu, *new),
        ));
    }
    for (old, new) in changes {
        ensure!(xml.contains(&old), "no {old} in {xml}");
        xml = xml.replace(&old, &new);
    }
    domain::write(XML, &xml)?;
    let words = [
        "migrate",
        "--live",
        from.name,
        &target.uri(),
        "--dname",
        to.name,
    ];
    source.virsh(
        &[
            &words[..],
            &["--migrateuri", "tcp://127.0.0.1", "--xml", XML],
        ]
        .concat(),
    )?;
    fs::remove_file(XML)?;
    Ok(())
}
