// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's cpufreq policies, as sysfs shows them.

use std::path::Path;

use anyhow::{Context as _, Result};

use crate::harness::sysfs;

/// CPUs of the host that share a clock.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Its folder in sysfs.
    pub path: String,
    /// Its CPUs.
    pub cpus: Vec<u32>,
    /// Its frequencies in kHz, rising, those for boost too.
    pub opps: Vec<u32>,
    /// `cpu_capacity` of its CPUs, which they have at `reference`.
    pub capacity: u32,
    /// The frequency that the capacity is for: the highest that is not for boost. The kernel takes
    /// the highest of when the policy is made, and boost is off then.
    pub reference: u32,
    /// The highest frequency that it may run at now: without boost, `reference`.
    pub limit: u32,
}

impl Policy {
    /// All policies with a CPU online, by their first CPU.
    pub fn all() -> Result<Vec<Self>> {
        let mut policies = Vec::new();
        for entry in std::fs::read_dir(sysfs::CPUFREQ)? {
            let path = entry?.path().display().to_string();
            // The switch of boost is beside them.
            if !path.contains("/policy") {
                continue;
            }
            let cpus = sysfs::numbers(format!("{path}/related_cpus"))?;
            let mut opps = sysfs::numbers(format!("{path}/scaling_available_frequencies"))?;
            let reference = opps.iter().copied().max().context("no frequencies")?;
            let boost = format!("{path}/scaling_boost_frequencies");
            if Path::new(&boost).exists() {
                opps.extend(sysfs::numbers::<u32>(boost)?);
            }
            opps.sort_unstable();
            // An offline CPU has no such file.
            let online = sysfs::numbers::<u32>(format!("{path}/affected_cpus"))?;
            let Some(cpu) = online.first() else { continue };
            let capacity = sysfs::number(format!("/sys/devices/system/cpu/cpu{cpu}/cpu_capacity"))?;
            policies.push(Self {
                limit: sysfs::number(format!("{path}/cpuinfo_max_freq"))?,
                path,
                cpus,
                opps,
                capacity,
                reference,
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

    /// The frequencies that it may run at now.
    pub fn possible(&self) -> impl Iterator<Item = u32> {
        let opps = self.opps.iter().copied();
        opps.filter(|opp| *opp <= self.limit)
    }

    /// The highest frequency that schedutil chooses: it goes beyond `reference` by clamps alone, and
    /// a clamp is at most 1024. The largest CPUs therefore never run at their boost OPPs by it.
    pub fn highest(&self) -> u32 {
        let by_clamp = u64::from(self.reference) * 1024 / u64::from(self.capacity.max(1));
        let mut opps = self.opps.iter().copied();
        let highest = opps.find(|opp| u64::from(*opp) >= by_clamp);
        highest.unwrap_or_else(|| self.max()).min(self.limit)
    }

    /// The lowest of its frequencies that is at least this one, as far as schedutil goes.
    pub fn at_least(&self, khz: u32) -> u32 {
        let mut opps = self.opps.iter().copied();
        let least = opps.find(|opp| *opp >= khz).unwrap_or_else(|| self.max());
        least.min(self.highest())
    }

    /// The clamp that policy shall compute for a request of a vCPU that
    /// mirrors a CPU of it: worked out here anew, not taken from the device.
    pub fn util(&self, khz: u32) -> u32 {
        let util = u64::from(self.capacity) * u64::from(khz) / u64::from(self.reference.max(1));
        u32::try_from(util).unwrap_or(u32::MAX).min(1024)
    }
}
