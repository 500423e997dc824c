// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frequency that a pCPU's capacity refers to: the one that schedutil multiplies by utilization
//! and divides by `cpu_capacity` (`get_capacity_ref_freq()` of `kernel/sched/cpufreq_schedutil.c`).
//!
//! Before Linux 6.8, and on x86, it is `cpuinfo_max_freq` of the moment, which rises when boost is
//! switched on. From 6.8 on it is fixed elsewhere (`capacity_freq_ref` of
//! `drivers/base/arch_topology.c`):
//! - with ACPI's CPPC the frequency of `highest_perf`, whatever the policy's maximum is;
//! - else `cpuinfo_max_freq` when the policy was made: without boost, but for drivers that switch
//!   boost on before.
//!
//! No file shows it. So the rule is found once, from the kernel's version and, where the device
//! tree has `capacity-dmips-mhz`, from the capacities that follow from each possible one.

use std::iter::zip;

use super::root::CPUS;
use super::{HostRoot, topology};

/// The first kernel whose reference is fixed.
const FIXED_SINCE: (u32, u32) = (6, 8);
/// The first kernel that makes every policy without boost (`policy_set_boost()` comes after
/// `CPUFREQ_CREATE_POLICY`). Before, SCMI's had it on (`scmi_cpufreq_driver.boost_enabled`).
const MADE_WITHOUT_BOOST_SINCE: (u32, u32) = (6, 14);
const SCMI: &str = "scmi";
/// The driver of ACPI's CPPC where capacities are from there. x86 has other drivers, and both
/// `acpi_cppc` and `cpu_capacity`: of AMD's equal CPUs `highest_perf` is only a ranking.
const CPPC: &str = "cppc_cpufreq";
/// x86 defines no `arch_scale_freq_ref()`.
const OF_X86: [&str; 5] = [
    "acpi-cpufreq",
    "amd-pstate",
    "amd-pstate-epp",
    "intel_cpufreq",
    "intel_pstate",
];

/// How the running kernel chose the reference frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceRule {
    since: Since,
    /// Whether that is known; else it is the likeliest.
    pub is_certain: bool,
    /// Whether the reference is above the frequency that the capacities were computed with: before
    /// Linux 6.8, when boost was switched on later.
    pub has_risen: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Since {
    /// `cpuinfo_max_freq` as it is now.
    Now,
    /// As it was when the policy was made, with boost on or off.
    Creation { boost: bool },
}

impl ReferenceRule {
    /// That of the kernel below `root`.
    #[must_use]
    pub fn of_host(root: &HostRoot) -> Self {
        if is_x86(root) {
            return Self::certain(Since::Now);
        }
        let version = root.kernel_version();
        let of_creation = Self::of_creation(root, version);
        if version.is_some_and(|version| version < FIXED_SINCE) {
            let now = Self::certain(Since::Now);
            let mut pairs = zip(now.references(root), of_creation.references(root));
            let has_risen = pairs.any(|((_, now), (_, then))| now > then);
            return Self { has_risen, ..now };
        }
        of_creation
    }

    /// As it was when the policies were made.
    fn of_creation(root: &HostRoot, version: Option<(u32, u32)>) -> Self {
        let [off, on] = [false, true].map(|boost| Self::certain(Since::Creation { boost }));
        if off.references(root) == on.references(root) {
            let is_now = off.references(root) == Self::certain(Since::Now).references(root);
            return Self {
                is_certain: version.is_some() || is_now,
                ..off
            };
        }
        let boost = match (off.explains(root), on.explains(root)) {
            (Some(true), Some(false)) => Some(false),
            (Some(false), Some(true)) => Some(true),
            (Some(false), Some(false)) => None,
            _ => version.map(|version| version < MADE_WITHOUT_BOOST_SINCE && is_scmi(root)),
        };
        Self {
            since: Since::Creation {
                boost: boost.unwrap_or(false),
            },
            is_certain: boost.is_some() && version.is_some(),
            has_risen: false,
        }
    }

    const fn certain(since: Since) -> Self {
        Self {
            since,
            is_certain: true,
            has_risen: false,
        }
    }

    /// The reference of a pCPU in kHz. `cpufreq` is the directory of its policy, below the root.
    #[must_use]
    pub fn khz(self, root: &HostRoot, cpu: u32, cpufreq: &str) -> Option<u32> {
        let now = root.number(format!("{cpufreq}/cpuinfo_max_freq"));
        let now = now.filter(|khz| *khz > 0);
        let Since::Creation { boost } = self.since else {
            return now;
        };
        let of_cppc = || {
            let driver = root.text(format!("{cpufreq}/scaling_driver"));
            driver.filter(|driver| driver == CPPC)?;
            let is_boosted = root.number(format!("{cpufreq}/boost")) == Some(1);
            CppcPerf::read(root, cpu)?.highest_khz(now.filter(|_| !is_boosted))
        };
        let of_table = || {
            let list = |name| root.khz_list(format!("{cpufreq}/scaling_{name}_frequencies"));
            let (base, boosted) = (list("available").into_iter().max()?, list("boost"));
            let top = boosted.into_iter().max()?;
            Some(if boost { top.max(base) } else { base })
        };
        of_cppc().or_else(of_table).or(now)
    }

