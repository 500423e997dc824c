// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A model of what Linux 6.8 and later make of a board, independent of the product: capacities of
//! `drivers/base/arch_topology.c`, limits of `drivers/cpufreq`, choices of schedutil.

use crate::facts::{BoardFacts, CppcFacts, PolicyFacts};

const SCALE: u64 = 1024;

/// A CPU of a running host.
pub struct LinuxCpu {
    /// The first CPU of its policy.
    pub policy: u32,
    /// `arch_scale_cpu_capacity()`, which sysfs shows as `cpu_capacity`.
    pub capacity: u64,
    /// `arch_scale_freq_ref()` in kHz.
    pub reference: u64,
    /// Performance per MHz in any unit, with which the kernel began.
    pub per_mhz: u64,
    /// `cpuinfo_max_freq`.
    pub max_khz: u64,
    /// Its frequency table, rising; empty with CPPC.
    pub table: Vec<u64>,
}

/// The CPUs of a host that boots without boost, and on which it is then on or off.
pub fn boot(board: &BoardFacts, boost: bool) -> Vec<LinuxCpu> {
    let mut cpus = Vec::new();
    for (first, policy) in board.policies() {
        for _ in 0..policy.cpus {
            cpus.push(cpu(first, &policy, boost));
        }
    }
    normalize(&mut cpus);
    cpus
}

fn cpu(first: u32, policy: &PolicyFacts, boost: bool) -> LinuxCpu {
    let (plain, boosted) = policy.listed();
    let table: Vec<u64> = policy.khz().into_iter().map(u64::from).collect();
    let top = |khz: &[u32]| khz.last().copied().map(u64::from);
    let (reference, max_khz) = match &policy.cppc {
        // topology_init_cpu_capacity_cppc(): at highest_perf, whatever boost is.
        Some(cppc) => {
            let highest = khz_of(cppc, cppc.highest_perf);
            let nominal = khz_of(cppc, cppc.nominal_perf);
            (highest, if boost { highest } else { nominal })
        }
        // init_cpu_capacity_callback(): cpuinfo.max_freq of when the policy is made.
        None => {
            let reference = top(plain).unwrap();
            let boosted = top(boosted).filter(|_| boost);
            (reference, boosted.unwrap_or(reference))
        }
    };
    LinuxCpu {
        policy: first,
        capacity: SCALE,
        per_mhz: policy.dmips_mhz.map_or(0, u64::from),
        reference,
        max_khz,
        table,
    }
}

/// `cppc_perf_to_khz()` of `drivers/acpi/cppc_acpi.c`.
fn khz_of(cppc: &CppcFacts, perf: u64) -> u64 {
    let khz = (cppc.nominal_mhz - cppc.lowest_mhz) * 1000;
    let steps = cppc.nominal_perf - cppc.lowest_perf;
    let offset = cppc.nominal_mhz * 1000 - cppc.nominal_perf * khz / steps;
    offset + perf * khz / steps
}

/// `topology_normalize_cpu_scale()`. A tree that gives no performance leaves all at 1024, each at its
/// own reference.
fn normalize(cpus: &mut [LinuxCpu]) {
    let products = capacities(cpus.iter().map(|cpu| (cpu.per_mhz, cpu.reference)));
    if cpus.iter().all(|cpu| cpu.per_mhz > 0) {
        for (cpu, capacity) in cpus.iter_mut().zip(products) {
            cpu.capacity = capacity;
        }
    } else {
        for cpu in cpus {
            cpu.per_mhz = (SCALE << 32) / cpu.reference;
        }
    }
}

/// The capacities of CPUs with this performance per MHz and these frequencies in kHz.
pub fn capacities(cpus: impl Iterator<Item = (u64, u64)>) -> Vec<u64> {
    let raw: Vec<u64> = cpus.map(|(per_mhz, khz)| per_mhz * khz).collect();
    let most = raw.iter().copied().max().unwrap_or(1).max(1);
    raw.iter().map(|raw| (raw << 10) / most).collect()
}

impl LinuxCpu {
    /// What schedutil runs it at while uclamp holds its utilization at `util`: `get_next_freq()`,
    /// then `cpufreq_driver_resolve_freq()`.
    pub fn runs_at(&self, util: u64) -> u64 {
        let wanted = (self.reference * util / self.capacity).min(self.max_khz);
        let mut possible = self.table.iter().filter(|khz| **khz <= self.max_khz);
        possible
            .find(|khz| **khz >= wanted)
            .copied()
            .unwrap_or(wanted)
    }

    /// The highest frequency that a clamp can bring it to: a utilization is at most 1024.
    pub fn highest(&self) -> u64 {
        self.runs_at(SCALE)
    }
}
