// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the lab's host driver tells the kernel of its policies, as the kernel
//! shows it: cpufreq's statistics and the energy model.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::speed::power_uw;
use crate::harness::policy::Policy;
use crate::harness::sysfs;

/// `EM_PERF_DOMAIN_MICROWATTS`: power is in µW.
const MICROWATTS: u32 = 1 << 0;
/// At each OPP; and that in the statistics' unit, with what sysfs takes.
const STAY: Duration = Duration::from_millis(200);
const STAY_UNITS: std::ops::RangeInclusive<u64> = 19..=22;

/// A policy's `stats/` at a moment.
struct PolicyStats {
    /// `total_trans`.
    transitions: u64,
    /// `time_in_state`: kHz, and time in 10 ms.
    times: Vec<(u32, u64)>,
}

impl PolicyStats {
    fn of(policy: &Policy) -> Result<Self> {
        let file = |name: &str| format!("{}/stats/{name}", policy.path);
        let text = sysfs::text(file("time_in_state"))?;
        let line = |line: &str| {
            let (khz, time) = line.split_once(' ').context("time_in_state")?;
            Ok((khz.parse()?, time.parse()?))
        };
        Ok(Self {
            transitions: sysfs::number(file("total_trans"))?,
            times: text.lines().map(line).collect::<Result<_>>()?,
        })
    }

    /// Transitions since `before`, and the frequencies at which time has passed.
    fn since(&self, before: &Self) -> (u64, Vec<(u32, u64)>) {
        let spent = self.times.iter().zip(&before.times);
        let spent = spent.map(|(now, then)| (now.0, now.1 - then.1));
        let spent = spent.filter(|(_, time)| *time > 1);
        (self.transitions - before.transitions, spent.collect())
    }
}

/// Whether a policy's statistics show it at each of its OPPs for as long as it
/// is there, one transition for each.
pub fn statistics(policies: &[Policy]) -> Result<Value> {
    let mut rows = Vec::new();
    for policy in policies {
        let governor = format!("{}/scaling_governor", policy.path);
        let set = |khz: u32| sysfs::write(format!("{}/scaling_setspeed", policy.path), khz);
        sysfs::write(&governor, "userspace")?;
        set(policy.max())?;
        for &khz in &policy.opps {
            let before = PolicyStats::of(policy)?;
            set(khz)?;
            sleep(STAY);
            let (transitions, spent) = PolicyStats::of(policy)?.since(&before);
            let right = transitions == 1
                && matches!(spent[..], [(at, time)] if at == khz && STAY_UNITS.contains(&time));
            let row = json!({
                "cpu": policy.cpu(), "khz": khz, "transitions": transitions,
                "khz_and_10_ms": spent, "right": right,
            });
            rows.push(row);
        }
        sysfs::write(&governor, "schedutil")?;
    }
    Ok(rows.into())
}

/// Whether the energy model of each policy has its OPPs, with the power that
/// the device tree gives them.
pub fn energy_models(policies: &[Policy]) -> Result<Value> {
    let mut rows = Vec::new();
    for policy in policies {
        let model = format!("/sys/kernel/debug/energy_model/cpu{}", policy.cpu());
        let flags = sysfs::text(format!("{model}/flags"))?;
        let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16)?;
        let mut states = 0;
        for entry in std::fs::read_dir(&model)? {
            let name = entry?.file_name();
            states += usize::from(name.to_string_lossy().starts_with("ps:"));
        }
        let mut right = states == policy.opps.len() && flags & MICROWATTS != 0;
        for &khz in &policy.opps {
            let state = format!("{model}/ps:{khz}");
            right &= Path::new(&state).exists()
                && sysfs::number::<u32>(format!("{state}/frequency"))? == khz
                && sysfs::number::<u64>(format!("{state}/power"))? == power_uw(policy, khz)?;
        }
        rows.push(json!({ "cpu": policy.cpu(), "states": states, "right": right }));
    }
    Ok(rows.into())
}
