// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which pCPUs a host has, and which of them share a cpufreq policy. A file that is missing or
//! makes no sense leaves its pCPUs out.

#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use super::HostRoot;
use super::text::parse_cpu_list;

/// The pCPUs that this host can have.
#[must_use]
pub fn possible_pcpus(root: &HostRoot) -> Vec<u32> {
    list(&root.cpus().join("possible")).unwrap_or_default()
}

/// The pCPUs that this host has, offline ones too.
#[must_use]
pub fn present_pcpus(root: &HostRoot) -> Vec<u32> {
    let list = |name| list(&root.cpus().join(name));
    list("present")
        .or_else(|| list("online"))
        .unwrap_or_default()
}

/// The number of each cpufreq policy, as in `policy4`, and its pCPUs, offline ones too; by number.
#[must_use]
pub fn policies(root: &HostRoot) -> Vec<(u32, Vec<u32>)> {
    let dir = root.cpus().join("cpufreq");
    let entries = fs::read_dir(&dir).into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let numbers = names.filter_map(|name| name.strip_prefix("policy")?.parse::<u32>().ok());
    let policies = numbers.filter_map(|number| {
        let path = dir.join(format!("policy{number}/related_cpus"));
        Some((number, list(&path)?))
    });
    let mut policies: Vec<_> = policies.collect();
    policies.sort_unstable();
    policies
}

/// cpufreq's lists have blanks in the place of commas.
fn list(path: &Path) -> Option<Vec<u32>> {
    let text = fs::read_to_string(path).ok()?;
    parse_cpu_list(&text.trim().replace(' ', ","))
}

/// Rising numbers in the kernel's list syntax, ranges joined: `0,2-3`.
#[must_use]
pub fn cpu_list_text(pcpus: &[u32]) -> String {
    let runs = pcpus.chunk_by(|a, b| a + 1 == *b);
    let runs = runs.filter_map(|run| match run {
        [one] => Some(one.to_string()),
        [first, .., last] => Some(format!("{first}-{last}")),
        [] => None,
    });
    runs.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    //! Lists are read in both of the kernel's forms, and written in its usual one.
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
        let expected = [(0, vec![0, 1, 2, 3]), (4, vec![4, 5, 6])];
        assert_eq!(policies(&root), expected);
    }

    #[test]
    fn pcpus_that_are_offline_are_present() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::at(dir.path());
        fs::create_dir_all(root.cpus()).unwrap();
        assert_eq!(present_pcpus(&root), [0_u32; 0]);
        fs::write(root.cpus().join("online"), "0,2\n").unwrap();
        assert_eq!(present_pcpus(&root), [0, 2]);
        fs::write(root.cpus().join("present"), "0-2\n").unwrap();
        assert_eq!(present_pcpus(&root), [0, 1, 2]);
    }

    #[test]
    fn ranges_are_joined() {
        let cases: [(&[u32], &str); 4] = [
            (&[], ""),
            (&[3], "3"),
            (&[0, 1, 2], "0-2"),
            (&[0, 2, 3, 7], "0,2-3,7"),
        ];
        for (pcpus, text) in cases {
            assert_eq!(cpu_list_text(pcpus), text);
        }
    }
}