    /// Of each pCPU that is present and has a policy.
    fn references(self, root: &HostRoot) -> Vec<(u32, Option<u32>)> {
        let policies = topology::policies(root).into_iter();
        let each = policies.flat_map(|(id, cpus)| cpus.into_iter().map(move |cpu| (id, cpu)));
        each.map(|(id, cpu)| {
            let cpufreq = format!("{CPUS}/cpufreq/policy{id}");
            (cpu, self.khz(root, cpu, &cpufreq))
        })
        .collect()
    }

    /// Whether the capacities are those that Linux computes with these references
    /// (`topology_normalize_cpu_scale()`); `None` where the device tree doesn't tell.
    fn explains(self, root: &HostRoot) -> Option<bool> {
        let references = self.references(root);
        let rows = references.into_iter().map(|(cpu, khz)| {
            let raw = root.cell(format!("{CPUS}/cpu{cpu}/of_node/capacity-dmips-mhz"))?;
            let capacity = root.number::<u64>(format!("{CPUS}/cpu{cpu}/cpu_capacity"))?;
            Some((capacity, u64::from(raw) * u64::from(khz?)))
        });
        let rows = rows.collect::<Option<Vec<_>>>()?;
        let largest = rows.iter().map(|(_, product)| *product).max()?.max(1);
        Some(rows.into_iter().all(|(capacity, product)| {
            u128::from(capacity) == (u128::from(product) << 10) / u128::from(largest)
        }))
    }
}

fn is_scmi(root: &HostRoot) -> bool {
    has_driver(root, &[SCMI])
}

/// By procfs, else by the drivers.
fn is_x86(root: &HostRoot) -> bool {
    let processors = root.text("proc/cpuinfo").unwrap_or_default();
    processors.contains("vendor_id") || has_driver(root, &OF_X86)
}

fn has_driver(root: &HostRoot, any_of: &[&str]) -> bool {
    let mut policies = topology::policies(root).into_iter();
    policies.any(|(id, _)| {
        let driver = root.text(format!("{CPUS}/cpufreq/policy{id}/scaling_driver"));
        driver.is_some_and(|driver| any_of.contains(&&*driver))
    })
}

/// What `acpi_cppc` shows of a pCPU.
struct CppcPerf {
    highest: u64,
    nominal: u64,
    lowest: u64,
    lowest_mhz: u64,
    nominal_mhz: u64,
}

impl CppcPerf {
    fn read(root: &HostRoot, cpu: u32) -> Option<Self> {
        let dir = format!("{CPUS}/cpu{cpu}");
        let number = |name| root.number::<u32>(format!("{dir}/acpi_cppc/{name}"));
        let cppc = Self {
            highest: number("highest_perf")?.into(),
            nominal: number("nominal_perf")?.into(),
            lowest: number("lowest_perf")?.into(),
            lowest_mhz: number("lowest_freq").unwrap_or(0).into(),
            nominal_mhz: number("nominal_freq").unwrap_or(0).into(),
        };
        let is_valid = cppc.nominal > 0 && cppc.highest >= cppc.nominal.max(cppc.lowest);
        is_valid.then_some(cppc)
    }

    /// `cppc_perf_to_khz()` of `highest_perf`: the line through the lowest and the nominal point.
    /// Without these frequencies nominal performance is the policy's maximum without boost.
    fn highest_khz(&self, nominal_khz: Option<u32>) -> Option<u32> {
        let khz = if self.lowest_mhz == 0 || self.nominal_mhz == 0 {
            u64::from(nominal_khz?) * self.highest / self.nominal
        } else {
            let (mhz, perf) = match self.nominal_mhz == self.lowest_mhz {
                true => (self.nominal_mhz, self.nominal),
                false => (
                    self.nominal_mhz.checked_sub(self.lowest_mhz)?,
                    self.nominal.checked_sub(self.lowest)?,
                ),
            };
            let at = |value: u64| (value * mhz * 1000).checked_div(perf);
            (self.nominal_mhz * 1000 + at(self.highest)?).checked_sub(at(self.nominal)?)?
        };
        u32::try_from(khz).ok().filter(|khz| *khz > 0)
    }
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;
