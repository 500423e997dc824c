// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the programs know of a vCPU, in this project's units.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;

use vcpufreq_device::{
    Clamp, ClampMode, CurPerfVisibility, Headroom, Pace, RateLimit, Util, VcpuSpec,
};

use crate::layout::{self, PolicyEntry, TABLE_MAX};

/// What puts clamps into force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActuateBy {
    /// The VMM, which gets a [`BpfEvent`](crate::BpfEvent).
    Worker,
    /// The kernel module, before the guest goes on.
    Kfunc,
    /// Nothing: the host has no uclamp. Requests are counted as not applicable.
    Nothing,
    /// The service's scheduler, before the guest goes on; [`Self::Worker`] when it is gone.
    Scx,
}

/// How a vCPU's requests are answered. Can be changed while the guest runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuPolicy {
    /// Its table, capacity and domain.
    pub spec: VcpuSpec,
    /// Index of its domain among the VM's domains, counted from 0.
    pub domain: u32,
    /// What a request does to the clamps.
    pub clamp: ClampMode,
    /// What the running kernel adds to a clamp.
    pub headroom: Headroom,
    /// What the guest reads.
    pub visibility: CurPerfVisibility,
    /// What puts clamps into force.
    pub actuate: ActuateBy,
    /// How often a vCPU may write, and the VM for each of its domains that counts
    /// ([`VM_DOMAINS`](vcpufreq_device::VM_DOMAINS)); `None`: as often as the guest likes.
    pub limit: Option<RateLimit>,
    /// No clamp is below it; zero is none.
    pub floor: Util,
    /// Whether what else runs on its pCPU is added to its clamps; never with
    /// [`ClampMode::Exact`].
    pub sum: bool,
    /// Whether the VMM gets an event for each request and its outcome.
    pub tell: bool,
}

impl VcpuPolicy {
    pub(crate) fn adds_others(&self) -> bool {
        self.sum && self.clamp != ClampMode::Exact
    }

    /// Whether the programs look at its pCPU's utilization, to add it or to show it.
    #[cfg_attr(not(feature = "load"), allow(dead_code))]
    pub(crate) fn looks_at_load(&self) -> bool {
        self.adds_others() || self.actuate == ActuateBy::Scx
    }

    /// A request's clamp with `others` added, the utilization that its pCPU has besides: no more
    /// than the vCPU could ask for by itself. `summed` of `bpf/arith.h`.
    #[cfg_attr(not(feature = "load"), allow(dead_code))]
    pub(crate) fn summed(&self, clamp: Clamp, others: u32) -> Clamp {
        // A limited task's neighbours lift its limit by themselves, while they run.
        if !self.adds_others() || clamp.max != Util::MAX {
            return clamp;
        }
        let min = u32::from(clamp.min.get());
        let sum = min.saturating_add(others).min(self.limit()).max(min);
        Clamp {
            min: Util::saturating(sum.into()),
            ..clamp
        }
    }

    /// The highest clamp that the vCPU can request by itself.
    #[cfg_attr(not(feature = "load"), allow(dead_code))]
    fn limit(&self) -> u32 {
        let top = self.spec.table.max();
        let decision = vcpufreq_device::clamp(&self.spec, top, self.clamp, self.headroom);
        decision.clamp.min.get().into()
    }

    /// As the programs of a VM with so many domains read it.
    #[cfg_attr(not(feature = "load"), allow(dead_code))]
    pub(crate) fn entry(&self, domains: NonZeroU32) -> PolicyEntry {
        let (headroom_num, headroom_den) = self.headroom.factor();
        const NONE: Pace = Pace {
            token_ns: 0,
            slack_ns: 0,
        };
        let writer = self.limit.map_or(NONE, RateLimit::each);
        let vm = self.limit.map_or(NONE, |limit| limit.of_vm(domains));
        let mut table_khz = [0; TABLE_MAX];
        let entries = self.spec.table.entries();
        for (to, from) in table_khz.iter_mut().zip(entries) {
            *to = from.0;
        }
        PolicyEntry {
            perf_max_khz: self.spec.table.max().0,
            reference_khz: self.spec.table.reference().0,
            capacity: self.spec.capacity.get().into(),
            limit: self.limit(),
            headroom_num,
            headroom_den,
            clamp: match self.clamp {
                ClampMode::Floor => layout::CLAMP_FLOOR,
                ClampMode::Exact => layout::CLAMP_EXACT,
                ClampMode::Ceilings => layout::CLAMP_CEILINGS,
            },
            visibility: match self.visibility {
                CurPerfVisibility::Exact => layout::REPORT_EXACT,
                CurPerfVisibility::Table => layout::REPORT_TABLE,
                CurPerfVisibility::Request => layout::REPORT_REQUEST,
            },
            actuator: match self.actuate {
                ActuateBy::Worker => layout::BY_WORKER,
                ActuateBy::Kfunc => layout::BY_KFUNC,
                ActuateBy::Nothing => layout::NO_ACTUATOR,
                ActuateBy::Scx => layout::BY_SCX,
            },
            domain: self.domain,
            interval_ns: writer.token_ns,
            burst_ns: writer.slack_ns,
            vm_interval_ns: vm.token_ns,
            vm_burst_ns: vm.slack_ns,
            table_len: self.spec.table.register_len(),
            tell: self.tell.into(),
            sum: self.adds_others().into(),
            floor: self.floor.get(),
            table_khz,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Promise: others are added up to what the vCPU could ask for, and never in mode `exact`.
    use super::*;
    use vcpufreq_device::{DomainId, Khz, PerfTable};

    fn policy(clamp: ClampMode, headroom: Headroom) -> VcpuPolicy {
        VcpuPolicy {
            spec: VcpuSpec {
                table: PerfTable::try_from(vec![Khz(600_000)]).unwrap(),
                capacity: Util::saturating(400),
                domain: DomainId(0),
            },
            domain: 0,
            clamp,
            headroom,
            visibility: CurPerfVisibility::Exact,
            actuate: ActuateBy::Kfunc,
            limit: None,
            floor: Util::ZERO,
            sum: true,
            tell: false,
        }
    }

    #[test]
    fn others_are_added_to_the_capacity() {
        let floor = policy(ClampMode::Floor, Headroom::None);
        let before_6_8 = policy(ClampMode::Floor, Headroom::Quarter);
        let exact = policy(ClampMode::Exact, Headroom::None);
        let maximum = VcpuPolicy {
            sum: false,
            ..floor.clone()
        };
        let rows = [
            (&floor, 100, 0, 100),
            (&floor, 100, 200, 300),
            (&floor, 100, u32::MAX, 400),
            // A floor of the VMM's may be above the capacity.
            (&floor, 500, 200, 500),
            (&before_6_8, 100, 1024, 320),
            (&exact, 100, 200, 100),
            (&maximum, 100, 200, 100),
        ];
        for (policy, min, others, sum) in rows {
            let clamp = Clamp {
                min: Util::saturating(min),
                max: Util::MAX,
            };
            let summed = policy.summed(clamp, others);
            assert_eq!(summed.min, Util::saturating(sum), "{min} + {others}");
            assert_eq!(summed.max, clamp.max);
        }
    }

    #[test]
    fn nothing_is_added_to_a_ceiling() {
        let floor = policy(ClampMode::Floor, Headroom::None);
        let ceiling = Clamp {
            min: Util::saturating(100),
            max: Util::saturating(100),
        };
        assert_eq!(floor.summed(ceiling, 200), ceiling);
    }
}
