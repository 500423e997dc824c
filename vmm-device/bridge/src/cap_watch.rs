// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds what the host lets each domain have at most: a policy's maximum falls while a cooling
//! device, `scaling_max_freq` or boost holds it down.
//!
//! ```text
//! scaling_max_freq ─▶ CapWatch ─▶ policy::cap of each vCPU ─▶ the highest one of a domain ─▶ device: perf_cap
//! ```
//! A look reads one open file for each policy. While no policy is capped, that is all. Else it makes
//! one system call for each vCPU that isn't pinned.
//!
//! A vCPU that may be on several policies has the cap of the best one: it would change with each
//! migration otherwise. A guest has one maximum for a domain, so it is that of the best vCPU: a
//! lower one would slow the others.

use std::collections::BTreeMap;

use vcpufreq_device::{DomainId, Khz, PcpuPerf, VcpuId, VcpuSpec};
use vcpufreq_host::{CpuList, HostCpus, HostRoot, PcpuCapacity, Tid, affinity_of};

use crate::policy_attribute::PolicyAttribute;

/// What is looked at.
#[derive(Debug)]
pub struct CapWatch {
    policies: Vec<WatchedPolicy>,
    /// By vCPU; an empty list is anywhere.
    pins: Vec<CpuList>,
}

#[derive(Debug)]
struct WatchedPolicy {
    cpus: CpuList,
    /// Its highest frequency, that of boost even while boost is off.
    top: Khz,
    max: PolicyAttribute,
}

/// A pCPU at the highest frequency that it may have now, and at the highest one that it has.
#[derive(Clone, Copy)]
struct PcpuLimits {
    now: PcpuPerf,
    unlimited: PcpuPerf,
}

impl CapWatch {
    /// Watches the policies that vCPUs with these pins (an empty list is anywhere) may be on.
    pub fn of_host(pins: &[Vec<u32>], host: &HostRoot) -> Self {
        let pins: Vec<CpuList> = pins
            .iter()
            .map(|pin| pin.iter().copied().collect())
            .collect();
        let used = |cpus: &CpuList| {
            let mut pins = pins.iter();
            pins.any(|pin| pin.is_empty() || !pin.and(cpus).is_empty())
        };
        let policies = HostCpus::read(host).policies.into_iter();
        let policies = policies.filter(|policy| used(&policy.cpus));
        let policies = policies.filter_map(|policy| {
            Some(WatchedPolicy {
                top: Khz(policy.top_khz()?),
                max: PolicyAttribute::new(host, policy.id, "scaling_max_freq"),
                cpus: policy.cpus,
            })
        });
        Self {
            policies: policies.collect(),
            pins,
        }
    }

    /// Looks once. The cap of each domain of vCPUs like `specs` on a host with these pCPUs; `None`
    /// without one. `thread` returns a vCPU's thread, if it has one now.
    pub fn look(
        &mut self,
        specs: &[VcpuSpec],
        capacities: &[PcpuCapacity],
        thread: impl Fn(VcpuId) -> Option<Tid>,
    ) -> BTreeMap<DomainId, Option<Khz>> {
        let pcpus = self.pcpus(capacities);
        let any = pcpus.iter().any(|pcpu| pcpu.now.khz < pcpu.unlimited.khz);
        let mut caps: BTreeMap<DomainId, Option<Khz>> = BTreeMap::new();
        let vcpus = (0..=u16::MAX).map(VcpuId).zip(specs);
        for ((vcpu, spec), pin) in vcpus.zip(&self.pins) {
            let cap = any.then(|| of_vcpu(spec, pin, &pcpus, || thread(vcpu)));
            let cap = cap.flatten();
            let of_domain = caps.entry(spec.domain).or_insert(cap);
            *of_domain = of_domain.zip(cap).map(|(one, other)| one.max(other));
        }
        caps
    }

    /// Each pCPU whose maximum is known.
    fn pcpus(&mut self, capacities: &[PcpuCapacity]) -> Vec<PcpuLimits> {
        let of_policy = |policy: &mut WatchedPolicy| {
            // Unreadable while the policy has no CPU online.
            let now = policy.max.text().ok()?.parse().ok().map(Khz)?;
            Some((policy.cpus.clone(), now, policy.top))
        };
        let maxima: Vec<_> = self.policies.iter_mut().filter_map(of_policy).collect();
        let of_pcpu = |pcpu: &PcpuCapacity| {
            let (_, now, top) = maxima.iter().find(|(cpus, ..)| cpus.contains(pcpu.pcpu))?;
            let at = |khz: Khz| PcpuPerf {
                pcpu: pcpu.pcpu,
                khz,
                reference: pcpu.reference,
                capacity: pcpu.capacity,
            };
            Some(PcpuLimits {
                now: at(*now),
                unlimited: at(*top),
            })
        };
        capacities.iter().filter_map(of_pcpu).collect()
    }
}

/// The cap of a vCPU like `spec`, pinned to `pin` or free to be where its thread may be.
fn of_vcpu(
    spec: &VcpuSpec,
    pin: &CpuList,
    pcpus: &[PcpuLimits],
    thread: impl FnOnce() -> Option<Tid>,
) -> Option<Khz> {
    let on = match pin.is_empty() {
        true => affinity_of(thread()?).ok()?,
        false => pin.clone(),
    };
    let on = pcpus.iter().filter(|pcpu| on.contains(pcpu.now.pcpu));
    let (now, unlimited): (Vec<_>, Vec<_>) = on.map(|pcpu| (pcpu.now, pcpu.unlimited)).unzip();
    vcpufreq_device::cap(spec, &now, &unlimited)
}

