// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain as a person would write it, with the `<shmem>` of docs/examples/libvirt.xml or the
//! `<memoryBacking>` of docs/examples/libvirt-ram.xml, and the files that docs/qemu.md has that person put beside it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::harness::systemctl::systemctl;
use crate::harness::vmm::{CMDLINE, INITRD, KERNEL, QEMU};

/// libvirt's user for QEMU.
const USER: &str = "libvirt-qemu";
/// The XML that a person starts from.
const EXAMPLE: &str = include_str!("../../../../../docs/examples/libvirt.xml");
/// The same without a device.
const RAM_EXAMPLE: &str = include_str!("../../../../../docs/examples/libvirt-ram.xml");
const HOOK: &str = include_str!("../../../../../docs/examples/libvirt-hook");
const HOOK_FILE: &str = "/etc/libvirt/hooks/qemu.d/vcpufreq";
/// Without the daemon that would keep logs. QEMU 11 takes no file that libvirt 11.3 has opened, but a
/// pipe, which it gets of a compressed one.
const QEMU_CONF: &str = "stdio_handler = \"file\"\nsave_image_format = \"gzip\"\n";
const UNITS: &str = "/etc/systemd/system";
/// What the servers have said.
pub const SAID: &str = "/run/server.err";
/// Which the hook makes of that with this ending.
pub const TREE: &str = "/run/guest.dtb";
const BASE: &str = "/run/guest.dtb.base";

/// What [`LibvirtDomain::states`] are while it runs, and when it doesn't.
pub const STARTED: &str = "socket active, service active, file true";
pub const STOPPED: &str = "socket inactive, service inactive, file false";

/// A domain, by its name; its console, server and XML are named by that too.
#[derive(Debug, Clone)]
pub struct LibvirtDomain {
    pub name: &'static str,
    /// The pCPU of each vCPU.
    pub pins: Vec<u32>,
    /// Where libvirt writes the number of its QEMU, if it has its registers in RAM.
    pub pid_file: Option<String>,
}

impl LibvirtDomain {
    /// How both pipes of its console begin.
    pub fn console(&self) -> String {
        format!("/run/{}.console", self.name)
    }

    /// Where its server is, by the unit.
    pub fn server(&self) -> String {
        format!("/run/vcpufreq-{}.sock", self.name)
    }

    /// Makes the pipes of its console.
    pub fn make_console(&self) -> Result<()> {
        for end in ["in", "out"] {
            let path = format!("{}.{end}", self.console());
            mkfifo(path.as_str(), Mode::from_bits_truncate(0o666))?;
        }
        Ok(())
    }

    /// Writes the options of its server.
    pub fn write_options(&self) -> Result<()> {
        let mut options = format!("cpus = {}\nclamp = \"exact\"\n", self.pins.len());
        options.push_str("host-topology = true\n");
        if let Some(path) = &self.pid_file {
            options.push_str(&format!("dtb = \"{TREE}\"\npid-file = \"{path}\"\n"));
        }
        for (vcpu, pcpu) in self.pins.iter().enumerate() {
            options.push_str(&format!("[vcpu.{vcpu}]\npin = {pcpu}\n"));
        }
        write(&format!("/etc/vcpufreq/{}.toml", self.name), &options)
    }

    /// States of its server's units, and whether the socket's file is there.
    pub fn states(&self) -> Result<String> {
        let file = Path::new(&self.server()).exists();
        let socket = self.unit("socket", "ActiveState")?;
        let service = self.service("ActiveState")?;
        Ok(format!("socket {socket}, service {service}, file {file}"))
    }

    /// A property of its server's service.
    pub fn service(&self, property: &str) -> Result<String> {
        self.unit("service", property)
    }

    fn unit(&self, kind: &str, property: &str) -> Result<String> {
        let unit = format!("vcpufreq-serve@{}.{kind}", self.name);
        systemctl(&["show", "--property", property, "--value", &unit])
    }

    /// A pin in its XML.
    pub fn pin(vcpu: usize, pcpu: u32) -> String {
        format!("<vcpupin vcpu='{vcpu}' cpuset='{pcpu}'/>")
    }

