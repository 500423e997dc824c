// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds changes that the host makes under a running guest without a notification: the governor of
//! a pCPU's policy, and a vCPU's pinning.
//!
//! ```text
//! scaling_governor, sched_getaffinity ─▶ Watch ─▶ one line of embedder a change, EventStats (counters, events)
//! ```
//! When the last of a thread's CPUs goes offline, Linux lets the thread run anywhere, also after
//! that CPU is back. A look reads one open file for each policy and makes one system call for each
//! pinned vCPU.

use std::io;

use vcpufreq_device::VcpuId;
use vcpufreq_host::{CpuList, HostRoot, Tid, is_within, pin, policies};

use crate::embedder::Embedder;
use crate::event_stats::{EventStats, HostEvent};
use crate::policy_attribute::PolicyAttribute;

/// The governor under which frequencies follow clamps.
const SCHEDUTIL: &str = "schedutil";

/// What is looked at.
#[derive(Debug)]
pub struct HostWatch {
    governors: Vec<Governor>,
    pins: Vec<Pin>,
}

#[derive(Debug)]
struct Governor {
    policy: u32,
    cpus: CpuList,
    name: PolicyAttribute,
    schedutil: bool,
}

#[derive(Debug)]
struct Pin {
    vcpu: VcpuId,
    pcpus: CpuList,
    pinned: bool,
}

impl HostWatch {
    /// Watches vCPUs with these pins (an empty list is anywhere). If they are to be clamped,
    /// watches the policies that they may be on, too.
    pub fn of_host(pins: &[Vec<u32>], clamped: bool, host: &HostRoot) -> Self {
        let vcpus = (0..=u16::MAX).map(VcpuId).zip(pins);
        let everywhere = pins.iter().any(Vec::is_empty);
        let pins: Vec<Pin> = vcpus
            .filter(|(_, pin)| !pin.is_empty())
            .map(|(vcpu, pin)| Pin::new(vcpu, pin))
            .collect();
        let on = |cpu| everywhere || pins.iter().any(|pin| pin.pcpus.contains(cpu));
        let policies = match clamped {
            true => policies(host),
            false => Vec::new(),
        };
        let policies = policies.into_iter().filter(|(_, cpus)| cpus.iter().any(on));
        let governors = policies.map(|(policy, cpus)| Governor::new(host, policy, cpus));
        Self {
            governors: governors.collect(),
            pins,
        }
    }

    /// Looks once; `thread` returns a vCPU's thread, if it has one now.
    pub fn look(
        &mut self,
        stats: &EventStats,
        embedder: &dyn Embedder,
        thread: impl Fn(VcpuId) -> Option<Tid>,
    ) {
        let tell = |(change, text): (HostEvent, String)| {
            stats.host_changed(change);
            embedder.warn(&text);
        };
        for governor in &mut self.governors {
            governor.look().into_iter().for_each(tell);
        }
        for lost in &mut self.pins {
            let Some(tid) = thread(lost.vcpu) else {
                continue;
            };
            // A thread that has ended is nowhere.
            if let Ok(within) = is_within(tid, lost.pcpus.as_slice()) {
                let again = |pcpus: &[u32]| pin(tid, pcpus);
                lost.found(within, again).into_iter().for_each(tell);
            }
        }
    }
}

impl Governor {
    fn new(host: &HostRoot, policy: u32, cpus: CpuList) -> Self {
        Self {
            policy,
            cpus,
            name: PolicyAttribute::new(host, policy, "scaling_governor"),
            schedutil: true,
        }
    }

    fn look(&mut self) -> Option<(HostEvent, String)> {
        // Unreadable while the policy has no CPU online.
        let name = self.name.text().ok()?;
        let schedutil = name == SCHEDUTIL;
        if std::mem::replace(&mut self.schedutil, schedutil) == schedutil {
            return None;
        }
        let policy = self.policy;
        let of = format!("policy {policy} (CPUs {})", self.cpus);
        let text = match schedutil {
            true => format!("{of} is under schedutil again: its frequency follows requests"),
            false => format!(
                "{of} is under the governor {name}: its frequency doesn't follow requests; write \
                 {SCHEDUTIL} to {}",
                self.name.path().display()
            ),
        };
        Some((HostEvent::Governor { policy, schedutil }, text))
    }
}

impl Pin {
    fn new(vcpu: VcpuId, pcpus: &[u32]) -> Self {
        Self {
            vcpu,
            pcpus: pcpus.iter().copied().collect(),
            pinned: true,
        }
    }

    /// The change to report, if the thread has begun or ceased to run `within` its pCPUs. When it
    /// doesn't, pins it `again` as soon as that is possible.
    fn found(
        &mut self,
        within: bool,
        again: impl FnOnce(&[u32]) -> io::Result<()>,
    ) -> Vec<(HostEvent, String)> {
        let mut changes = Vec::new();
        if self.pinned && !within {
            changes.push(self.change(false));
        }
        if !self.pinned && (within || again(self.pcpus.as_slice()).is_ok()) {
            changes.push(self.change(true));
        }
        changes
    }

