// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the scheduler's deadline servers reserve on this host, from debugfs and sysfs: the fair
//! server (Linux 6.12) and, while a sched_ext scheduler runs, the ext server (Linux 7.0). What
//! follows from that is arithmetic ([`Floor`]).

mod arithmetic;

use super::{CpuList, CpufreqPolicy, HostCpus, HostRoot};

pub use arithmetic::Floor;
use arithmetic::{Reservation, utilization};

/// The kernel's debug files of its scheduler.
pub const SCHED_DEBUG: &str = "/sys/kernel/debug/sched";
const SCHED_EXT: &str = "sys/kernel/sched_ext";
/// The first kernel with a fair server.
const SINCE: (u32, u32) = (6, 12);

/// What is reserved of a CPU, in 1024ths of the largest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Reserved {
    /// The kernel has no such server.
    NoServer,
    /// As debugfs shows it.
    Known(u32),
    /// debugfs isn't readable: what the kernel has without settings.
    Default(u32),
}

impl Reserved {
    /// The number, known or not.
    #[must_use]
    pub fn util(self) -> u32 {
        match self {
            Self::NoServer => 0,
            Self::Known(util) | Self::Default(util) => util,
        }
    }
}

/// The floor of one cpufreq policy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct PolicyFloor {
    /// Its number, as in `policy4`.
    pub policy: u32,
    /// Its CPUs that are online.
    pub cpus: CpuList,
    /// The most that is reserved of one of them.
    pub reserved: Reserved,
    /// What follows from that.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub floor: Floor,
}

/// The floors of all policies that have a CPU online and a highest frequency.
#[must_use]
pub fn floors(root: &HostRoot, cpus: &HostCpus) -> Vec<PolicyFloor> {
    let of = |policy| floor(root, cpus, policy);
    cpus.policies.iter().filter_map(of).collect()
}

fn floor(root: &HostRoot, cpus: &HostCpus, policy: &CpufreqPolicy) -> Option<PolicyFloor> {
    let own = policy.cpus.and(&cpus.online());
    let each = own.iter().map(|cpu| reserved(root, cpu));
    let reserved = each.max_by_key(|reserved| (reserved.util(), *reserved))?;
    let cpu = cpus.cpu(own.iter().next()?)?;
    let top_khz = policy.top_khz()?;
    let reference = (cpu.capacity_or_full(), cpu.reference_khz.unwrap_or(top_khz));
    let opps: Vec<u32> = policy.opps.iter().map(|opp| opp.khz).collect();
    let floor = Floor::new(reserved.util(), reference, &opps, top_khz);
    Some(PolicyFloor {
        policy: policy.id,
        cpus: own,
        reserved,
        floor,
    })
}

/// What is reserved of one CPU.
fn reserved(root: &HostRoot, cpu: u32) -> Reserved {
    let server = |name: &str| {
        let file = |what| root.number(format!("{SCHED_DEBUG}/{name}/cpu{cpu}/{what}"));
        Some(Reservation {
            runtime_ns: file("runtime")?,
            period_ns: file("period")?,
        })
    };
    let (fair, ext) = (server("fair_server"), server("ext_server"));
    if let Some(fair) = fair {
        let (fair_runs, ext_runs) = in_force(root);
        let fair = Some(fair).filter(|_| fair_runs);
        // Kernels before 7.0 have sched_ext without a server.
        let ext = ext.filter(|_| ext_runs);
        return Reserved::Known(utilization(fair.into_iter().chain(ext)));
    }
    match root.kernel_version() {
        Some(version) if version < SINCE => Reserved::NoServer,
        _ => Reserved::Default(utilization([Reservation::DEFAULT])),
    }
}

/// Whether the fair and the ext server have tasks. While a sched_ext scheduler runs, it schedules
/// all fair tasks, or only those with policy SCHED_EXT (`switch_all` is 0).
fn in_force(root: &HostRoot) -> (bool, bool) {
    let state = root.text(format!("{SCHED_EXT}/state"));
    let runs = state.is_some_and(|state| state != "disabled");
    let takes_all = root.number(format!("{SCHED_EXT}/switch_all")) == Some(1);
    (!(runs && takes_all), runs)
}

#[cfg(test)]
mod tests {
    //! Promise: the reserve is that of the servers in force. If it can't be read, it is the
    //! kernel's default, and marked so. A kernel without servers has none.
    use super::*;
    use crate::fakes::FakeHost;

    fn host(release: &str) -> FakeHost {
        let host = FakeHost::two_plus_two();
        host.kernel(release);
        host
    }

    fn reserved_of(host: &FakeHost) -> Vec<Reserved> {
        let root = host.root();
        let floors = floors(&root, &HostCpus::read(&root));
        floors.into_iter().map(|floor| floor.reserved).collect()
    }

    #[test]
    fn a_policys_is_the_most_of_its_cpus() {
        let host = host("7.3.4");
        for (cpu, ms) in [(0, 50), (1, 100), (2, 0), (3, 0)] {
            host.server("fair_server", cpu, (ms, 1000));
        }
        let known = [102, 0].map(Reserved::Known);
        assert_eq!(reserved_of(&host), known);
        // An offline CPU runs nothing.
        host.write("sys/devices/system/cpu/online", "0,2-3");
        assert_eq!(reserved_of(&host)[0], Reserved::Known(51));
    }

    /// Boost is above the frequency that the capacity of the big CPUs refers to.
    #[test]
    fn a_floor_is_the_share_of_the_frequency_of_the_capacity() {
        let host = host("7.3.4");
        host.fair_server(50, 1000);
        host.boost(2, "3000000", true);
        host.write(
            "sys/devices/system/cpu/cpufreq/policy2/cpuinfo_max_freq",
            "3000000",
        );
        let root = host.root();
        let floors = floors(&root, &HostCpus::read(&root));
        // 51 of 1024 of 2.8 GHz.
        assert_eq!(floors[1].floor.khz, 139_453);
    }

    #[test]
    fn only_servers_in_force_count() {
        let host = host("7.3.4");
        host.fair_server(50, 1000);
        for cpu in 0..4 {
            host.server("ext_server", cpu, (100, 1000));
        }
        let state = |state: &str, takes_all: &str| {
            host.write(&format!("{SCHED_EXT}/state"), state);
            host.write(&format!("{SCHED_EXT}/switch_all"), takes_all);
            reserved_of(&host)[0].util()
        };
        assert_eq!(reserved_of(&host)[0].util(), 51, "without sched_ext");
        assert_eq!(state("disabled\n", "0\n"), 51);
        assert_eq!(state("enabled\n", "1\n"), 102);
        assert_eq!(state("enabled\n", "0\n"), 153);
        // Before 7.0 sched_ext had no server.
        host.remove("sys/kernel/debug/sched/ext_server");
        assert_eq!(state("enabled\n", "1\n"), 0);
        assert_eq!(state("enabled\n", "0\n"), 51);
    }

    #[test]
    fn what_is_not_readable_is_the_default_where_there_are_servers() {
        for (release, reserved) in [
            ("7.3.4+deb13-arm64", Reserved::Default(51)),
            ("6.12.0", Reserved::Default(51)),
            ("6.11.9", Reserved::NoServer),
            ("unknown", Reserved::Default(51)),
        ] {
            assert_eq!(reserved_of(&host(release)), [reserved; 2], "{release}");
        }
        let half = host("7.3.4");
        half.fair_server(50, 1000);
        half.remove("sys/kernel/debug/sched/fair_server/cpu3/period");
        let expected = [Reserved::Known(51), Reserved::Default(51)];
        assert_eq!(reserved_of(&half), expected);
    }
}
