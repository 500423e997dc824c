// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's QEMU for the host, which starts guests by KVM there. Of its files a kernel that is
//! booted directly needs the program alone.

/// Scenarios that run it, whatever the others' VMM is.
const SCENARIOS: [&str; 10] = [
    "board:kills",
    "debian-guest",
    "libvirt",
    "paths",
    "qemu",
    "qemu-control",
    "qemu-deaths",
    "qemu-life",
    "qemu-moves",
    "qemu-service",
];

/// It, and what writes device trees for its guests.
pub const PROGRAMS: [&str; 2] = ["bin/qemu-system-aarch64", "bin/dtc"];

/// A VMM for the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum GuestVmm {
    /// `vcpufreq run`.
    Vcpufreq,
    /// Debian's QEMU.
    Qemu,
}

impl GuestVmm {
    /// In the plan.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vcpufreq => "vcpufreq",
            Self::Qemu => "qemu",
        }
    }
}

/// Whether a run of these scenarios needs it.
pub fn needed(vmm: GuestVmm, scenarios: &[String]) -> bool {
    vmm == GuestVmm::Qemu
        || scenarios.iter().any(|name| {
            let is = |one: &&str| {
                name.strip_prefix(one)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
            };
            SCENARIOS.iter().any(is)
        })
}
