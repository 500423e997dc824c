// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long which request was in force, as far as the worker sees it.

use std::time::Duration;

use vcpufreq_device::{Khz, VcpuId};

use super::Shared;
use super::worker::LOOK;

impl Shared {
    /// Adds to the device's times what of a domain's requests is in force. Requests that the module
    /// or the scheduler carries out are seen at looks alone: those in between count as the one
    /// before.
    pub(super) fn time(&self, domain: u32) {
        let mut members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let Some((vcpu, _)) = members.find(|(_, known)| known.domain == domain) else {
            return;
        };
        let in_force = self.clamps() && self.host.wanted(domain).is_some();
        let khz = self.host.asked(domain).filter(|_| in_force);
        let latest = self.host.latest(self.last_writer(domain));
        let age = latest.map_or(0, |latest| {
            vcpufreq_host::monotonic_ns().saturating_sub(latest.at_ns)
        });
        // An older one waited for a token, or was not seen.
        let age = Duration::from_nanos(age).min(LOOK);
        self.device.carried_out(vcpu, khz.unwrap_or(Khz(0)), age);
    }

    /// Whether anything puts requests into force.
    fn clamps(&self) -> bool {
        self.scx.is_some() || self.device.actuator().clamps()
    }
}
