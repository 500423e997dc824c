// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scheduler's fair and ext servers, as debugfs shows them.
//!
//! Each reserves a share of its CPU, which schedutil takes for a minimum: no
//! clamp brings a busy CPU below it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_host::SCHED_DEBUG;
use vcpufreq_tests::LabVerdict;

use crate::harness::policy::Policy;
use crate::harness::rt_command::succeeded as rt_command;
use crate::harness::sysfs;

const SERVERS: [&str; 2] = ["fair_server", "ext_server"];
/// Ends the name of a scenario that runs without the servers.
const OFF: &str = ":fair-server-off";

/// Servers that were switched off, and what each reserved.
#[derive(Debug)]
pub struct SwitchedOff(BTreeMap<String, u64>);

impl SwitchedOff {
    /// Switches off the servers of all CPUs that are online; a kernel before Linux 6.12 has none.
    pub fn all() -> Result<Self> {
        let mut off = BTreeMap::new();
        for (file, before) in values("runtime")? {
            // The kernel refuses a write for a CPU that is offline.
            if before != 0 && sysfs::write(&file, 0).is_ok() {
                off.insert(file, before);
            }
        }
        Ok(Self(off))
    }

    /// Puts back what each reserved.
    pub fn restore(self) -> Result<()> {
        for (file, before) in self.0 {
            sysfs::write(file, before)?;
        }
        Ok(())
    }
}

/// The file with this name of each server of each CPU, and what is in it.
fn values(name: &str) -> Result<BTreeMap<String, u64>> {
    let mut files = BTreeMap::new();
    for server in SERVERS {
        let folder = format!("{SCHED_DEBUG}/{server}");
        if !Path::new(&folder).exists() {
            continue;
        }
        for cpu in fs::read_dir(folder)? {
            let file = cpu?.path().join(name).display().to_string();
            let value = sysfs::number(&file)?;
            files.insert(file, value);
        }
    }
    Ok(files)
}

/// What the fair servers of a policy's CPUs stand for, in kHz: worked out here anew, not taken from
/// the product. No sched_ext scheduler runs, so that the ext servers reserve nothing.
pub fn floor_khz(policy: &Policy) -> Result<u32> {
    let mut most = 0;
    for cpu in &policy.cpus {
        let file = |name| format!("{SCHED_DEBUG}/fair_server/cpu{cpu}/{name}");
        if !Path::new(&file("runtime")).exists() {
            continue;
        }
        let runtime: u64 = sysfs::number(file("runtime"))?;
        let period: u64 = sysfs::number(file("period"))?;
        most = most.max(runtime * 1024 / period.max(1));
    }
    let khz = u64::from(policy.reference) * most / u64::from(policy.capacity.max(1));
    Ok(u32::try_from(khz)?)
}

/// Each policy's floor by doctor and by this module; and whether all are the same.
pub fn doctors(said: &Value) -> Result<(bool, Value)> {
    let none = Vec::new();
    let said = said["floors"].as_array().unwrap_or(&none);
    let mut is = Vec::new();
    for policy in Policy::all()? {
        let khz = floor_khz(&policy)?;
        let below: Vec<u32> = policy
            .opps
            .iter()
            .copied()
            .filter(|opp| *opp < khz)
            .collect();
        is.push(json!({
            "khz": khz, "opps_below_khz": below, "lowest_khz": policy.at_least(khz),
        }));
    }
    let same = |(said, is): (&Value, &Value)| {
        let keys = ["khz", "opps_below_khz", "lowest_khz"];
        keys.iter().all(|key| said[key] == is[key]) && said["reserved"]["known"].is_u64()
    };
    let all = said.len() == is.len() && said.iter().zip(&is).all(same);
    Ok((all, json!({ "is": is, "said": said })))
}

/// The scenario whose name this is without its end, if it is to run without the servers.
pub fn scenario_without(name: &str) -> Option<&str> {
    name.strip_suffix(OFF)
}

/// Runs a scenario without the servers: `vcpufreq rt` takes them away and brings them back.
pub fn without(scenario: impl FnOnce() -> Result<LabVerdict>) -> Result<LabVerdict> {
    let before = (values("runtime")?, values("period")?);
    ensure!(!before.0.is_empty(), "this kernel has no fair server");
    rt_command(&["apply", "--profile", "no-fair-server"])?;
    // With exit code 0: all is set.
    rt_command(&["check"]).context("after apply")?;
    let gone = values("runtime")?.values().all(|runtime| *runtime == 0);
    let result = scenario();
    rt_command(&["restore"])?;
    let verdict = result?;
    let after = (values("runtime")?, values("period")?);
    let restored = after == before;
    let servers = json!({ "servers": before.0.len(), "off": gone, "restored": restored });
    Ok(verdict
        .check("the servers were off", gone, ())
        .check("the servers are restored", restored, after)
        .figure("fair_server", servers))
}
