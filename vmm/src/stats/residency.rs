// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long each OPP was requested, and how long pCPUs ran at each; how fast they may run.
//!
//! ```text
//! cpufreq/policy*/stats/time_in_state, less its state at the start ─▶ TimeInState ─▶ PolicyTimes
//! cpufreq/policy*/scaling_max_freq, below cpuinfo_max_freq or boost ──────┘
//! ```
//! The kernel counts in units of 10 ms. The files are opened at the start: a confined thread reads
//! them without opening any.

use std::{collections::BTreeMap, fs::File, io, os::unix::fs::FileExt as _};

use vcpufreq_host::{CpuList, CpufreqPolicy, HostCpus, HostRoot};

use super::snapshot::{OppTime, PolicyTimes, Stats, VcpuStats};

/// What a file of sysfs has at most.
const PAGE: usize = 4096;
/// A unit of `time_in_state`, in µs.
const TICK_US: u64 = 10_000;

/// The kernel's times, and how they were at the start.
#[derive(Debug)]
pub struct TimeInState(Vec<PolicyFile>);

#[derive(Debug)]
struct PolicyFile {
    number: u32,
    cpus: CpuList,
    /// Where the kernel counts (`CONFIG_CPU_FREQ_STAT`).
    times: Option<(File, Vec<OppTime>)>,
    /// `scaling_max_freq` and `cpuinfo_max_freq`.
    maxima: Option<[File; 2]>,
    /// The highest frequency, that of boost even while boost is off.
    top_khz: Option<u32>,
}

impl PolicyFile {
    fn open(host: &HostRoot, policy: CpufreqPolicy) -> Self {
        let number = policy.id;
        let open = |name: &str| {
            let path = format!("sys/devices/system/cpu/cpufreq/policy{number}/{name}");
            File::open(host.path(path)).ok()
        };
        let times = open("stats/time_in_state").and_then(|file| {
            let start = read(&file).ok()?;
            Some((file, start))
        });
        let maxima = open("scaling_max_freq").zip(open("cpuinfo_max_freq"));
        Self {
            number,
            top_khz: policy.top_khz(),
            cpus: policy.cpus,
            times,
            maxima: maxima.map(Into::into),
        }
    }

    /// Until now; `None` while all of its pCPUs are offline, and where there is nothing to tell.
    fn now(&self) -> Option<PolicyTimes> {
        let opps = match &self.times {
            Some((file, start)) => since(start, read(file).ok()?),
            None => Vec::new(),
        };
        let [cap, own] = match &self.maxima {
            Some(files) => files.each_ref().map(|file| khz(file).ok()),
            None => [None, None],
        };
        let capped_khz = cap.filter(|cap| own.is_some_and(|own| *cap < own));
        let no_boost = cap.filter(|cap| self.top_khz.is_some_and(|top| *cap < top));
        let boost_off_khz = no_boost.filter(|_| capped_khz.is_none());
        (self.times.is_some() || no_boost.or(capped_khz).is_some()).then(|| PolicyTimes {
            policy: self.number,
            cpus: self.cpus.to_string(),
            opps,
            capped_khz,
            boost_off_khz,
        })
    }
}

impl TimeInState {
    /// From now on, of the policies that vCPUs with these pins may be on; an empty one is anywhere.
    pub fn start<'a>(host: &HostRoot, pins: impl Iterator<Item = &'a [u32]>) -> Self {
        let pins: Vec<_> = pins.collect();
        let on = |cpu| pins.iter().any(|pin| pin.is_empty() || pin.contains(&cpu));
        let policies = HostCpus::read(host).policies.into_iter();
        let policies = policies.filter(|policy| policy.cpus.iter().any(on));
        Self(
            policies
                .map(|policy| PolicyFile::open(host, policy))
                .collect(),
        )
    }

    /// Until now. Without a policy whose pCPUs are all offline.
    pub fn now(&self) -> Vec<PolicyTimes> {
        self.0.iter().filter_map(PolicyFile::now).collect()
    }
}

/// The number in a file of one.
fn khz(file: &File) -> io::Result<u32> {
    let mut text = [0; 16];
    let len = file.read_at(&mut text, 0)?;
    let text = String::from_utf8_lossy(&text[..len]);
    text.trim().parse().map_err(io::Error::other)
}

fn read(file: &File) -> io::Result<Vec<OppTime>> {
    let mut page = [0; PAGE];
    let len = file.read_at(&mut page, 0)?;
    let text = String::from_utf8_lossy(&page[..len]);
    let times = text.lines().filter_map(|line| {
        let (khz, ticks) = line.split_once(' ')?;
        Some(OppTime {
            khz: khz.parse().ok()?,
            us: ticks.trim().parse::<u64>().ok()?.saturating_mul(TICK_US),
        })
    });
    Ok(times.collect())
}

