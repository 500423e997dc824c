// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that is loaded from a snapshot, and one that is migrated to another QEMU. Its last
//! request is in force within 1 s, though no doorbell rings. The last requests of the QEMU that it
//! has left hold up no frequency while that is paused, and end with it. A server that hears that QEMU
//! at its control socket withdraws them. With the registers in the guest's RAM, which moves with it, a
//! guest that comes to a host with other OPPs is named.

use std::thread::sleep;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::control::FREE;
use crate::harness::leftovers::{left_soon, leftovers};
use crate::harness::plan::{GuestDevice, Plan, ask_for, set_governor};
use crate::harness::policy::Policy;
use crate::harness::qmp::{self, QmpClient};
use crate::harness::server::ServeProcess;
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::{SOCKET, Vmm, qemu_at};
use crate::harness::wait::SOON;
use crate::scenarios::device::driver::follows;

const QMP: [&str; 2] = ["/run/source.qmp", "/run/target.qmp"];
const DISK: &str = "/run/snapshots.qcow2";
/// The server's own.
const SERVERS_QMP: &str = "/run/server.qmp";
const MOVES_BY: &str = "unix:/run/moves";
/// Of a host with other OPPs.
const OTHERS_QMP: &str = "/run/other.qmp";
const MOVES_ON_BY: &str = "unix:/run/moves-on";
const NAMED: &str = "the guest comes from a host, or a snapshot, with other OPPs";

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let [source, target] = [false, true].map(|last| Setup {
        vmm: Vmm::Qemu,
        silent: true,
        ..plan
            .mirroring(&pcpus(&policies, last))
            .with(&["--clamp", "exact"])
    });
    let mut vm = Vm::boot_prepared(&source, |command| qmp::listen(command, QMP[0]))?;
    plan.load_driver(&mut vm)?;
    follows(&mut vm, &policies)?;
    let mut qmp = QmpClient::connect(QMP[0])?;
    let loaded = snapshot(&mut vm, &mut qmp, &policies).context("the snapshot")?;
    let mut next = incoming(&target, (QMP[1], MOVES_BY))?;
    request(&mut vm, &policies, Policy::max)?;
    qmp.migrate(MOVES_BY).context("the source")?;
    sleep(SOON);
    let migrated = in_force(&next, &policies, Policy::max)?;
    // Both are on the same policies.
    let follows = follows(&mut next, &policies).map_err(|error| format!("{error:#}"));
    let paused = in_force(&vm, &policies, Policy::max)?;
    let server = vm.program().to_string();
    let ended = qmp.ask("quit", json!({}));
    let source_said = vm.finish(0).context("the source")?;
    ended.context("the source")?;
    let mut source_left = leftovers()?;
    source_left.retain(|what| what.contains(&server));
    let (target_said, last) = match plan.path.as_deref() {
        Some("ram") => moved_on(next, &target, &policies).context("to other OPPs")?,
        _ => {
            let said = next.quit()?;
            let heard = heard(&source, &target, &policies);
            (said, heard.context("with a control socket")?)
        }
    };
    let left = left_soon()?;
    let figures = json!({
        "follows": follows.as_ref().err(), "source_left": source_left, "left": left,
        "source_said": source_said, "target_said": target_said,
    });
    Ok(LabVerdict::with_figures(figures)
        .part("loaded", loaded)
        .part("migrated", migrated)
        .check("the host follows", follows.is_ok(), follows.err())
        .part("source_while_paused", paused)
        .part("last", last)
        .check_none("nothing of the source is left", &source_left)
        .check_none("nothing is left", &left))
}

/// A QEMU with this control socket, to which a guest can be migrated by that one.
fn incoming(target: &Setup, (control, by): (&str, &str)) -> Result<Vm> {
    let vm = Vm::start_prepared(target, |command| {
        qmp::listen(command, control);
        command.args(["-incoming", by]);
    })?;
    // It listens then.
    drop(QmpClient::connect(control).context("the target")?);
    Ok(vm)
}

/// Migrates a guest to a vCPU that lacks the highest OPP of its own; what the one that it has left said.
fn moved_on(vm: Vm, target: &Setup, policies: &[Policy]) -> Result<(String, LabVerdict)> {
    let policy = policies.first().context("no policy")?;
    let (_, lower) = policy.opps.split_last().context("no OPP")?;
    let lower: Vec<String> = lower.iter().map(u32::to_string).collect();
    let table = format!("0={}", lower.join(","));
    let target = target.clone().with(&["--table", &table]);
    let next = incoming(&target, (OTHERS_QMP, MOVES_ON_BY))?;
    let mut qmp = QmpClient::connect(QMP[1])?;
    qmp.migrate(MOVES_ON_BY)?;
    sleep(SOON);
    qmp.ask("quit", json!({}))?;
    let (left, said) = (vm.finish(0)?, next.quit()?);
    let lines = said.matches(NAMED).count();
    let figures = json!({ "said": said });
    let verdict = LabVerdict::with_figures(figures);
    Ok((left, verdict.check("it is named once", lines == 1, lines)))
}

