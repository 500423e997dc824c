// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An emulated host of the tests: what it is made of, and what is tried on it.

use crate::arch::Arch::{self, Arm64, X86_64};
use crate::kernel::Flavor::{self, Checked, Kcsan, Rt, Standard};
use crate::qemu::GuestVmm;
use crate::set::Set::{self, Instrumented};

/// The emulated CPU unless another one is asked for.
pub const DEFAULT_CPU: &str = "neoverse-v1";
/// The emulated interrupt controller unless another one is asked for.
pub const DEFAULT_GIC: u8 = 3;

/// A cpufreq driver for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Driver {
    /// `guest-driver/`.
    Ours,
    /// The kernel's own virtual-cpufreq, unchanged.
    Mainline,
}

impl Driver {
    /// Its module's name.
    pub fn module(self) -> &'static str {
        match self {
            Self::Ours => "vcpufreq_guest",
            Self::Mainline => "virtual-cpufreq",
        }
    }
}

/// What a host has besides what all have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostPart {
    /// Kernel and modules where a board has them.
    Board,
    /// The guest's disk, of Debian's own userland.
    Disk,
    /// The guest's modules for a disk of `vcpufreq run`.
    DiskModules,
    /// fio, which the guest has, too.
    Fio,
    /// EDK2, for guests of QEMU.
    Firmware,
    /// One huge page of 1 GiB.
    GibPage,
    /// A CPU that the kernel's command line isolates: that of docs/examples/rt.toml.
    Isolated,
    /// libvirt, with its driver for QEMU.
    Libvirt,
    /// Prometheus.
    Monitoring,
    /// Perfetto's trace processor.
    Perfetto,
    /// Stock QEMU.
    Qemu,
    /// systemd as the init system.
    Systemd,
    /// Debian's measuring programs, which the guest has, too.
    Tools,
}

impl HostPart {
    /// Packages that it is made of, of those that the toolchain root may be without.
    pub fn needs(self, arch: Arch) -> &'static [&'static str] {
        match (self, arch) {
            (Self::Qemu, Arm64) => &["qemu-system-arm:arm64", "device-tree-compiler:arm64"],
            (Self::Tools, Arm64) => &["rt-tests:arm64", "stress-ng:arm64"],
            (Self::Systemd, _) => &["systemd:arm64"],
            _ => &[],
        }
    }
}

/// One boot of an emulated host and what is tried on it.
pub struct Boot {
    /// Which command carries it out.
    pub set: Set,
    /// Real time that it takes while another one runs on a second CPU, about.
    pub about_s: u32,
    /// Of host and guest.
    pub arch: Arch,
    /// As `run --topology`.
    pub topology: &'static str,
    /// Kernel of the host.
    pub host: Flavor,
    /// Kernel of the guest.
    pub guest: Flavor,
    /// The guest's cpufreq driver.
    pub driver: Driver,
    /// The path, unless the VMM chooses.
    pub path: Option<&'static str>,
    /// What runs the guests.
    pub vmm: GuestVmm,
    /// The emulated CPU.
    pub cpu: &'static str,
    /// The version of the emulated interrupt controller.
    pub gic: u8,
    /// Whether the host has protected KVM, and its guests are protected.
    pub protected: bool,
    /// Whether the emulated CPUs run at once, in real time.
    pub parallel: bool,
    /// What the host has for it.
    pub parts: &'static [HostPart],
    /// What is tried, in this order.
    pub scenarios: &'static [&'static str],
    /// What is tried then, and judges samples: drawn several times.
    pub sampled: &'static [&'static str],
}

/// One on the standard kernel, with this project's driver by the path that the VMM chooses.
pub const fn boot(
    set: Set,
    about_s: u32,
    topology: &'static str,
    scenarios: &'static [&'static str],
) -> Boot {
    Boot {
        set,
        about_s,
        arch: Arm64,
        topology,
        host: Standard,
        guest: Standard,
        driver: Driver::Ours,
        path: None,
        vmm: GuestVmm::Vcpufreq,
        cpu: DEFAULT_CPU,
        gic: DEFAULT_GIC,
        protected: false,
        parallel: false,
        parts: &[],
        scenarios,
        sampled: &[],
    }
}

/// On a kernel that checks memory and locks.
pub const fn checked(about_s: u32, scenarios: &'static [&'static str]) -> Boot {
    Boot {
        host: Checked,
        ..boot(Instrumented, about_s, "2+2", scenarios)
    }
}

/// On one that looks for data races.
pub const fn raced(about_s: u32, scenarios: &'static [&'static str]) -> Boot {
    Boot {
        host: Kcsan,
        parallel: true,
        ..boot(Instrumented, about_s, "2+2", scenarios)
    }
}

impl Boot {
    /// The same on a host that has these, too.
    pub const fn with(self, parts: &'static [HostPart]) -> Self {
        Self { parts, ..self }
    }

    /// What tells it from others.
    pub fn name(&self) -> String {
        if self.arch == X86_64 {
            let rt = if self.host == Rt { " RT" } else { "" };
            return format!("x86-64 {}{rt}", self.topology);
        }
        format!(
            "{} host {:?} guest {:?} driver {:?} path {} {} {} GICv{}{}{}",
            self.topology,
            self.host,
            self.guest,
            self.driver,
            self.path.unwrap_or("auto"),
            self.vmm.name(),
            self.cpu,
            self.gic,
            if self.protected { " protected" } else { "" },
            if self.parallel { " parallel" } else { "" },
        )
    }
}
