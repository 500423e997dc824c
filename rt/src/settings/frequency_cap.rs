// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What keeps CPUs below their highest frequency at this moment: cooling devices, and limits of the
//! firmware and of programs.
//!
//! cpufreq's core takes the lowest of all limits as a policy's maximum and shows it in
//! `scaling_max_freq`; `cpuinfo_max_freq` stays the CPU's own. A cooling device works while its
//! `cur_state` is above 0. Its `type` names the CPUs: `cpufreq-cpuN` from Linux 5.13 on, where CPU N
//! is one of the policy's; before, `thermal-cpufreq-N`, where N is a serial number
//! (drivers/thermal/cpufreq_cooling.c); with ACPI `Processor`, which has a link to its CPU
//! (drivers/acpi/processor_thermal.c).
//!
//! It is no history: a cap between two looks isn't seen. Throttling that the hardware does by
//! itself shows in none of these files.

use std::{collections::BTreeSet, fmt};

use serde::Serialize;
use vcpufreq_host::CpuList;

use super::{CPU, policies::policies};
use vcpufreq_host::undo::ReadHost;

const COOLING: &str = "/sys/class/thermal";

/// A bound on the frequency of a policy's CPUs below their own maximum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FrequencyCap {
    /// The policy's CPUs that are online.
    pub cpus: CpuList,
    /// `scaling_max_freq`, kHz.
    pub khz: u64,
    /// `cpuinfo_max_freq`, kHz.
    pub max_khz: u64,
    /// What holds them down: cooling devices by their types, else a file of the policy.
    pub by: Vec<String>,
}

impl FrequencyCap {
    /// `at most 1400000 of 2800000 kHz, by cooling device cpufreq-cpuN`: the same for all policies
    /// of which it is so, though each has a device of its own.
    #[must_use]
    pub fn alike(&self) -> String {
        let kind = |by: &String| match by.trim_end_matches(|c: char| c.is_ascii_digit()) {
            name if name.len() < by.len() => format!("{name}N"),
            name => name.to_owned(),
        };
        let kinds: BTreeSet<_> = self.by.iter().map(kind).collect();
        self.bound(kinds)
    }

    fn bound(&self, by: impl IntoIterator<Item = String>) -> String {
        let by: Vec<_> = by.into_iter().collect();
        let Self { khz, max_khz, .. } = self;
        format!("at most {khz} of {max_khz} kHz, by {}", by.join(" and "))
    }
}

impl fmt::Display for FrequencyCap {
    /// `CPU 2-3: at most 1400000 of 2800000 kHz, by cooling device cpufreq-cpu2`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU {}: {}", self.cpus, self.bound(self.by.clone()))
    }
}

/// The caps of the policies that have one of these CPUs.
#[must_use]
pub fn frequency_caps(look: &dyn ReadHost, cpus: &CpuList) -> Vec<FrequencyCap> {
    let policies = policies(look, cpus).into_iter();
    let caps = policies.filter_map(|(dir, cpus)| policy_cap(look, &dir, &cpus));
    caps.collect()
}

/// The cap of the policy in this folder, if it has one.
pub(super) fn policy_cap(look: &dyn ReadHost, dir: &str, cpus: &CpuList) -> Option<FrequencyCap> {
    let number = |name: &str| u64::try_from(look.number(&format!("{dir}/{name}"))?).ok();
    let (khz, max_khz) = (number("scaling_max_freq")?, number("cpuinfo_max_freq")?);
    let mut by = cooling_devices(look, dir, khz);
    if by.is_empty() {
        let firmware = number("bios_limit").filter(|limit| *limit < max_khz && *limit <= khz);
        by.push(
            firmware
                .map_or("scaling_max_freq", |_| "bios_limit")
                .to_owned(),
        );
    }
    (khz < max_khz).then(|| FrequencyCap {
        cpus: cpus.clone(),
        khz,
        max_khz,
        by,
    })
}

/// The cooling devices that hold the policy in `dir` down to `khz`.
fn cooling_devices(look: &dyn ReadHost, dir: &str, khz: u64) -> Vec<String> {
    let names = look.list(COOLING).unwrap_or_default().into_iter();
    let names = names.filter(|name| name.starts_with("cooling_device"));
    let works = names.filter_map(|name| {
        let folder = format!("{COOLING}/{name}");
        let state = look.number(&format!("{folder}/cur_state"));
        let state = usize::try_from(state?).ok().filter(|state| *state > 0)?;
        let kind = look.read(&format!("{folder}/type")).ok()?;
        let is_of = match kind.split_once('-') {
            Some(("cpufreq", cpu)) => is_of_policy(look, dir, cpu),
            Some(("thermal", _)) if kind.starts_with("thermal-cpufreq-") => {
                nth_from_top(look, dir, state).is_none_or(|of| of == khz)
            }
            None if kind == "Processor" => look
                .link_name(&format!("{folder}/device/physical_node"))
                .is_some_and(|cpu| is_of_policy(look, dir, &cpu)),
            _ => false,
        };
        is_of.then(|| format!("cooling device {kind}"))
    });
    works.collect()
}

/// Whether a CPU, named as in sysfs, is one of the policy's, offline or not.
fn is_of_policy(look: &dyn ReadHost, dir: &str, cpu: &str) -> bool {
    let number = cpu.strip_prefix("cpu").and_then(|cpu| cpu.parse().ok());
    let related = look.read(&format!("{dir}/related_cpus"));
    let related = related.or_else(|_| look.read(&format!("{dir}/affected_cpus")));
    let cpus: CpuList = related
        .ok()
        .and_then(|text| text.replace(' ', ",").parse().ok())
        .unwrap_or_default();
    number.is_some_and(|cpu| cpus.contains(cpu))
}

/// The frequency that a state of a cooling device stands for: state 0 is the highest, those of boost
/// included. Unknown where the driver lists none.
fn nth_from_top(look: &dyn ReadHost, dir: &str, state: usize) -> Option<u64> {
    let listed = |name: &str| look.read(&format!("{dir}/{name}")).unwrap_or_default();
    let all = ["available", "boost"].map(|of| listed(&format!("scaling_{of}_frequencies")));
    let numbers = all.iter().flat_map(|text| text.split_whitespace());
    let mut khz: Vec<u64> = numbers.filter_map(|khz| khz.parse().ok()).collect();
    khz.sort_unstable();
    khz.dedup();
    khz.into_iter().nth_back(state)
}

/// The file by which boost is off for the policy in `dir`, if it is.
pub(super) fn boost_off(look: &dyn ReadHost, dir: &str) -> Option<String> {
    let files = [format!("{dir}/boost"), format!("{CPU}/cpufreq/boost")];
    files.into_iter().find(|file| look.number(file) == Some(0))
}