#[cfg(test)]
mod tests {
    //! A domain has the cap of its policy, in the unit of its table, until that goes. A vCPU that can
    //! be elsewhere has what it gets there.
    use super::*;
    use vcpufreq_device::{PerfTable, Util};
    use vcpufreq_host::fakes::FakeHost;

    const BIG_MAX: &str = "sys/devices/system/cpu/cpufreq/policy2/scaling_max_freq";
    const LITTLE_MAX: &str = "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq";

    fn host() -> FakeHost {
        let host = FakeHost::two_plus_two();
        host.write(LITTLE_MAX, "1800000\n");
        host.write(BIG_MAX, "2800000\n");
        host
    }

    fn spec(domain: u32, max: u32, capacity: u16) -> VcpuSpec {
        VcpuSpec {
            table: PerfTable::try_from(vec![Khz(1), Khz(max)]).unwrap(),
            capacity: Util::new(capacity).unwrap(),
            domain: DomainId(domain),
        }
    }

    fn capacities() -> Vec<PcpuCapacity> {
        let of = |pcpu, reference, capacity| PcpuCapacity {
            pcpu,
            reference: Khz(reference),
            capacity: Util::new(capacity).unwrap(),
        };
        let little = [0, 1].map(|pcpu| of(pcpu, 1_800_000, 329));
        let big = [2, 3].map(|pcpu| of(pcpu, 2_800_000, 1024));
        [little, big].concat()
    }

    /// What a look finds, by domain.
    fn found(watch: &mut CapWatch, specs: &[VcpuSpec]) -> Vec<Option<u32>> {
        let caps = watch.look(specs, &capacities(), |_| Some(Tid::current()));
        caps.into_values().map(|cap| cap.map(|khz| khz.0)).collect()
    }

    #[test]
    fn a_domain_has_the_cap_of_its_policy_until_that_goes() {
        let host = host();
        let specs = [
            spec(0, 1_800_000, 329),
            spec(4, 2_800_000, 1024),
            // On a big CPU too, in units of its own.
            spec(5, 1000, 512),
        ];
        let mut watch = CapWatch::of_host(&[vec![0], vec![2], vec![3]], &host.root());
        assert_eq!(found(&mut watch, &specs), [None; 3]);
        host.write(BIG_MAX, "1200000\n");
        let half = Some(1000 * 2 * 12 / 28);
        assert_eq!(found(&mut watch, &specs), [None, Some(1_200_000), half]);
        host.write(BIG_MAX, "1400000\n");
        // All that the last one can use.
        assert_eq!(found(&mut watch, &specs), [None, Some(1_400_000), None]);
        host.write(BIG_MAX, "2800000\n");
        assert_eq!(found(&mut watch, &specs), [None; 3]);
    }

    #[test]
    fn boost_that_is_off_is_a_cap() {
        let host = host();
        host.boost(2, "3000000", false);
        let mut mirror = spec(4, 3_000_000, 1024);
        mirror.table = mirror.table.referring_to(Khz(2_800_000));
        let specs = [mirror];
        let mut watch = CapWatch::of_host(&[vec![2]], &host.root());
        for (max, cap) in [("2800000", Some(2_800_000)), ("3000000", None)] {
            host.write(BIG_MAX, max);
            assert_eq!(found(&mut watch, &specs), [cap], "{max}");
        }
    }

    #[test]
    fn a_vcpu_that_can_be_elsewhere_has_what_it_gets_there() {
        let host = host();
        let big = spec(0, 2_800_000, 1024);
        let mut watch = CapWatch::of_host(&[vec![0, 2]], &host.root());
        let mut capped = |max: &str| {
            host.write(BIG_MAX, max);
            found(&mut watch, std::slice::from_ref(&big))
        };
        // 329 of 1024: what the little CPU gives it.
        let on_little = Some(2_800_000 * 329 / 1024);
        assert_eq!(capped("1200000"), [Some(1_200_000)]);
        assert_eq!(capped("700000"), [on_little]);
        assert_eq!(capped("2800000"), [None]);
    }

    #[test]
    fn a_domain_has_the_cap_of_its_best_vcpu() {
        let host = host();
        let specs = [spec(0, 2_800_000, 1024), spec(0, 2_800_000, 1024)];
        host.write(BIG_MAX, "700000");
        // The second one is where it never gets more: no cap takes that from it.
        for (pins, cap) in [([2, 3], Some(700_000)), ([2, 0], None)] {
            let pins = pins.map(|pcpu| vec![pcpu]);
            let mut watch = CapWatch::of_host(&pins, &host.root());
            assert_eq!(found(&mut watch, &specs), [cap]);
        }
    }

    #[test]
    fn an_unreadable_maximum_is_no_cap() {
        let host = host();
        let specs = [spec(0, 2_800_000, 1024)];
        let mut watch = CapWatch::of_host(&[vec![2]], &host.root());
        for text in ["", "x", "-1", "99999999999"] {
            host.write(BIG_MAX, text);
            assert_eq!(found(&mut watch, &specs), [None], "{text}");
        }
        host.remove(BIG_MAX);
        assert_eq!(found(&mut watch, &specs), [None]);
    }

    #[test]
    fn a_vcpu_that_is_pinned_nowhere_is_where_its_thread_may_be() {
        let host = host();
        let specs = [spec(0, 2_800_000, 1024)];
        let mut watch = CapWatch::of_host(&[vec![]], &host.root());
        for max in [LITTLE_MAX, BIG_MAX] {
            host.write(max, "600000");
        }
        // Wherever this thread may be, all CPUs are capped.
        assert!(found(&mut watch, &specs)[0].is_some());
        let unknown = watch.look(&specs, &capacities(), |_| None);
        assert_eq!(unknown[&DomainId(0)], None);
    }
}
