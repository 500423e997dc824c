// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's energy model as debugfs shows it (`kernel/power/energy_model.c`):
//! `energy_model/cpuN/ps:KHZ/{frequency,power}`, one directory per performance
//! domain, named after its first CPU.

use super::{CpuList, HostRoot};

/// Where debugfs has the performance domains.
pub const ENERGY_MODEL_DIR: &str = "sys/kernel/debug/energy_model";

/// `EM_PERF_DOMAIN_MICROWATTS`: power is in µW.
const MICROWATTS: u32 = 1 << 0;
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
    let flags = root.text(format!("{dir}/flags")).unwrap_or_default();
    let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or(0);
    if flags & (MICROWATTS | ARTIFICIAL) != MICROWATTS {
        return Vec::new();
    }
    let Ok(states) = std::fs::read_dir(root.path(&dir)) else {
        return Vec::new();
    };
    states
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("ps:"))
        .filter_map(|name| {
            let file = |what| format!("{dir}/{name}/{what}");
            Some((root.number(file("frequency"))?, root.number(file("power"))?))
        })
        .collect()
}
