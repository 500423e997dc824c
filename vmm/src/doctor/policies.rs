// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A line on cpufreq policies: what each has, and its CPUs; which of them, by their numbers.

use vcpufreq_host::{CpuList, CpufreqPolicy};

/// `CPUs 0-3: NAME, CPUs 4-7: OTHER`
pub fn per_policy(policies: &[CpufreqPolicy], value: impl Fn(&CpufreqPolicy) -> &str) -> String {
    let mut groups: Vec<(String, CpuList)> = Vec::new();
    for policy in policies {
        match groups.iter_mut().find(|(name, _)| name == value(policy)) {
            Some((_, cpus)) => *cpus = cpus.or(&policy.cpus),
            None => groups.push((value(policy).to_owned(), policy.cpus.clone())),
        }
    }
    let texts = groups
        .iter()
        .map(|(name, cpus)| format!("{name} (CPUs {cpus})"));
    texts.collect::<Vec<_>>().join(", ")
}

/// `0,2-95`, as the N of `policyN`; `None` without any.
pub fn numbers(ids: impl IntoIterator<Item = u32>) -> Option<String> {
    let ids: CpuList = ids.into_iter().collect();
    (!ids.is_empty()).then(|| ids.to_string())
}
