// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scenarios: each is a function from a settled host to a result, an
//! object with `held` and what was counted.

mod boot;

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::sysfs;

/// Carries out a scenario by name.
pub fn run(name: &str) -> Result<Value> {
    match name {
        "boot" => boot::run(),
        _ => bail!("no such scenario"),
    }
}

/// CPUs of the host that share a clock.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Its folder in sysfs.
    pub path: String,
    /// Its CPUs.
    pub cpus: Vec<u32>,
    /// Its frequencies in kHz, rising.
    pub opps: Vec<u32>,
    /// `cpu_capacity` of its CPUs.
    pub capacity: u32,
}

impl Policy {
    /// All policies, by their first CPU.
    pub fn all() -> Result<Vec<Self>> {
        let mut policies = Vec::new();
        for entry in std::fs::read_dir(sysfs::CPUFREQ)? {
            let path = entry?.path().display().to_string();
            let cpus = sysfs::numbers(format!("{path}/related_cpus"))?;
            let mut opps = sysfs::numbers(format!("{path}/scaling_available_frequencies"))?;
            opps.sort_unstable();
            let first = cpus.first().copied().unwrap_or_default();
            let capacity =
                sysfs::number(format!("/sys/devices/system/cpu/cpu{first}/cpu_capacity"))?;
            policies.push(Self {
                path,
                cpus,
                opps,
                capacity,
            });
        }
        policies.sort_by_key(|policy| policy.cpus.first().copied());
        Ok(policies)
    }

    /// The first of its CPUs.
    pub fn cpu(&self) -> u32 {
        self.cpus.first().copied().unwrap_or_default()
    }

    /// The frequency that it runs at now, in kHz.
    pub fn khz(&self) -> Result<u32> {
        sysfs::number(format!("{}/scaling_cur_freq", self.path))
    }

    /// Its lowest frequency.
    pub fn min(&self) -> u32 {
        self.opps.first().copied().unwrap_or_default()
    }

    /// Its highest frequency.
    pub fn max(&self) -> u32 {
        self.opps.last().copied().unwrap_or_default()
    }

    /// The clamp that policy shall compute for a request of a vCPU that
    /// mirrors a CPU of it: worked out here anew, not taken from the device.
    pub fn util(&self, khz: u32) -> u32 {
        let util = u64::from(self.capacity) * u64::from(khz) / u64::from(self.max().max(1));
        u32::try_from(util).unwrap_or(u32::MAX)
    }
}

/// Lets the host's ticks pass: a new clamp shows in the frequency at the
/// next scheduler event, at the latest the next tick but one (4 ms each).
pub fn let_ticks_pass() {
    std::thread::sleep(Duration::from_millis(40));
}
