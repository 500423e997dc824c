// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the programs are told about a vCPU, in this project's units.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;

use vcpufreq_device::{
    Clamp, ClampMode, CurPerfVisibility, Headroom, Pace, RateLimit, Util, VcpuSpec,
};

use crate::layout::{self, PolicyEntry, TABLE_MAX};

/// What puts clamps into force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActuateBy {
    /// The VMM, which gets an [`Event`](crate::Event).
    Worker,
    /// The kernel module, before the guest goes on.
    Kfunc,
    /// Nobody: the host has no uclamp. Requests are counted as not applicable.
    Nobody,
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
    /// What the guest is told.
    pub visibility: CurPerfVisibility,
    /// Who acts.
    pub actuate: ActuateBy,
    /// How often a vCPU may write, and the VM for each of its domains; `None`: as often as the
    /// guest likes.
    pub limit: Option<RateLimit>,
    /// No clamp is below it; zero is none.
    pub floor: Util,
    /// Whether the VMM is told of each request, and what became of it.
    pub tell: bool,
}

impl VcpuPolicy {
    /// `clamp`, not below the lower bound.
    #[cfg_attr(not(feature = "load"), allow(dead_code))]
    pub(crate) fn raised(&self, clamp: Clamp) -> Clamp {
        Clamp {
            min: clamp.min.max(self.floor),
            max: clamp.max.max(self.floor),
        }
    }

    /// As the programs of a VM with so many domains read it.
    #[cfg_attr(not(feature = "load"), allow(dead_code))]
    pub(crate) fn entry(&self, domains: NonZeroU32) -> PolicyEntry {
        let (headroom_num, headroom_den) = match self.headroom {
            Headroom::None => (1, 1),
            Headroom::Quarter => (4, 5),
        };
        const NONE: Pace = Pace {
            token_ns: 0,
            slack_ns: 0,
        };
        let writer = self.limit.map_or(NONE, RateLimit::each);
        let vm = self.limit.map_or(NONE, |limit| limit.times(domains));
        let mut table_khz = [0; TABLE_MAX];
        let entries = self.spec.table.entries();
        for (to, from) in table_khz.iter_mut().zip(entries) {
            *to = from.0;
        }
        PolicyEntry {
            perf_max_khz: self.spec.table.max().0,
            capacity: self.spec.capacity.get().into(),
            headroom_num,
            headroom_den,
            clamp: match self.clamp {
                ClampMode::Floor => layout::CLAMP_FLOOR,
                ClampMode::Exact => layout::CLAMP_EXACT,
            },
            visibility: match self.visibility {
                CurPerfVisibility::Exact => layout::REPORT_EXACT,
                CurPerfVisibility::Table => layout::REPORT_TABLE,
                CurPerfVisibility::Request => layout::REPORT_REQUEST,
            },
            actuator: match self.actuate {
                ActuateBy::Worker => layout::BY_WORKER,
                ActuateBy::Kfunc => layout::BY_KFUNC,
                ActuateBy::Nobody => layout::BY_NOBODY,
            },
            domain: self.domain,
            interval_ns: writer.token_ns,
            burst_ns: writer.slack_ns,
            vm_interval_ns: vm.token_ns,
            vm_burst_ns: vm.slack_ns,
            table_len: self.spec.table.register_len(),
            tell: self.tell.into(),
            floor: self.floor.get(),
            table_khz,
        }
    }
}
