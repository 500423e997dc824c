// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What files tell of a board and its kernel beside CPUs and policies.

use vcpufreq_host::{HostCpus, HostRoot};

use super::policies::numbers;

const CPUFREQ: &str = "/sys/devices/system/cpu/cpufreq";
const AMD_PSTATE: &str = "/sys/devices/system/cpu/amd_pstate/status";
/// The slice of the units that come with the program.
const SLICE: &str = "/sys/fs/cgroup/vcpufreq.slice/cpu.uclamp.min";

/// The facts of one board.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BoardFacts {
    /// Numbers of policies that list their governors, without schedutil.
    pub no_schedutil: Vec<u32>,
    /// amd_pstate is in the mode guided.
    pub guided: bool,
    /// Numbers of policies whose firmware selects autonomously.
    pub auto_select: Vec<u32>,
    /// Where boost is turned off, if it is on: the file of all policies, else those of some.
    pub boosting: Option<String>,
    /// Where cgroup v1 has the cpu controller.
    pub cgroup_v1: Option<String>,
    /// The file of the guests' slice that caps them, and what it holds.
    pub capped: Option<(String, String)>,
    /// The mode of the lockdown, unless it is none.
    pub lockdown: Option<String>,
}

impl BoardFacts {
    /// Reads what is below `root`.
    pub fn read(root: &HostRoot, cpus: &HostCpus) -> Self {
        let file = |id: u32, name: &str| format!("{CPUFREQ}/policy{id}/{name}");
        let ids = || cpus.policies.iter().map(|policy| policy.id);
        let is_on = |file: &String| root.number(file) == Some(1_u8);
        let lacks = |id: &u32| {
            root.text(file(*id, "scaling_available_governors"))
                .is_some_and(|all| all.split_whitespace().all(|name| name != "schedutil"))
        };
        let all = format!("{CPUFREQ}/boost");
        let some = || {
            let boosts = numbers(ids().filter(|id| is_on(&file(*id, "boost"))))?;
            Some(format!("{CPUFREQ}/policyN/boost, N = {boosts}"))
        };
        let boosting = Some(all).filter(is_on).or_else(some);
        let lockdown = root
            .text("sys/kernel/security/lockdown")
            .unwrap_or_default();
        Self {
            no_schedutil: ids().filter(lacks).collect(),
            guided: root.text(AMD_PSTATE).is_some_and(|mode| mode == "guided"),
            auto_select: ids()
                .filter(|id| is_on(&file(*id, "auto_select")))
                .collect(),
            boosting,
            cgroup_v1: cgroup_v1(&root.text("proc/self/mounts").unwrap_or_default()),
            capped: root
                .text(SLICE)
                .filter(|value| !matches!(value.as_str(), "max" | "100.00"))
                .map(|value| (SLICE.to_owned(), value)),
            lockdown: chosen(&lockdown)
                .filter(|mode| *mode != "none")
                .map(str::to_owned),
        }
    }
}

/// Where a line of `mounts` puts cgroup v1's cpu controller.
fn cgroup_v1(mounts: &str) -> Option<String> {
    mounts.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (place, kind, options) = (words.next()?, words.next()?, words.next()?);
        let has = kind == "cgroup" && options.split(',').any(|option| option == "cpu");
        has.then(|| place.to_owned())
    })
}

/// Of `none [integrity] confidentiality`, what is in brackets.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?
        .1
        .split_once(']')
        .map(|(mode, _)| mode)
}