/// Migrates a guest whose server hears QEMU at its control socket: nothing is clamped any more where it
/// was.
fn heard(source: &Setup, target: &Setup, policies: &[Policy]) -> Result<LabVerdict> {
    let server = ServeProcess::start(&source.clone().with(&["--qmp", SERVERS_QMP]))?;
    let mut qemu = qemu_at(SOCKET, source);
    qmp::listen(&mut qemu, SERVERS_QMP);
    qmp::listen(&mut qemu, QMP[0]);
    let mut vm = Vm::spawn(&mut qemu)?;
    vm.expect("@ready", BOOT)?;
    vm.settle(policies.len())?;
    let device = GuestDevice::of(&mut vm)?;
    for (vcpu, policy) in policies.iter().enumerate() {
        let register = device.set_perf(vcpu);
        vm.ask(format!("poke {vcpu} {register} {}", policy.max()))?;
    }
    sleep(SOON);
    let before = in_force(&vm, policies, Policy::max)?;
    let mut qmp = QmpClient::connect(QMP[0])?;
    let next = incoming(target, (QMP[1], MOVES_BY))?;
    qmp.migrate(MOVES_BY)?;
    sleep(SOON);
    let clamps = (0..policies.len()).map(|vcpu| vm.clamp(vcpu));
    let clamps: Vec<(u32, u32)> = clamps.collect::<Result<_>>()?;
    let migrated = in_force(&next, policies, Policy::max)?;
    qmp.ask("quit", json!({}))?;
    let said = [vm.finish(0)?, server.stop()?, next.quit()?];
    let free = clamps.iter().all(|clamp| *clamp == FREE);
    let figures = json!({ "source_clamps": clamps, "said": said });
    Ok(LabVerdict::with_figures(figures)
        .part("before", before)
        .part("migrated", migrated)
        .check("the source's vCPUs are free", free, &clamps))
}

/// Of each policy the first pCPU, or the last one.
pub fn pcpus(policies: &[Policy], last: bool) -> Vec<u32> {
    let of = |policy: &Policy| match last {
        true => policy.cpus.last().copied(),
        false => policy.cpus.first().copied(),
    };
    policies.iter().filter_map(of).collect()
}

/// Loads a snapshot of a guest that had requested its highest OPPs, and requests its lowest.
fn snapshot(vm: &mut Vm, qmp: &mut QmpClient, policies: &[Policy]) -> Result<LabVerdict> {
    const SIZE: u64 = 1 << 30;
    qmp.job(
        "blockdev-create",
        json!({ "options": { "driver": "file", "filename": DISK, "size": 0 } }),
    )?;
    let file = json!({ "driver": "file", "filename": DISK, "node-name": "file" });
    qmp.ask("blockdev-add", file)?;
    let disk = json!({ "options": { "driver": "qcow2", "file": "file", "size": SIZE } });
    qmp.job("blockdev-create", disk)?;
    let disk = json!({ "driver": "qcow2", "file": "file", "node-name": "disk" });
    qmp.ask("blockdev-add", disk)?;
    let snapshot = json!({ "tag": "one", "vmstate": "disk", "devices": ["disk"] });
    request(vm, policies, Policy::max)?;
    qmp.job("snapshot-save", snapshot.clone())?;
    request(vm, policies, Policy::min)?;
    sleep(SOON);
    let before = in_force(vm, policies, Policy::min)?;
    qmp.job("snapshot-load", snapshot)?;
    sleep(SOON);
    let after = in_force(vm, policies, Policy::max)?;
    // A QEMU with a disk that the target lacks isn't migrated.
    for node in ["disk", "file"] {
        qmp.ask("blockdev-del", json!({ "node-name": node }))?;
    }
    std::fs::remove_file(DISK)?;
    Ok(LabVerdict::default()
        .part("before", before)
        .part("after", after))
}

/// Requests that of each vCPU.
pub fn request(vm: &mut Vm, policies: &[Policy], khz: fn(&Policy) -> u32) -> Result<()> {
    for (vcpu, policy) in policies.iter().enumerate() {
        set_governor(vm, vcpu, "userspace")?;
        ask_for(vm, vcpu, khz(policy))?;
    }
    Ok(())
}

/// Whether each vCPU has the clamp of a request for that.
pub fn in_force(vm: &Vm, policies: &[Policy], khz: fn(&Policy) -> u32) -> Result<LabVerdict> {
    let clamps = (0..policies.len()).map(|vcpu| vm.clamp(vcpu));
    let clamps: Vec<(u32, u32)> = clamps.collect::<Result<_>>()?;
    let wanted = policies.iter().map(|policy| policy.util(khz(policy)));
    let in_force = wanted.eq(clamps.iter().map(|clamp| clamp.0));
    Ok(LabVerdict::default()
        .check("requests are in force", in_force, &clamps)
        .figure(
            "clamps",
            clamps
                .into_iter()
                .map(|clamp| json!(clamp))
                .collect::<Value>(),
        ))
}
