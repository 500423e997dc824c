// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a unit reads and decides by.

use vcpufreq_host::CpuList;

use vcpufreq_host::undo::ReadHost;

use crate::{
    partition::{self, Partition},
    profile::{Profile, Scope, Settings},
};

/// The host's CPUs in sysfs.
pub(crate) const CPU: &str = "/sys/devices/system/cpu";

/// The facts that a unit decides by.
pub(crate) struct UnitContext<'a> {
    pub look: &'a dyn ReadHost,
    pub partition: &'a Partition,
    pub profile: &'a Profile,
    pub rt: CpuList,
    pub online: CpuList,
}

impl<'a> UnitContext<'a> {
    pub(crate) fn new(
        look: &'a dyn ReadHost,
        partition: &'a Partition,
        profile: &'a Profile,
    ) -> Self {
        let everyone = partition.rt().or(&partition.housekeeping);
        Self {
            look,
            partition,
            profile,
            rt: partition.rt(),
            online: partition::list(look, partition::ONLINE).unwrap_or(everyone),
        }
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.profile.settings
    }

    pub(super) fn housekeeping(&self) -> &CpuList {
        &self.partition.housekeeping
    }

    pub(super) fn cpus_of(&self, scope: Scope) -> &CpuList {
        match scope {
            Scope::Rt => &self.rt,
            Scope::All => &self.online,
        }
    }
}