/// The times since `start`; all of `now` if the counters began again at 0, as after a reload of the
/// driver.
fn since(start: &[OppTime], now: Vec<OppTime>) -> Vec<OppTime> {
    let less = |now: &OppTime| {
        let before = start.iter().find(|before| before.khz == now.khz);
        let us = now.us.checked_sub(before.map_or(0, |before| before.us))?;
        Some(OppTime { us, ..*now })
    };
    now.iter().map(less).collect::<Option<_>>().unwrap_or(now)
}

/// A line for each domain and policy with its part of the time at each OPP, between two moments, or
/// since the start.
pub(super) fn lines(before: Option<&Stats>, now: &Stats) -> Vec<String> {
    let domains = domains(now).into_values().filter_map(|members| {
        let (first, _) = *members.first()?;
        let start = before.and_then(|before| before.vcpus.get(first));
        let start = start.map_or(&[][..], |vcpu| &vcpu.requested);
        let shares = shares(since(start, members.first()?.1.requested.clone()))?;
        let numbers: Vec<_> = members
            .iter()
            .map(|(_, vcpu)| vcpu.vcpu.to_string())
            .collect();
        Some(format!("requests of vCPU {}: {shares}", numbers.join(",")))
    });
    let policies = now.policies.iter().filter_map(|policy| {
        let mut all = before.iter().flat_map(|before| &before.policies);
        let start = all.find(|start| start.policy == policy.policy);
        let start = start.map_or(&[][..], |start| &start.opps);
        let shares = shares(since(start, policy.opps.clone()))?;
        Some(format!("frequency of pCPU {}: {shares}", policy.cpus))
    });
    domains.chain(policies).chain(caps(now)).collect()
}

/// A line for each policy that is capped.
fn caps(now: &Stats) -> impl Iterator<Item = String> {
    now.policies.iter().filter_map(|policy| {
        let (cpus, off) = (&policy.cpus, policy.boost_off_khz);
        let why = off.map_or("", |_| ", as boost is off");
        let khz = mhz(policy.capped_khz.or(off)?);
        Some(format!(
            "pCPU {cpus} is capped at {khz} MHz{why}; see vcpufreq doctor"
        ))
    })
}

/// The vCPUs of each domain, with their places in the list.
fn domains(stats: &Stats) -> BTreeMap<u32, Vec<(usize, &VcpuStats)>> {
    let mut domains: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (index, vcpu) in stats.vcpus.iter().enumerate() {
        domains.entry(vcpu.domain).or_default().push((index, vcpu));
    }
    domains
}

/// `none 1.0 %, 600.0 MHz 99.0 %`; OPPs without time are left out. `None` without any time.
fn shares(times: Vec<OppTime>) -> Option<String> {
    let all: u128 = times.iter().map(|time| u128::from(time.us)).sum();
    let times = times.into_iter().filter(|time| time.us > 0);
    let share = |time: OppTime| {
        let permille = u128::from(time.us) * 1000 / all.max(1);
        let name = match time.khz {
            0 => "none".to_owned(),
            khz => format!("{} MHz", mhz(khz)),
        };
        format!("{name} {}.{} %", permille / 10, permille % 10)
    };
    let shares: Vec<_> = times.map(share).collect();
    (!shares.is_empty()).then(|| shares.join(", "))
}

/// A frequency in MHz.
pub(super) fn mhz(khz: u32) -> String {
    format!("{}.{}", khz / 1000, khz % 1000 / 100)
}

#[cfg(test)]
mod tests {
    //! Promises: times are the kernel's since the start, of the policies that the vCPUs may be on; a
    //! kernel that counts none has none; lines have parts of the time between two moments.

    use std::fs;

    use vcpufreq_host::fakes::FakeHost;

    use super::*;

    fn of(khz: u32, us: u64) -> OppTime {
        OppTime { khz, us }
    }

    /// A host of two policies; the second counts no times.
    fn host(times: &str) -> (tempfile::TempDir, HostRoot) {
        let dir = tempfile::tempdir().unwrap();
        for (policy, cpus) in [("policy0", "0 1\n"), ("policy2", "2\n")] {
            let at = dir
                .path()
                .join("sys/devices/system/cpu/cpufreq")
                .join(policy);
            fs::create_dir_all(at.join("stats")).unwrap();
            fs::write(at.join("related_cpus"), cpus).unwrap();
        }
        write(&dir, times);
        let root = HostRoot::at(dir.path());
        (dir, root)
    }

