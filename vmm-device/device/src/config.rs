// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a device is made of: its vCPUs, their tables and domains, and how requests are answered.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use crate::capacity::{RatedCapacity, guest_capacities};
use crate::limit::RateLimit;
use crate::regs::MAX_VCPUS;
use crate::table::PerfTable;
use crate::units::{DomainId, Util, VcpuId};

/// What a request does to the host's clamps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClampMode {
    /// uclamp.min, and uclamp.max too for a request that is a ceiling, which a guest makes while it
    /// limits itself. Whatever has the device calls
    /// [`Device::lift_ceilings`](crate::Device::lift_ceilings). With an actuator that serves its own
    /// vCPU alone it is [`Self::Floor`].
    #[default]
    Ceilings,
    /// uclamp.min only: the host runs at least as fast as asked.
    Floor,
    /// uclamp.min and uclamp.max: the host runs exactly as fast as asked.
    Exact,
}

/// What the host's schedutil adds to a clamped utilization before it picks a frequency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headroom {
    /// Nothing: Linux 6.8 and later (`sugov_effective_cpu_perf`).
    None,
    /// A quarter: before 6.8 `map_util_perf` ran after the clamp. Asking for 4/5 makes up for it.
    Quarter,
}

/// What cur_perf shows a guest. The actual frequency depends on all load of the pCPU, and so
/// reveals other guests' load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CurPerfVisibility {
    /// What the vCPU gets, as it is.
    Exact,
    /// The entry of the vCPU's table nearest to the actual frequency: the guest sees no finer steps
    /// than it can request. A table of one entry permits any request: as
    /// [`CurPerfVisibility::Exact`].
    #[default]
    Table,
    /// The frequency that its domain last requested, at first the maximum. It shows nothing of the
    /// host.
    Request,
}

/// One vCPU as its guest sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuSpec {
    /// Performance levels.
    pub table: PerfTable,
    /// Capacity at [`PerfTable::reference`], 1..=1024, on the host's scale: that of the pCPU it
    /// mirrors.
    pub capacity: Util,
    /// Its performance domain.
    pub domain: DomainId,
}

/// A whole device. Checked by [`DeviceConfig::check`] when a device is made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The vCPUs, 1..=512; the index is the vCPU's number.
    pub vcpus: Vec<VcpuSpec>,
    /// What a request does to the host's clamps.
    pub mode: ClampMode,
    /// What the running host kernel adds to a clamp.
    pub headroom: Headroom,
    /// What the guest reads from cur_perf.
    pub visibility: CurPerfVisibility,
    /// How often the requests that a vCPU writes reach the host, and for each domain those of the
    /// VM; without one, as often as they are made.
    pub rate_limit: Option<RateLimit>,
}

/// Which rule a configuration breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No vCPU, or more than the interface has room for.
    #[error("{count} vCPUs; a device has 1 to {MAX_VCPUS}")]
    VcpuCount {
        /// vCPUs given.
        count: usize,
    },
    /// A capacity of 0.
    #[error("vCPU {vcpu} has capacity 0; it must be 1 to 1024")]
    ZeroCapacity {
        /// The vCPU.
        vcpu: VcpuId,
    },
    /// Two vCPUs of a domain differ in table or capacity, but a cpufreq policy has only one.
    #[error(
        "vCPUs {first} and {second} are in domain {domain} but differ in table or capacity; \
         give them the same, or domains of their own"
    )]
    UnequalDomain {
        /// The domain.
        domain: DomainId,
        /// Its first vCPU.
        first: VcpuId,
        /// The one that differs.
        second: VcpuId,
    },
}

impl Headroom {
    /// The rule of Linux `major.minor`.
    #[must_use]
    pub fn for_kernel(major: u32, minor: u32) -> Self {
        if (major, minor) >= (6, 8) {
            Self::None
        } else {
            Self::Quarter
        }
    }

    /// Factor on a utilization, as a fraction.
    #[must_use]
    pub fn factor(self) -> (u32, u32) {
        match self {
            Self::None => (1, 1),
            Self::Quarter => (4, 5),
        }
    }
}

impl VcpuSpec {
    /// Its capacity at its highest level.
    #[must_use]
    pub fn rated(&self) -> RatedCapacity {
        RatedCapacity {
            capacity: self.capacity,
            reference: self.table.reference(),
            top: self.table.max(),
        }
    }
}

impl DeviceConfig {
    /// A device whose requests are floors, and ceilings where the guest says so, without a limit: for
    /// a host that adds nothing to a clamp.
    #[must_use]
    pub fn new(vcpus: Vec<VcpuSpec>) -> Self {
        Self {
            vcpus,
            mode: ClampMode::default(),
            headroom: Headroom::None,
            visibility: CurPerfVisibility::Exact,
            rate_limit: None,
        }
    }

    /// Checks every rule.
    ///
    /// # Errors
    /// The first rule that is broken, with the values that break it.
    pub fn check(&self) -> Result<(), ConfigError> {
        let count = self.vcpus.len();
        if count == 0 || count > MAX_VCPUS {
            return Err(ConfigError::VcpuCount { count });
        }
        let mut first_of: BTreeMap<DomainId, (VcpuId, &VcpuSpec)> = BTreeMap::new();
        for (vcpu, spec) in self.numbered() {
            if spec.capacity == Util::ZERO {
                return Err(ConfigError::ZeroCapacity { vcpu });
            }
            let (first, model) = *first_of.entry(spec.domain).or_insert((vcpu, spec));
            if spec != model {
                return Err(ConfigError::UnequalDomain {
                    domain: spec.domain,
                    first,
                    second: vcpu,
                });
            }
        }
        Ok(())
    }

    /// The capacities that the guest learns, by vCPU.
    #[must_use]
    pub fn guest_capacities(&self) -> Vec<Util> {
        let rated: Vec<_> = self.vcpus.iter().map(VcpuSpec::rated).collect();
        guest_capacities(&rated)
    }

    /// The same device for memory that answers by itself: each table has its highest entry alone, so
    /// that no selection needs an answer. A ceiling, which a guest renews by writing the same value
    /// again, can't be seen there.
    #[must_use]
    pub fn without_steps(mut self) -> Self {
        for spec in &mut self.vcpus {
            let max = PerfTable::of_max(spec.table.max());
            spec.table = max.referring_to(spec.table.reference());
        }
        if self.mode == ClampMode::Ceilings {
            self.mode = ClampMode::Floor;
        }
        self
    }

    /// The domains, each once, in order of their numbers.
    #[must_use]
    pub fn domains(&self) -> Vec<DomainId> {
        let mut domains: Vec<_> = self.vcpus.iter().map(|v| v.domain).collect();
        domains.sort_unstable();
        domains.dedup();
        domains
    }

    fn numbered(&self) -> impl Iterator<Item = (VcpuId, &VcpuSpec)> {
        (0..=u16::MAX).map(VcpuId).zip(&self.vcpus)
    }
}
