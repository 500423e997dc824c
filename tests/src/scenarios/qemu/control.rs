// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM that is given by its process and QEMU's control socket: QEMU lists the threads that run its
//! vCPUs, and each is clamped as it requests, by its thread if there is no cgroup. If another QEMU
//! answers at the socket, it isn't served. QEMU's control socket comes after its connection to the
//! server. A QEMU that is refused ends, with a line.

use std::fs;
use std::process::{Child, Command};
use std::thread::sleep;

use anyhow::{Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::{ANSWERED, answer};
use crate::harness::leftovers::leftovers;
use crate::harness::plan::{GuestDevice, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::qmp::{self, QmpClient};
use crate::harness::server::{NO_GROUPS, ServeProcess};
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::{QEMU, SOCKET, qemu_at, with_device};
use crate::harness::wait::SOON;

const QMP: &str = "/run/control.qmp";
const OTHER: &str = "/run/other.qmp";
/// A cgroup that isn't the server's to make others in.
const GROUP: &str = "/sys/fs/cgroup/lab";
/// QEMU is the shell's process, which is known before there is a server.
const ONCE_SERVED: &str = "echo $$ > /sys/fs/cgroup/lab/cgroup.procs
until [ -S $0 ]; do sleep 0.1; done
exec \"$@\"";
/// The output of QEMU when it ends then.
const REFUSED: &str = "server sent version -1";
/// The clamp of a vCPU without a server.
pub const FREE: (u32, u32) = (0, 1024);

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = Setup {
        silent: true,
        ..Setup::mirroring(&first_cpus(&policies)).with(&["--cur-perf", "request"])
    };
    fs::create_dir(GROUP)?;
    let mut qemu = qemu_at(SOCKET, &setup);
    qmp::listen(&mut qemu, QMP);
    let mut shell = Command::new("/bin/busybox");
    shell.args(["sh", "-c", ONCE_SERVED, SOCKET]);
    let mut vm = Vm::spawn(shell.arg(qemu.get_program()).args(qemu.get_args()))?;
    let pid = vm.pid().to_string();
    let server = ServeProcess::start(&setup.clone().with(&["--pid", &pid, "--qmp", QMP]))?;
    vm.expect("@ready", BOOT)?;
    vm.settle(policies.len())?;
    let device = GuestDevice::of(&mut vm)?;
    let mut served = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        let row = answer(&mut vm, &device, vcpu, policy)?;
        let max = format!("poke {vcpu} {} {}", device.set_perf(vcpu), policy.max());
        vm.ask(max)?;
        sleep(ANSWERED);
        let (util, _) = vm.clamp(vcpu)?;
        let clamped = util == policy.util(policy.max());
        let row = row.check("it is clamped", clamped, util);
        served.push(row.figure("clamped", clamped));
    }
    // The server has looked at the VM again.
    sleep(2 * SOON);
    let refused = refused(policies.len())?;
    let server_said = server.stop()?;
    let other = other(policies.len())?;
    let wrong = ServeProcess::start(&setup.with(&["--pid", &pid, "--qmp", OTHER]))?;
    sleep(SOON);
    let clamps = (0..policies.len()).map(|vcpu| vm.clamp(vcpu));
    let clamps: Vec<(u32, u32)> = clamps.collect::<Result<_>>()?;
    let wrong_said = wrong.stop()?;
    end(other)?;
    let said = vm.quit()?;
    // A record that no server was there to remove.
    Command::new("/bin/vcpufreq").arg("cleanup").status()?;
    fs::remove_dir(GROUP)?;
    let left = leftovers()?;
    let free = clamps.iter().all(|clamp| *clamp == FREE);
    let figures = json!({
        "clamps_when_refused": clamps, "left": left,
        "refused_qemu_said": refused, "server_said": server_said, "wrong_said": wrong_said, "qemu_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .parts("served", served)
        .check(
            "another QEMU is refused",
            refused.contains(REFUSED),
            &refused,
        )
        .check(
            "the server names groups",
            server_said.contains(NO_GROUPS),
            &server_said,
        )
        .check(
            "the server names --pid",
            server_said.contains("isn't --pid"),
            &server_said,
        )
        .check(
            "another VM's QMP is named",
            wrong_said.contains("another VM's"),
            &wrong_said,
        )
        .check("no clamp when refused", free, &clamps)
        .check_none("nothing is left", &left))
}

/// Another QEMU at the same socket: its output when it ends by itself.
fn refused(vcpus: usize) -> Result<String> {
    let mut qemu = idle(vcpus);
    with_device(&mut qemu, SOCKET, vcpus);
    let ended = qemu.output()?;
    ensure!(
        !ended.status.success(),
        "a QEMU that was refused ended with 0"
    );
    Ok(String::from_utf8_lossy(&ended.stderr).into_owned())
}

/// Another QEMU of as many vCPUs, which answers at a control socket of its own.
fn other(vcpus: usize) -> Result<Child> {
    let mut qemu = idle(vcpus);
    qmp::listen(&mut qemu, OTHER);
    let qemu = qemu.spawn()?;
    drop(QmpClient::connect(OTHER)?);
    Ok(qemu)
}

/// One that starts no guest.
fn idle(vcpus: usize) -> Command {
    let mut qemu = Command::new(QEMU);
    qemu.args([
        "-machine",
        "virt,gic-version=3",
        "-accel",
        "kvm",
        "-cpu",
        "host",
    ])
    .args(["-smp", &vcpus.to_string(), "-m", "64", "-S"])
    .args(["-nodefaults", "-display", "none"]);
    qemu
}

fn end(mut qemu: Child) -> Result<()> {
    qemu.kill()?;
    qemu.wait()?;
    Ok(())
}