    /// Its XML.
    pub fn xml(&self) -> Result<String> {
        let (name, vcpus) = (self.name, self.pins.len());
        let console = self.console();
        let (memory, shmem, more) = match &self.pid_file {
            Some(_) => (element(RAM_EXAMPLE, "memoryBacking")?, String::new(), ""),
            None => ("", shmem(name, vcpus)?, KEPT_MEMORY),
        };
        let pins = self.pins.iter().enumerate();
        let pins: String = pins.map(|(vcpu, pcpu)| Self::pin(vcpu, *pcpu)).collect();
        Ok(format!(
            "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <memory unit='MiB'>256</memory>
  {memory}
  <vcpu>{vcpus}</vcpu>
  <cputune>{pins}</cputune>
  <os>
    <type arch='aarch64' machine='virt'>hvm</type>
    <kernel>{KERNEL}</kernel>
    <initrd>{INITRD}</initrd>
    <cmdline>console=ttyAMA0 {CMDLINE}</cmdline>
    <dtb>{TREE}</dtb>
  </os>
  <features><gic version='3'/></features>
  <cpu mode='host-passthrough'/>
  <devices>
    <emulator>{QEMU}</emulator>
    <controller type='usb' model='none'/>
    <serial type='pipe'><source path='{console}'/></serial>
    {shmem}
    <memballoon model='none'/>
  </devices>
  {more}
</domain>
"
        ))
    }
}

/// What lets a domain with the device be saved and migrated.
const KEPT_MEMORY: &str = "<qemu:override>
    <qemu:device alias='shmem0'>
      <qemu:frontend><qemu:property name='master' type='string' value='on'/></qemu:frontend>
    </qemu:device>
  </qemu:override>";

/// The only element of this name in `xml`.
fn element<'a>(xml: &'a str, name: &str) -> Result<&'a str> {
    let end = format!("</{name}>");
    let from = xml.find(&format!("<{name}")).context("no element")?;
    let to = from + xml[from..].find(&end).context("no end")? + end.len();
    Ok(&xml[from..to])
}

/// The example's device, for this domain and so many vCPUs.
pub fn shmem(name: &str, vcpus: usize) -> Result<String> {
    let mut device = element(EXAMPLE, "shmem")?.to_owned();
    for (of_example, here) in [
        ("vcpufreq-NAME.sock", format!("vcpufreq-{name}.sock")),
        ("vectors='2'", format!("vectors='{vcpus}'")),
    ] {
        ensure!(
            device.contains(of_example),
            "no {of_example} in the example"
        );
        device = device.replace(of_example, &here);
    }
    Ok(device)
}

/// Sets libvirt up, with the hook and the sockets' user, and makes QEMU's device tree for so many
/// vCPUs.
pub fn set_up(vcpus: usize) -> Result<()> {
    // libvirt's sockets are there.
    fs::create_dir_all("/var")?;
    symlink("/run", "/var/run")?;
    symlink("/bin/busybox", "/bin/gzip")?;
    write("/etc/libvirt/qemu.conf", QEMU_CONF)?;
    write(HOOK_FILE, HOOK)?;
    fs::set_permissions(HOOK_FILE, Permissions::from_mode(0o755))?;
    for (unit, lines) in [
        ("socket", format!("[Socket]\nSocketUser={USER}\n")),
        (
            "service",
            format!("[Service]\nStandardError=append:{SAID}\n"),
        ),
    ] {
        write(
            &format!("{UNITS}/vcpufreq-serve@.{unit}.d/lab.conf"),
            &lines,
        )?;
    }
    systemctl(&["daemon-reload"])?;
    // As udev's rule of libvirt's group.
    fs::set_permissions("/dev/kvm", Permissions::from_mode(0o666))?;
    let status = Command::new(QEMU)
        .args(["-accel", "kvm", "-cpu", "host", "-smp"])
        .args([&vcpus.to_string(), "-m", "256", "-machine"])
        .arg(format!("virt,gic-version=3,acpi=off,dumpdtb={BASE}"))
        .args(["-nodefaults", "-display", "none"])
        .status()?;
    ensure!(status.success(), "no device tree: {status}");
    Ok(())
}

/// Writes a file, in a new folder if need be.
pub fn write(path: &str, text: &str) -> Result<()> {
    let folder = Path::new(path).parent().context("no folder")?;
    fs::create_dir_all(folder)?;
    fs::write(path, text).with_context(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    //! The page and its example have one device, and the scenario tries that.
    use super::*;

    const PAGE: &str = include_str!("../../../../../docs/qemu.md");

    #[test]
    fn the_page_the_example_and_the_scenario_have_one_device() {
        let bare = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let here = shmem("NAME", 2).unwrap();
        for text in [PAGE, EXAMPLE] {
            assert!(bare(text).contains(&bare(&here)), "{here}");
        }
        let here = shmem("lab", 4).unwrap();
        assert!(here.contains("vectors='4'") && here.contains("/run/vcpufreq-lab.sock"));
    }
}
