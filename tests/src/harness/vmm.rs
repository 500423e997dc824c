// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMMs that run the lab's guest: how each is started, and what it names its threads.

use std::borrow::Cow;
use std::process::Command;

use anyhow::{Context, Result};
use vcpufreq_bench::piped::child;

use crate::harness::architecture::HERE;
use crate::harness::kernel_log;

/// crosvm, if the host was given one.
pub const CROSVM: &str = "/bin/crosvm";
/// Debian's QEMU, if the host was given it.
pub const QEMU: &str = HERE.qemu;
/// Where QEMU finds the server of the shared memory.
pub const SOCKET: &str = "/run/vcpufreq.socket";
/// Event lines of `vcpufreq run` or `vcpufreq qemu`.
pub const EVENTS: &str = "/run/events.jsonl";

/// The lab's guest.
pub const KERNEL: &str = "/lab/guest-kernel";
pub const INITRD: &str = "/lab/guest-initramfs";
/// Memory of a guest.
const MEM_MIB: u32 = 256;
/// What every guest is booted with beside its console: /dev/mem on the registers that a driver has
/// claimed. Nothing is verified by Debian's certificates, and reading them takes 0.6 s of a boot of
/// 1.75 s.
pub const CMDLINE: &str = "quiet nokaslr panic=-1 iomem=relaxed initcall_blacklist=load_system_certificate_list rdinit=/init";

/// A VMM.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// `vcpufreq run`.
    #[default]
    Vcpufreq,
    /// crosvm: pinned by the options.
    Crosvm,
    /// Debian's QEMU, behind `vcpufreq qemu`.
    Qemu,
}

/// What differs from guest to guest.
#[derive(Debug, Default, Clone)]
pub struct Setup {
    /// What runs it.
    pub vmm: Vmm,
    /// The pCPUs of each vCPU, as `--pin` takes them; empty: not pinned.
    pub pins: Vec<String>,
    /// More options of `vcpufreq run`, of `vcpufreq qemu` or of crosvm.
    pub options: Vec<String>,
    /// More words for the guest's command line.
    pub cmdline: String,
    /// Without `--events`: writing the file is work on the host too.
    pub silent: bool,
    /// Memory in MiB, when the usual isn't enough.
    pub mem_mib: Option<u32>,
    /// QEMU gives the guest no PMU, as `vcpufreq run`: KVM saves and restores it at each exit.
    pub no_pmu: bool,
    /// QEMU locks its memory.
    pub locks_memory: bool,
}

impl Setup {
    /// vCPUs pinned to these pCPUs, mirroring them.
    pub fn mirroring(pcpus: &[u32]) -> Self {
        Self {
            pins: pcpus.iter().map(u32::to_string).collect(),
            options: vec!["--host-topology".into()],
            ..Self::default()
        }
    }

    fn mem_mib(&self) -> String {
        self.mem_mib.unwrap_or(MEM_MIB).to_string()
    }

    /// Whether the guest has the virtual cpufreq device.
    pub fn bridge(&self) -> bool {
        !self.options.iter().any(|option| option == "--no-bridge")
    }

    fn cmdline(&self, console: &str) -> String {
        let checks = match kernel_log::guests_are_watched() {
            true => kernel_log::CMDLINE,
            false => "",
        };
        format!("{console}{CMDLINE} {}{checks}", self.cmdline)
    }

    /// With more options.
    pub fn with(mut self, options: &[&str]) -> Self {
        self.options
            .extend(options.iter().map(|&option| option.to_owned()));
        self
    }
}

/// The VMM with the lab's guest.
pub fn command(setup: &Setup) -> Command {
    match setup.vmm {
        Vmm::Vcpufreq => vcpufreq(setup),
        Vmm::Crosvm => crosvm(setup),
        Vmm::Qemu if setup.bridge() => behind_prefix(setup),
        Vmm::Qemu => qemu(setup),
    }
}

fn vcpufreq(setup: &Setup) -> Command {
    let mut command = Command::new("/bin/vcpufreq");
    command
        .args(["run", "--kernel", KERNEL, "--initrd", INITRD])
        .args(["--mem", &setup.mem_mib()])
        .args(["--cmdline", &setup.cmdline("console=ttyS0 ")]);
    bridge(&mut command, setup);
    command
}

/// `vcpufreq serve` for a guest of QEMU's.
pub fn serve(setup: &Setup) -> Command {
    let mut command = Command::new("/bin/vcpufreq");
    command.args(["serve", "--socket", SOCKET]);
    let mut setup = setup.clone();
    // What it takes over tells the path.
    if let Some(at) = setup.options.iter().position(|option| option == "--path") {
        setup.options.drain(at..at + 2);
    }
    bridge(&mut command, &setup);
    command
}

