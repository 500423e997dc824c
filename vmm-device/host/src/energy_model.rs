// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's energy model as debugfs shows it (`kernel/power/energy_model.c`):
//! `energy_model/cpuN/ps:KHZ/{frequency,power}`, one directory per performance
//! domain, named after its first CPU.

use super::{CpuList, HostRoot};

/// Where debugfs has the performance domains.
pub const ENERGY_MODEL_DIR: &str = "sys/kernel/debug/energy_model";

/// `EM_PERF_DOMAIN_MICROWATTS`: power is in µW. Before Linux 6.0 the same bit was
/// `EM_PERF_DOMAIN_MILLIWATTS`.
const WATTS: u32 = 1 << 0;
const MICROWATTS_SINCE: (u32, u32) = (6, 0);
/// `EM_PERF_DOMAIN_ARTIFICIAL`: power was made up from capacities.
const ARTIFICIAL: u32 = 1 << 2;

/// Frequency (kHz) and power (µW) of each performance state of the domain of
/// `cpus`, in no order. Empty without a model, or when its power is in
/// another unit.
pub fn of_cpus(root: &HostRoot, cpus: &CpuList) -> Vec<(u32, u32)> {
    let dir = |cpu| format!("{ENERGY_MODEL_DIR}/cpu{cpu}");
    let Some(dir) = cpus.iter().map(dir).find(|dir| root.path(dir).is_dir()) else {
        return Vec::new();
    };
    let Some(unit_uw) = unit_uw(root, &dir) else {
        return Vec::new();
    };
    let Ok(states) = std::fs::read_dir(root.path(&dir)) else {
        return Vec::new();
    };
    states
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("ps:"))
        .filter_map(|name| {
            let file = |what| format!("{dir}/{name}/{what}");
            let power: u32 = root.number(file("power"))?;
            Some((root.number(file("frequency"))?, power.checked_mul(unit_uw)?))
        })
        .collect()
}

/// The unit of a domain's power in µW; `None` where it is no power, and where flags may mean two units
/// and the kernel's version is unknown. Linux 5.11 to 5.15 have `units` in the place of flags.
fn unit_uw(root: &HostRoot, dir: &str) -> Option<u32> {
    let Some(flags) = root.text(format!("{dir}/flags")) else {
        let units = root.text(format!("{dir}/units"))?;
        return (units == "milliWatts").then_some(1000);
    };
    let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).ok()?;
    if flags & (WATTS | ARTIFICIAL) != WATTS {
        return None;
    }
    let is_milliwatts = root.kernel_version()? < MICROWATTS_SINCE;
    Some(if is_milliwatts { 1000 } else { 1 })
}