    fn write(dir: &tempfile::TempDir, times: &str) {
        let policy = "sys/devices/system/cpu/cpufreq/policy0/stats/time_in_state";
        fs::write(dir.path().join(policy), times).unwrap();
    }

    #[test]
    fn times_are_since_the_start() {
        let (dir, host) = host("600000 100\n1800000 7\n");
        let times = TimeInState::start(&host, [&[][..]].into_iter());
        write(&dir, "600000 150\n1800000 7\n");
        let [policy] = &times.now()[..] else {
            panic!("{times:?}")
        };
        assert_eq!((policy.policy, &policy.cpus[..]), (0, "0-1"));
        assert_eq!(policy.opps, [of(600_000, 500_000), of(1_800_000, 0)]);
        // The counters began anew.
        write(&dir, "600000 3\n1800000 9\n");
        assert_eq!(times.now()[0].opps[0], of(600_000, 30_000));
        let elsewhere = TimeInState::start(&host, [&[2][..]].into_iter());
        assert!(elsewhere.now().is_empty());
    }

    #[test]
    fn a_cap_is_below_the_cpus_own_maximum() {
        let (dir, host) = host("600000 100\n");
        let file = |policy: u32, name: &str, khz: &str| {
            let path = format!("sys/devices/system/cpu/cpufreq/policy{policy}/{name}");
            fs::write(dir.path().join(path), khz).unwrap();
        };
        for policy in [0, 2] {
            file(policy, "scaling_max_freq", "1800000\n");
            file(policy, "cpuinfo_max_freq", "1800000\n");
        }
        let times = TimeInState::start(&host, [&[][..]].into_iter());
        let caps = || {
            let policies = times.now().into_iter();
            let caps = policies.map(|policy| (policy.policy, policy.capped_khz));
            caps.collect::<Vec<_>>()
        };
        // The second counts no times.
        assert_eq!(caps(), [(0, None)]);
        file(2, "scaling_max_freq", "1400000\n");
        assert_eq!(caps(), [(0, None), (2, Some(1_400_000))]);
        let stats = Stats {
            pid: 1,
            policies: times.now(),
            ..Stats::default()
        };
        let line = "pCPU 2 is capped at 1400.0 MHz; see vcpufreq doctor";
        assert_eq!(lines(None, &stats), [line]);
    }

    #[test]
    fn boost_that_is_off_is_a_cap() {
        let host = FakeHost::two_plus_two();
        host.boost(2, "3000000", false);
        let file = |name: &str, khz: &str| {
            host.write(
                &format!("sys/devices/system/cpu/cpufreq/policy2/{name}"),
                khz,
            );
        };
        file("scaling_max_freq", "2800000\n");
        let times = TimeInState::start(&host.root(), [&[][..]].into_iter());
        let lines = || {
            let policies = times.now();
            let metrics = policies.iter().any(|policy| policy.capped_khz.is_some());
            let stats = Stats {
                policies,
                ..Stats::default()
            };
            (lines(None, &stats), metrics)
        };
        let line = "pCPU 2-3 is capped at 2800.0 MHz, as boost is off; see vcpufreq doctor";
        // Boost that is off on purpose raises no alert.
        assert_eq!(lines(), (vec![line.to_owned()], false));
        file("scaling_max_freq", "1400000\n");
        let line = "pCPU 2-3 is capped at 1400.0 MHz; see vcpufreq doctor";
        assert_eq!(lines(), (vec![line.to_owned()], true));
        for name in ["scaling_max_freq", "cpuinfo_max_freq"] {
            file(name, "3000000\n");
        }
        assert_eq!(lines(), (Vec::new(), false));
    }

    #[test]
    fn lines_have_parts_of_the_time_between_two_moments() {
        let at = |none, low, ran| Stats {
            pid: 1,
            vcpus: [3, 3]
                .map(|domain| VcpuStats {
                    domain,
                    requested: vec![of(0, none), of(600_000, low), of(1_800_000, 0)],
                    ..VcpuStats::default()
                })
                .into(),
            policies: vec![PolicyTimes {
                policy: 0,
                cpus: "0-1".to_owned(),
                opps: vec![of(600_000, ran)],
                capped_khz: None,
                boost_off_khz: None,
            }],
            ..Stats::default()
        };
        let (before, now) = (at(10, 0, 5), at(11, 999, 6));
        assert_eq!(
            lines(Some(&before), &now),
            [
                "requests of vCPU 0,0: none 0.1 %, 600.0 MHz 99.9 %",
                "frequency of pCPU 0-1: 600.0 MHz 100.0 %",
            ]
        );
        assert!(lines(Some(&now), &now).is_empty());
        assert_eq!(
            lines(None, &before)[0],
            "requests of vCPU 0,0: none 100.0 %"
        );
    }
}
