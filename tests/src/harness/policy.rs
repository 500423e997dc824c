// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's cpufreq policies, as sysfs shows them.

use anyhow::Result;

use crate::harness::sysfs;

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
    /// All policies with a CPU online, by their first CPU.
    pub fn all() -> Result<Vec<Self>> {
        let mut policies = Vec::new();
        for entry in std::fs::read_dir(sysfs::CPUFREQ)? {
            let path = entry?.path().display().to_string();
            let cpus = sysfs::numbers(format!("{path}/related_cpus"))?;
            let mut opps = sysfs::numbers(format!("{path}/scaling_available_frequencies"))?;
            opps.sort_unstable();
            // An offline CPU has no such file.
            let online = sysfs::numbers(format!("{path}/affected_cpus"))?;
            let Some(cpu) = online.first() else { continue };
            let capacity = sysfs::number(format!("/sys/devices/system/cpu/cpu{cpu}/cpu_capacity"))?;
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

    /// The lowest of its frequencies that is at least this one.
    pub fn at_least(&self, khz: u32) -> u32 {
        let mut opps = self.opps.iter().copied();
        opps.find(|opp| *opp >= khz).unwrap_or_else(|| self.max())
    }

    /// The clamp that policy shall compute for a request of a vCPU that
    /// mirrors a CPU of it: worked out here anew, not taken from the device.
    pub fn util(&self, khz: u32) -> u32 {
        let util = u64::from(self.capacity) * u64::from(khz) / u64::from(self.max().max(1));
        u32::try_from(util).unwrap_or(u32::MAX)
    }
}
