// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt` on a kernel that is not PREEMPT_RT: features that an RT kernel lacks (expedited
//! grace periods), a highest frequency below the CPU's own, and each governor. After plan → apply →
//! check → restore all is as before.

use std::fs;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::inventory::{Inventory, changes, everything};
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::rt_command::{json_of, succeeded};
use crate::harness::sysfs;

const PROFILE: &str = "/run/standard.toml";
const EXPEDITED: &str = "/sys/kernel/rcu_expedited";

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let cpu = *policy.cpus.last().context("no CPU")?;
    let before = everything()?;
    let khz = *policy.opps.get(1).context("no second OPP")?;
    let settings = format!("rcu-expedited = 1\nmax-freq = {khz}\ngovernor = 'performance'");
    let first = there_and_back(&before, (policy, cpu), &settings)?;
    let names = ["rcu-expedited", "max-freq", "governor"];
    let effective = names
        .iter()
        .all(|name| first["effects"][name] == "effective");
    let at_work = first["expedited"] == "1" && first["runs_at_khz"] == khz;
    let mut governors = Vec::new();
    let known = sysfs::text(format!("{}/scaling_available_governors", policy.path))?;
    for name in known.split_whitespace() {
        let setting = format!("governor = '{name}'");
        governors.push(there_and_back(&before, (policy, cpu), &setting)?);
    }
    let good = |one: &Value| one["effects"]["governor"] == "effective" && one["left"] == json!([]);
    let good = governors.iter().all(good);
    let each = governors.len() == known.split_whitespace().count();
    let left = &first["left"];
    let figures = json!({ "settings": first, "governors": governors });
    Ok(LabVerdict::with_figures(figures)
        .check("settings are effective", effective, &first)
        .check("and at work", at_work, &first)
        .check_eq("nothing is left", left, json!([]))
        .check(
            "each governor is effective and leaves nothing",
            good,
            &governors,
        )
        .check("each governor is tried", each, &known)
        .check("governors", governors.len() > 2, &known))
}

/// With these settings alone: the verdict of check on each, and what isn't as before after restore.
fn there_and_back(
    before: &Inventory,
    (policy, cpu): (&Policy, u32),
    settings: &str,
) -> Result<Value> {
    fs::write(PROFILE, format!("[settings]\n{settings}\n"))?;
    let guest = format!("plc={cpu}");
    succeeded(&["apply", "--profile", PROFILE, "--guest", &guest])?;
    let expedited = sysfs::text(EXPEDITED)?;
    let runs_at = policy.khz()?;
    let check = json_of(&["check", "--json"])?;
    let none = Vec::new();
    let checked = check["settings"].as_array().unwrap_or(&none);
    let effects = checked.iter().map(|one| {
        let name = one["name"].as_str().unwrap_or_default().to_owned();
        let is_set = one["unset"] == json!([]);
        let effect = if is_set {
            one["effect"].clone()
        } else {
            one["unset"].clone()
        };
        (name, effect)
    });
    let effects: serde_json::Map<String, Value> = effects.collect();
    succeeded(&["restore"])?;
    let left = changes(before, &everything()?);
    Ok(json!({
        "asked": settings, "effects": effects, "expedited": expedited, "runs_at_khz": runs_at,
        "left": left,
    }))
}
