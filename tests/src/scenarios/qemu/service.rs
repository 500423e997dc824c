// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A QEMU guest served by the units in `docs/`, under systemd. The VMM's connection starts the
//! server. After a restart and after kill -9, the next server takes the VM over by the files that
//! systemd keeps. Nothing is kept of a VM that has ended. The unit has no guardian: it runs `cleanup`
//! when a server has been killed.

use std::fs;
use std::thread::sleep;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::{ANSWERED, answer};
use crate::harness::leftovers::leftovers;
use crate::harness::plan::{GuestDevice, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::stats::at as stats;
use crate::harness::systemctl::systemctl;
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::qemu_at;
use crate::harness::wait::{SOON, settled, wait_until};

const SERVICE: &str = "vcpufreq-serve@lab.service";
const SOCKET_UNIT: &str = "vcpufreq-serve@lab.socket";
const SOCKET: &str = "/run/vcpufreq-lab.sock";
const CONFIG: &str = "/etc/vcpufreq";
/// Files that are kept of a VM: memory, connection, and a doorbell for each vCPU.
const KEPT: usize = 2;

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let pins = first_cpus(&policies);
    write_config(&pins)?;
    systemctl(&["daemon-reload"])?;
    systemctl(&["start", SOCKET_UNIT])?;
    let idle = show("ActiveState")?;
    let mut vm = Vm::spawn(&mut qemu_at(SOCKET, &Setup::mirroring(&pins)))?;
    vm.expect("@ready", BOOT)?;
    vm.settle(pins.len())?;
    let first = round(&mut vm, &policies)?;
    let processes = processes()?;
    systemctl(&["restart", SERVICE])?;
    let restarted = round(&mut vm, &policies)?;
    let server = show("MainPID")?;
    kill(Pid::from_raw(server.parse()?), Signal::SIGKILL)?;
    until("NRestarts", "1")?;
    let killed = round(&mut vm, &policies)?;
    let qemu_said = vm.quit()?;
    let kept = until("NFileDescriptorStore", "0")?;
    systemctl(&["stop", SOCKET_UNIT, SERVICE])?;
    let left = leftovers()?;
    let rounds = [&first, &restarted, &killed];
    let servers = rounds.map(|round| round.get("server").clone());
    let differ = servers[0] != servers[1] && servers[1] != servers[2];
    let figures = json!({
        "before_the_vmm": idle, "kept_after_the_end": kept, "left": left, "qemu_said": qemu_said,
        "processes": processes,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no server before a VMM", &idle, "inactive")
        .check("each round has its server", differ, &servers)
        .check_eq("server and bridge are all processes", &processes.len(), 2)
        .check_eq("nothing is kept after the end", &kept, "0")
        .check_none("nothing is left", &left)
        .part("first", first)
        .part("restarted", restarted)
        .part("killed", killed))
}

/// The command lines of the service's processes.
fn processes() -> Result<Vec<String>> {
    let group = format!("/sys/fs/cgroup{}/cgroup.procs", show("ControlGroup")?);
    let all = fs::read_to_string(&group).context(group)?;
    let command = |pid| fs::read_to_string(format!("/proc/{pid}/cmdline"));
    Ok(all.lines().flat_map(command).collect())
}

fn write_config(pins: &[u32]) -> Result<()> {
    fs::create_dir_all(CONFIG)?;
    let mut config = format!(
        "cpus = {}\ncur-perf = \"request\"\nrate-limit = 0\n",
        pins.len()
    );
    for (vcpu, pcpu) in pins.iter().enumerate() {
        config.push_str(&format!("[vcpu.{vcpu}]\npin = {pcpu}\n"));
    }
    fs::write(format!("{CONFIG}/lab.toml"), config).context("the service's options")
}

/// Each vCPU is answered, and has the clamp that it has asked for.
fn round(vm: &mut Vm, policies: &[Policy]) -> Result<LabVerdict> {
    until("ActiveState", "active")?;
    let stored = (KEPT + policies.len()).to_string();
    let kept = until("NFileDescriptorStore", &stored)?;
    // A server that has just taken the VM over is active before its bridge is.
    let server = show("MainPID")?.parse()?;
    wait_until("the bridge", 10 * SOON, || {
        Ok(stats(server).is_ok_and(|stats| stats["vcpus"].is_array()))
    })?;
    let device = GuestDevice::of(vm)?;
    let mut answers = Vec::new();
    let mut clamps = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        answers.push(answer(vm, &device, vcpu, policy)?);
        vm.ask(format!(
            "poke {vcpu} {} {}",
            device.set_perf(vcpu),
            policy.max()
        ))?;
        sleep(ANSWERED);
        let (util, _) = vm.clamp(vcpu)?;
        clamps.push(util == policy.util(policy.max()));
        vm.ask(format!(
            "poke {vcpu} {} {}",
            device.set_perf(vcpu),
            policy.min()
        ))?;
    }
    let clamped = clamps.iter().all(|clamped| *clamped);
    let figures = json!({ "server": show("MainPID")?, "clamped": clamps, "kept": kept });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("systemd keeps the VM's files", &kept, stored)
        .parts("answers", answers)
        .check("each vCPU is clamped", clamped, &clamps))
}

/// A property of the service once it has this value, or in the end.
fn until(property: &str, value: &str) -> Result<String> {
    settled(10 * SOON, || show(property), |now| now == value)
}

fn show(property: &str) -> Result<String> {
    systemctl(&["show", "--property", property, "--value", SERVICE])
}
