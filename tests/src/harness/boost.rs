// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boost: OPPs that the host uses only while it is switched on.

use anyhow::{Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::policy::Policy;
use crate::harness::sysfs;

/// Ends the name of a scenario that runs with boost.
const ON: &str = ":boost";
const SWITCH: &str = "/sys/devices/system/cpu/cpufreq/boost";

/// The scenario whose name this is without its end, if it is to run with boost.
pub fn scenario_with(name: &str) -> Option<&str> {
    name.strip_suffix(ON)
}

/// Runs a scenario with boost, which was off when the policies were made.
pub fn with(scenario: impl FnOnce() -> Result<LabVerdict>) -> Result<LabVerdict> {
    let before = limits()?;
    sysfs::write(SWITCH, 1)?;
    let on = limits()?;
    ensure!(on != before, "no policy has a boost OPP");
    let result = scenario();
    sysfs::write(SWITCH, 0)?;
    let verdict = result?;
    let after = limits()?;
    let restored = after == before;
    let boost = json!({ "limits_khz": on, "without_khz": before, "restored": restored });
    Ok(verdict
        .check("the limits are restored", restored, after)
        .figure("boost", boost))
}

fn limits() -> Result<Vec<u32>> {
    let policies = Policy::all()?.into_iter();
    Ok(policies.map(|policy| policy.limit).collect())
}
