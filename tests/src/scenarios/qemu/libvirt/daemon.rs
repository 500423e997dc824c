// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! libvirt's daemon, and the consoles of its domains.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vcpufreq_bench::piped::child;

use super::domain::{LibvirtDomain, write};
use crate::harness::sys::adopt_orphans;
use crate::harness::vm::Vm;
use crate::harness::wait::{SOON, wait_until};

/// In which it is there. It asks QEMU for its capabilities.
const STARTS: Duration = Duration::from_secs(60);
/// In which the domain ends when its guest powers off, and libvirt removes its groups then.
const ENDS: Duration = Duration::from_secs(60);
/// Between the pipes of a console and its own input and output; ends as libvirt does. libvirt opens
/// and closes both pipes before QEMU opens them, at which either `cat` would end: the shell holds
/// them open. libvirt leaves a QEMU process behind whenever it probes QEMU's capabilities, and waits
/// until that is gone: `wait` reaps all.
const RUN: &str = "exec 3<&0 4<>$0.in 5<>$0.out
cat < $0.out 3<&- 4<&- 5<&- &
cat <&3 >&4 5<&- 2>/dev/null &
\"$@\" </dev/null 3<&- 4<&- 5<&- &
wait $!";
/// Another host than this one to libvirt, by its name, and without what libvirt knows of domains
/// here.
const ELSEWHERE: &str = "hostname elsewhere
for folder in /run/libvirt /var/lib/libvirt; do mkdir -p $folder; mount -t tmpfs none $folder; done
exec libvirtd -p /run/libvirt/pid -f $0";

/// A daemon, with its domain's console.
pub struct Daemon {
    pub vm: Vm,
    /// The shell between them.
    shell: u32,
    /// The folder of its socket.
    sockets: &'static str,
}

impl Daemon {
    /// This host's.
    pub fn start(domain: &LibvirtDomain) -> Result<Self> {
        Self::run(domain, ("/run/libvirt", 1), &["libvirtd", "-f"])
    }

    /// One that takes itself for another host's.
    pub fn start_elsewhere(domain: &LibvirtDomain) -> Result<Self> {
        let words = ["unshare", "-m", "-u", "sh", "-c", ELSEWHERE];
        Self::run(domain, ("/run/elsewhere", 2), &words)
    }

    /// `host` is its number; libvirt moves no domain to a host of the same one. The last of `words`
    /// takes the name of its settings.
    fn run(
        domain: &LibvirtDomain,
        (sockets, host): (&'static str, u32),
        words: &[&str],
    ) -> Result<Self> {
        let lines = format!(
            "auth_unix_rw = \"none\"\nunix_sock_group = \"root\"\n\
             unix_sock_dir = \"{sockets}\"\nhost_uuid = \"{host:032}\"\n"
        );
        let conf = format!("/run/{}.conf", domain.name);
        write(&conf, &lines)?;
        fs::create_dir_all(sockets)?;
        let mut shell = Command::new("/bin/busybox");
        shell
            .args(["sh", "-c", RUN, &domain.console()])
            .args(words)
            .arg(conf);
        adopt_orphans(&mut shell);
        let vm = Vm::spawn(&mut shell)?;
        let socket = Path::new(sockets).join("libvirt-sock");
        wait_until("libvirt", STARTS, || Ok(socket.exists()))?;
        let shell = vm.program();
        Ok(Self { vm, shell, sockets })
    }

    /// Where it writes the number of a domain's QEMU, in its own mounts.
    pub fn pid_file(&self, domain: &str) -> Result<String> {
        let libvirt = child(self.shell, "libvirtd").context("no libvirt")?;
        Ok(format!(
            "/proc/{libvirt}/root/run/libvirt/qemu/{domain}.pid"
        ))
    }

    /// By which others reach it.
    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}/libvirt-sock", self.sockets)
    }

    /// What virsh prints.
    pub fn virsh(&self, command: &[&str]) -> Result<String> {
        let mut virsh = Command::new("/bin/virsh");
        let ran = virsh.args(["-c", &self.uri()]).args(command).output()?;
        let said = String::from_utf8_lossy(&ran.stderr);
        ensure!(ran.status.success(), "virsh {command:?}: {}", said.trim());
        Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
    }

    /// Finds the domain's QEMU. Its parent has ended, as a daemon's does.
    pub fn find_qemu(&mut self) -> Result<()> {
        let qemu = child(self.shell, "qemu-system").context("no QEMU")?;
        self.vm.set_vmm(qemu);
        Ok(())
    }

    /// Powers the domain off.
    pub fn power_off(&mut self) -> Result<()> {
        let qemu = PathBuf::from(format!("/proc/{}", self.vm.pid()));
        self.vm.tell("quit")?;
        wait_until("the domain's end", ENDS, || Ok(!qemu.exists()))?;
        // In which libvirt has seen it.
        sleep(SOON);
        Ok(())
    }

    /// Ends it, which stays when its domain has ended; its stderr.
    pub fn end(self) -> Result<String> {
        let libvirt = child(self.shell, "libvirtd").context("no libvirt")?;
        kill(Pid::from_raw(libvirt.try_into()?), Signal::SIGTERM)?;
        self.vm.finish(0)
    }
}
