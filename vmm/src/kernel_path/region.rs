// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The accesses that exit all the same: a value that is in no table, another
//! register, or anything when KVM doesn't handle it.

use std::sync::Arc;

use vcpufreq_device::{REG_SET_PERF, REGION_STRIDE, VcpuId};

use super::{Inboxes, Requests};
use crate::vm::bus::MmioDevice;

/// The device's region, with requests in the order in which they were written.
pub struct KernelRegion {
    region: Arc<dyn MmioDevice>,
    device: Arc<dyn Requests>,
    inboxes: Arc<Inboxes>,
}

impl KernelRegion {
    /// `region`, whose older requests may be in `inboxes`.
    pub fn new(
        region: Arc<dyn MmioDevice>,
        device: Arc<dyn Requests>,
        inboxes: Arc<Inboxes>,
    ) -> Self {
        Self {
            region,
            device,
            inboxes,
        }
    }
}

impl MmioDevice for KernelRegion {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.region.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let vcpu = u16::try_from(offset / REGION_STRIDE).map(VcpuId);
        let inbox = match vcpu {
            Ok(vcpu) if offset % REGION_STRIDE == REG_SET_PERF => self.inboxes.of(vcpu),
            _ => None,
        };
        // What this vCPU wrote before is older. The inbox stays locked, so
        // that the worker can't be about to carry it out.
        if let Some(mut inbox) = inbox {
            self.inboxes.drain_locked(&mut inbox, &*self.device);
            self.region.write(offset, data);
        } else {
            self.region.write(offset, data);
        }
    }
}