/// `vcpufreq serve` for process `pid`, whose guest has the registers of the tree `dtb` in its RAM.
pub fn serve_in_ram(setup: &Setup, dtb: &str, pid: u32) -> Command {
    let mut command = Command::new("/bin/vcpufreq");
    command.args(["serve", "--dtb", dtb, "--pid", &pid.to_string()]);
    bridge(&mut command, setup);
    command
}

/// The options that `run`, `serve` and `qemu` have.
fn bridge(command: &mut Command, setup: &Setup) {
    if !setup.silent {
        command.args(["--events", EVENTS]);
    }
    command.arg("--cpus").arg(setup.pins.len().to_string());
    for (vcpu, pcpus) in setup
        .pins
        .iter()
        .enumerate()
        .filter(|(_, pcpus)| !pcpus.is_empty())
    {
        command.arg("--pin").arg(format!("{vcpu}={pcpus}"));
    }
    command.args(&setup.options);
}

/// It adds the console to the command line itself.
fn crosvm(setup: &Setup) -> Command {
    let mut command = Command::new(CROSVM);
    command
        .args(["run", "--disable-sandbox", "--mem", &setup.mem_mib()])
        .args(["--initrd", INITRD, "-p", &setup.cmdline(""), "--serial"])
        .arg("type=stdout,hardware=serial,num=1,console,stdin")
        .args(&setup.options)
        .arg(KERNEL);
    command
}

/// `crosvm 0.1.0-COMMIT`, where it was built with a PKG_VERSION.
pub fn crosvm_version() -> Result<String> {
    let output = Command::new(CROSVM).arg("version").output();
    let output = output.context("cannot run crosvm")?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// `vcpufreq qemu` adds the device and the guest's device tree.
fn behind_prefix(setup: &Setup) -> Command {
    let mut command = Command::new("/bin/vcpufreq");
    command.arg("qemu");
    bridge(&mut command, setup);
    let qemu = qemu(setup);
    command
        .arg("--")
        .arg(qemu.get_program())
        .args(qemu.get_args());
    command
}

/// QEMU with the device that `vcpufreq serve` answers at `socket`.
pub fn qemu_at(socket: &str, setup: &Setup) -> Command {
    let mut command = qemu(setup);
    with_device(&mut command, socket, setup.pins.len());
    command
}

/// Gives QEMU that device.
pub fn with_device(qemu: &mut Command, socket: &str, vcpus: usize) {
    qemu.args(["-chardev", &format!("socket,path={socket},id=vcpufreq")])
        .arg("-device")
        .arg(format!(
            "ivshmem-doorbell,master=on,vectors={vcpus},chardev=vcpufreq"
        ));
}

/// QEMU's process, once `vcpufreq qemu` has started it.
pub fn behind(prefix: u32) -> Option<u32> {
    child(prefix, "qemu-system")
}

/// As a person would start it for this guest.
fn qemu(setup: &Setup) -> Command {
    let vcpus = setup.pins.len();
    let mut command = Command::new(QEMU);
    command
        .args(["-accel", "kvm", "-machine", HERE.machine])
        .args(["-cpu", if setup.no_pmu { "host,pmu=off" } else { "host" }])
        .args(["-smp", &vcpus.to_string()])
        .args(["-m", &setup.mem_mib(), "-nodefaults", "-display", "none"])
        .args(["-kernel", KERNEL, "-initrd", INITRD])
        .arg("-append")
        .arg(setup.cmdline(&format!("console={} ", HERE.console)))
        // A console that hands on what it reads, Ctrl-C too.
        .args(["-chardev", "stdio,id=console,signal=off"])
        .args(["-serial", "chardev:console"])
        .args(["-name", "debug-threads=on"]);
    if setup.locks_memory {
        command.args(["-overcommit", "mem-lock=on"]);
    }
    command
}

/// `vcpu0`, by the name of a vCPU's thread under any VMM; none of another thread's.
pub fn vcpu_name(thread: &str) -> Option<Cow<'_, str>> {
    let qemu = thread.strip_prefix("CPU ");
    if let Some(vcpu) = qemu.and_then(|rest| rest.strip_suffix("/KVM")) {
        return Some(format!("vcpu{vcpu}").into());
    }
    let name = thread.strip_prefix("crosvm_").unwrap_or(thread);
    name.starts_with("vcpu").then_some(name.into())
}

#[cfg(test)]
mod tests {
    //! Promise: a vCPU's thread is known by its name, whichever VMM's it is.
    use super::*;

    #[test]
    fn threads_of_vcpus_are_known() {
        for (thread, vcpu) in [
            ("vcpu1", Some("vcpu1")),
            ("crosvm_vcpu1", Some("vcpu1")),
            ("CPU 1/KVM", Some("vcpu1")),
            ("qemu-system-aar", None),
            ("requests", None),
        ] {
            assert_eq!(vcpu_name(thread).as_deref(), vcpu, "{thread}");
        }
    }
}
