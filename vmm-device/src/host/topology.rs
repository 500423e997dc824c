// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which pCPUs a host has, and which of them share a cpufreq policy. A file that is missing or
//! makes no sense leaves its pCPUs out.

#![forbid(unsafe_code)]

use std::fs;

use super::cpu_list::CpuList;
use super::root::{CPUS, HostRoot};

/// The pCPUs that this host can have.
#[must_use]
pub fn possible_pcpus(root: &HostRoot) -> CpuList {
    let possible = root.number(format!("{CPUS}/possible"));
    possible.unwrap_or_default()
}

/// The pCPUs that this host has, offline ones too.
#[must_use]
pub fn present_pcpus(root: &HostRoot) -> CpuList {
    let list = |name| root.number(format!("{CPUS}/{name}"));
    list("present")
        .or_else(|| list("online"))
        .unwrap_or_default()
}

/// The number of each cpufreq policy, as in `policy4`, and its pCPUs, offline ones too; by number.
#[must_use]
pub fn policies(root: &HostRoot) -> Vec<(u32, CpuList)> {
    let entries = fs::read_dir(root.cpus().join("cpufreq"));
    let entries = entries.into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let numbers = names.filter_map(|name| name.strip_prefix("policy")?.parse::<u32>().ok());
    let policies = numbers.filter_map(|number| {
        let list = root.text(format!("{CPUS}/cpufreq/policy{number}/related_cpus"))?;
        // cpufreq's lists have blanks in the place of commas.
        Some((number, list.replace(' ', ",").parse().ok()?))
    });
    let mut policies: Vec<_> = policies.collect();
    policies.sort_unstable_by_key(|(number, _)| *number);
    policies
}

#[cfg(test)]
mod tests {
    //! Lists are read in both of the kernel's forms.
    use super::*;

    #[test]
    fn policies_are_listed_by_number() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::at(dir.path());
        assert_eq!(policies(&root), []);
        for (number, cpus) in [(4, "4 5 6\n"), (0, "0 1 2 3\n"), (7, "?\n")] {
            let policy = root.cpus().join(format!("cpufreq/policy{number}"));
            fs::create_dir_all(&policy).unwrap();
            fs::write(policy.join("related_cpus"), cpus).unwrap();
        }
        let list = |cpus: &[u32]| cpus.iter().copied().collect::<CpuList>();
        let expected = [(0, list(&[0, 1, 2, 3])), (4, list(&[4, 5, 6]))];
        assert_eq!(policies(&root), expected);
    }

    #[test]
    fn pcpus_that_are_offline_are_present() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::at(dir.path());
        fs::create_dir_all(root.cpus()).unwrap();
        assert_eq!(present_pcpus(&root).as_slice(), [0_u32; 0]);
        fs::write(root.cpus().join("online"), "0,2\n").unwrap();
        assert_eq!(present_pcpus(&root).as_slice(), [0, 2]);
        fs::write(root.cpus().join("present"), "0-2\n").unwrap();
        assert_eq!(present_pcpus(&root).as_slice(), [0, 1, 2]);
    }
}
