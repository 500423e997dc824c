// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! While a sched_ext scheduler runs, the ext server's share is the floor: in place of the fair
//! server's, or beside it where the scheduler leaves fair tasks. Doctor's value of it beside what
//! a busy CPU under a ceiling of 0 runs at.

use std::ffi::OsStr;
use std::process::Command;

use anyhow::{Context, Result};
use libbpf_rs::{Link, MapCore, Object, ObjectBuilder};
use serde_json::{Value, json};
use vcpufreq_host::SCHED_DEBUG;
use vcpufreq_tests::LabVerdict;

use crate::harness::policy::Policy;
use crate::harness::wait::{SOON, wait_until};
use crate::harness::{sysfs, uclamp};

const OBJECT: &str = "/lab/bpf/scheduler.bpf.o";
/// Whether a sched_ext scheduler runs.
pub const STATE: &str = "/sys/kernel/sched_ext/state";
/// Other than the fair server's 50 ms, for the two to differ.
const RUNTIME_NS: u64 = 100_000_000;

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.first().context("no policy")?;
    let file = |cpu| format!("{SCHED_DEBUG}/ext_server/cpu{cpu}/runtime");
    let before: u64 = sysfs::number(file(policy.cpu()))?;
    let set = |runtime: u64| -> Result<()> {
        policy
            .cpus
            .iter()
            .try_for_each(|cpu| sysfs::write(file(*cpu), runtime))
    };
    set(RUNTIME_NS)?;
    let fair = look(policy)?;
    let takes_all = ExtScheduler::start("takes_all")?;
    let all = look(policy)?;
    set(0)?;
    let none = look(policy)?;
    set(RUNTIME_NS)?;
    takes_all.end()?;
    let takes_few = ExtScheduler::start("takes_few")?;
    let few = said(policy)?;
    takes_few.end()?;
    set(before)?;
    let after = look(policy)?;
    let figures = json!({
        "fair": fair, "takes_all": all, "takes_all_without_server": none,
        "takes_few_util": few, "after": after,
    });
    // 50 and 100 ms of 1 s, of 1024.
    Ok(LabVerdict::with_figures(figures)
        .check_eq("the fair server's alone", &fair, at(policy, 51))
        .check_eq("with a scheduler of all tasks", &all, at(policy, 102))
        .check_eq("without its server", &none, at(policy, 0))
        .check_eq("with one of few tasks", &few, 153)
        .check_eq("afterwards", &after, at(policy, 51)))
}

/// The utilization that doctor names, and the lowest frequency of a busy CPU under a ceiling of 0.
fn look(policy: &Policy) -> Result<(u64, u32)> {
    let util = said(policy)?;
    Ok((util, uclamp::lowest_khz(policy, policy.cpu())?))
}

/// What both are to be.
fn at(policy: &Policy, util: u32) -> (u64, u32) {
    let khz = u64::from(policy.max()) * u64::from(util) / u64::from(policy.capacity);
    let khz = u32::try_from(khz).unwrap_or(u32::MAX);
    (util.into(), policy.at_least(khz))
}

/// The reserved share by doctor.
fn said(policy: &Policy) -> Result<u64> {
    let output = Command::new("/bin/vcpufreq")
        .args(["doctor", "--json"])
        .output()?;
    let said: Value = serde_json::from_slice(&output.stdout).context("doctor --json")?;
    let floors = said["floors"].as_array().context("no floors")?;
    let mut own = floors
        .iter()
        .filter(|floor| policy.path.ends_with(&format!("policy{}", floor["policy"])));
    let floor = own.next().context("a policy without a floor")?;
    floor["reserved"]["known"]
        .as_u64()
        .with_context(|| format!("not known: {floor}"))
}

/// A sched_ext scheduler that runs as long as the link is there.
pub struct ExtScheduler {
    link: Link,
    _object: Object,
}

impl ExtScheduler {
    /// Starts it by its name in the object.
    pub fn start(name: &str) -> Result<Self> {
        let object = ObjectBuilder::default().open_file(OBJECT)?;
        let mut object = object.load().context(OBJECT)?;
        let link = {
            let mut maps = object.maps_mut();
            let mut map = maps
                .find(|map| map.name() == OsStr::new(name))
                .with_context(|| format!("no {name}"))?;
            map.attach_struct_ops()?
        };
        until("enabled")?;
        Ok(Self {
            link,
            _object: object,
        })
    }

    /// Ends it.
    pub fn end(self) -> Result<()> {
        drop(self.link);
        until("disabled")
    }
}

/// Waits for a state of sched_ext.
pub fn until(state: &str) -> Result<()> {
    let is_so = || Ok(sysfs::text(STATE)? == state);
    wait_until(&format!("sched_ext {state}"), 10 * SOON, is_so)
}
