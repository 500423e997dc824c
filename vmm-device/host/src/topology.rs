// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which pCPUs a host has, and which of them share a cpufreq policy or a cluster. A file that is
//! missing or makes no sense leaves its pCPUs out.

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

/// The pCPUs that this host has, offline ones too. A dump of a host may lack the lists; then its
/// folders tell.
#[must_use]
pub fn present_pcpus(root: &HostRoot) -> CpuList {
    let list = |name| root.number(format!("{CPUS}/{name}"));
    let folders = || {
        let entries = fs::read_dir(root.cpus()).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let numbers = names.filter_map(|name| name.strip_prefix("cpu")?.parse::<u32>().ok());
        numbers.collect()
    };
    let listed = ["present", "online", "possible"].into_iter().find_map(list);
    listed.unwrap_or_else(folders)
}

/// Those of `present` that are online. Without the list, those whose own file says nothing else:
/// one that can't go offline has none.
pub(super) fn online_pcpus(root: &HostRoot, present: &CpuList) -> CpuList {
    let listed: Option<CpuList> = root.number(format!("{CPUS}/online"));
    let is_online = |cpu: &u32| root.number(format!("{CPUS}/cpu{cpu}/online")) != Some(0);
    listed.unwrap_or_else(|| present.iter().filter(is_online).collect())
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

/// The first Linux that takes packages from a cpu-map's sockets. Before, they were its clusters.
const SOCKETS_SINCE: (u32, u32) = (6, 0);

fn list(root: &HostRoot, pcpu: u32, name: &str) -> Option<CpuList> {
    root.number(format!("{CPUS}/cpu{pcpu}/topology/{name}"))
}

/// The threads of a pCPU's core, by the name since Linux 5.3 or before.
fn threads(root: &HostRoot, pcpu: u32) -> Option<CpuList> {
    let names = ["core_cpus_list", "thread_siblings_list"];
    names.into_iter().find_map(|name| list(root, pcpu, name))
}

/// The first thread of a pCPU's core.
pub(super) fn core(root: &HostRoot, pcpu: u32) -> Option<u32> {
    threads(root, pcpu)?.iter().next()
}

/// The first pCPU of a pCPU's package.
pub(super) fn package(root: &HostRoot, pcpu: u32) -> Option<u32> {
    root.kernel_version().filter(|of| *of >= SOCKETS_SINCE)?;
    list(root, pcpu, "package_cpus_list")?.iter().next()
}

/// The clusters that Linux shows of these pCPUs, each as the list of one of them; `None` for an
/// offline one, and for all where Linux shows nothing.
///
/// Linux has the clusters of ACPI's PPTT in `cluster_cpus_list` since 5.16, and those of the device
/// tree's cpu-map since 6.0. Before, the clusters of a cpu-map were its packages. A pCPU without a
/// cluster is alone in its list, as one of a cluster of its own is: where all are alone, without a
/// number of a cluster, the die or the package counts.
pub(super) fn clusters(root: &HostRoot, pcpus: &CpuList) -> Vec<(u32, Option<CpuList>)> {
    let is_more_than_core = |pcpu, name: &str| {
        let core = threads(root, pcpu).map_or(1, |core| core.len());
        list(root, pcpu, name).is_some_and(|list| list.len() > core)
    };
    let has_number = |pcpu| {
        let number = root.number::<u32>(format!("{CPUS}/cpu{pcpu}/topology/cluster_id"));
        number.is_some()
    };
    let levels = ["cluster_cpus_list", "die_cpus_list", "package_cpus_list"];
    let level = levels.into_iter().find(|name| {
        let is_cluster = *name == levels[0];
        pcpus
            .iter()
            .any(|pcpu| is_more_than_core(pcpu, name) || (is_cluster && has_number(pcpu)))
    });
    // The package's name before 5.3.
    let level = level.unwrap_or("core_siblings_list");
    let each = pcpus.iter().map(|pcpu| (pcpu, list(root, pcpu, level)));
    each.collect()
}

#[cfg(test)]
mod tests {
    //! Lists are read in both of the kernel's forms. Clusters are those that Linux shows, by each
    //! version's files.
    use super::*;
    use crate::fakes::FakeHost;

    /// The first pCPU of each one's cluster.
    fn firsts(host: &FakeHost) -> Vec<Option<u32>> {
        let all = clusters(&host.root(), &"0-3".parse().unwrap());
        let first = |list: Option<CpuList>| list?.iter().next();
        all.into_iter().map(|(_, list)| first(list)).collect()
    }

    #[test]
    fn clusters_are_the_kernels_whatever_the_policies_are() {
        let rows: [(&str, [&str; 4], &str, [u32; 4]); 6] = [
            (
                "two clusters",
                ["0-1", "0-1", "2-3", "2-3"],
                "0-3",
                [0, 0, 2, 2],
            ),
            (
                "one of one core",
                ["0-2", "0-2", "0-2", "3"],
                "0-3",
                [0, 0, 0, 3],
            ),
            ("one", ["0-3"; 4], "0-3", [0; 4]),
            ("none", ["0", "1", "2", "3"], "0-3", [0; 4]),
            (
                "cpu-map before 6.0",
                ["0", "1", "2", "3"],
                "0-1",
                [0, 0, 2, 2],
            ),
            ("before 5.16", [""; 4], "0-1", [0, 0, 2, 2]),
        ];
        for (name, lists, package, expected) in rows {
            let host = FakeHost::two_plus_two();
            for (cpu, cluster) in (0..).zip(lists) {
                let own = if package == "0-1" && cpu > 1 {
                    "2-3"
                } else {
                    package
                };
                host.topology(cpu, cluster, own);
            }
            assert_eq!(firsts(&host), expected.map(Some), "{name}");
        }
        assert_eq!(firsts(&FakeHost::two_plus_two()), [None; 4]);
    }

    #[test]
    fn clusters_with_numbers_may_have_one_core_each() {
        let host = FakeHost::two_plus_two();
        for cpu in 0..4 {
            host.topology(cpu, &cpu.to_string(), "0-3");
            let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/cluster_id");
            host.write(&path, cpu.to_string());
        }
        assert_eq!(firsts(&host), [0, 1, 2, 3].map(Some));
    }

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