    fn change(&mut self, pinned: bool) -> (HostEvent, String) {
        self.pinned = pinned;
        let (vcpu, pcpus) = (self.vcpu, &self.pcpus);
        let text = match pinned {
            true => format!("vCPU {vcpu} is pinned to CPUs {pcpus} again"),
            false => format!(
                "vCPU {vcpu} runs elsewhere than on CPUs {pcpus}, which it is pinned to: bring them \
                 online, and it will be pinned again"
            ),
        };
        (HostEvent::Pin { vcpu, pinned }, text)
    }
}

#[cfg(test)]
mod tests {
    //! Each change is reported once and counted once, for the policies that vCPUs may be on. A lost
    //! pinning comes back when the host accepts it.

    use super::*;
    use vcpufreq_host::fakes::FakeHost;

    const GOVERNOR: &str = "sys/devices/system/cpu/cpufreq/policy2/scaling_governor";

    /// What one look at the governors finds.
    fn governors(watch: &mut HostWatch) -> Vec<(HostEvent, String)> {
        let governors = watch.governors.iter_mut();
        governors.filter_map(Governor::look).collect()
    }

    #[test]
    fn a_governor_is_said_once_when_it_goes_and_when_it_comes_back() {
        let host = FakeHost::two_plus_two();
        let mut watch = HostWatch::of_host(&[vec![3]], true, &host.root());
        assert_eq!(governors(&mut watch), []);
        host.write(GOVERNOR, "performance\n");
        let [(change, text)] = &governors(&mut watch)[..] else {
            panic!("one change")
        };
        let changed = |schedutil| HostEvent::Governor {
            policy: 2,
            schedutil,
        };
        assert_eq!(*change, changed(false));
        assert!(text.starts_with("policy 2 (CPUs 2-3) is under the governor performance: "));
        assert!(text.ends_with("policy2/scaling_governor"), "{text}");
        host.write(GOVERNOR, "powersave\n");
        assert_eq!(governors(&mut watch), []);
        host.write(GOVERNOR, "schedutil\n");
        let [(change, _)] = &governors(&mut watch)[..] else {
            panic!("one change")
        };
        assert_eq!(*change, changed(true));
        assert_eq!(governors(&mut watch), []);
    }

    #[test]
    fn the_policies_that_vcpus_may_be_on_are_looked_at() {
        let host = FakeHost::two_plus_two();
        let policies = |pins: &[Vec<u32>], clamped| {
            let watch = HostWatch::of_host(pins, clamped, &host.root());
            let policies = watch.governors.iter().map(|governor| governor.policy);
            policies.collect::<Vec<_>>()
        };
        assert_eq!(policies(&[vec![0]], true), [0]);
        assert_eq!(policies(&[vec![0], vec![1, 2]], true), [0, 2]);
        assert_eq!(policies(&[vec![0], vec![]], true), [0, 2]);
        assert_eq!(policies(&[vec![0]], false), [0u32; 0]);
    }

    #[test]
    fn a_policy_without_a_readable_governor_says_nothing() {
        let host = FakeHost::two_plus_two();
        let mut watch = HostWatch::of_host(&[vec![]], true, &host.root());
        host.remove(GOVERNOR);
        assert_eq!(governors(&mut watch), []);
        host.write(GOVERNOR, "performance\n");
        assert_eq!(governors(&mut watch).len(), 1);
    }

    #[test]
    fn a_lost_pinning_is_said_once_and_comes_back() {
        let mut pin = Pin::new(VcpuId(1), &[2]);
        let offline = |_: &[u32]| Err(io::Error::from_raw_os_error(libc::EINVAL));
        let kinds = |changes: Vec<(HostEvent, String)>| {
            let pinned = changes.into_iter().map(|(change, _)| match change {
                HostEvent::Pin { pinned, .. } => pinned,
                _ => panic!("{change:?}"),
            });
            pinned.collect::<Vec<_>>()
        };
        assert_eq!(kinds(pin.found(true, offline)), [false; 0]);
        assert_eq!(kinds(pin.found(false, offline)), [false]);
        assert_eq!(kinds(pin.found(false, offline)), [false; 0]);
        let online = |pcpus: &[u32]| {
            assert_eq!(pcpus, [2]);
            Ok(())
        };
        assert_eq!(kinds(pin.found(false, online)), [true]);
        assert_eq!(kinds(pin.found(true, online)), [false; 0]);
        // Gone and back between two looks.
        assert_eq!(kinds(pin.found(false, online)), [false, true]);
    }

    #[test]
    fn a_threads_affinity_is_what_the_kernel_says() {
        let tid = Tid::current();
        let all: Vec<u32> = (0..8192).collect();
        assert!(is_within(tid, &all).unwrap());
        assert!(!is_within(tid, &[]).unwrap());
    }
}
