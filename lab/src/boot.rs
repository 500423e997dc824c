// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An emulated host of the tests: what it is made of, and what is tried on it.

use crate::arch::Arch::{self, Arm64, X86_64};
use crate::kernel::Flavor::{self, Checked, Kcsan, Standard};
use crate::qemu::GuestVmm;
use crate::run::Driver::{self, Ours};
use crate::run::{DEFAULT_CPU, DEFAULT_GIC};
use crate::set::Set::{self, Instrumented};

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
        driver: Ours,
        path: None,
        vmm: GuestVmm::Vcpufreq,
        cpu: DEFAULT_CPU,
        gic: DEFAULT_GIC,
        protected: false,
        parallel: false,
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
    /// What tells it from others.
    pub fn name(&self) -> String {
        if self.arch == X86_64 {
            return format!("x86-64 {}", self.topology);
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
