// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The accesses that exit all the same: a value that is in no table, another
//! register, or anything when KVM doesn't handle it.

use std::sync::Arc;

use vcpufreq_device::{Actuator, Device, Events, REG_SET_PERF, REG_WIDTH, Source, page_of};

use super::pending_writes::PendingWrites;
use crate::mmio_device::MmioDevice;

/// The device's region, with requests in the order in which they were written.
///
/// If KVM signals requests of its domain, an exiting request waits while the worker or another vCPU
/// applies one of them; nothing else waits.
pub struct IoeventfdRegion<A, S, E> {
    region: Arc<dyn MmioDevice>,
    device: Arc<Device<A, S, E>>,
    pending: Arc<PendingWrites>,
}

impl<A, S, E> IoeventfdRegion<A, S, E> {
    /// `region`, whose older requests may be `pending`.
    pub fn new(
        region: Arc<dyn MmioDevice>,
        device: Arc<Device<A, S, E>>,
        pending: Arc<PendingWrites>,
    ) -> Self {
        Self {
            region,
            device,
            pending,
        }
    }
}

impl<A: Actuator, S: Source, E: Events> MmioDevice for IoeventfdRegion<A, S, E> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.region.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let writes = match page_of(offset) {
            Some((vcpu, REG_SET_PERF)) if data.len() == REG_WIDTH => self.pending.of_vcpu(vcpu),
            _ => None,
        };
        // What this vCPU wrote before is older. The domain stays locked, so
        // that the worker can't be about to carry it out: what it took before
        // would come after this one.
        if let Some(mut writes) = writes {
            self.pending.drain_locked(&mut writes, &self.device);
            self.region.write(offset, data);
        } else {
            self.region.write(offset, data);
        }
    }
}

#[cfg(test)]
#[path = "region_tests.rs"]
mod tests;
