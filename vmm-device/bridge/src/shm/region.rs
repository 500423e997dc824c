// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The accesses to shared memory and its doorbell that exit all the same: a ring for no vCPU, or
//! anything when KVM does not handle it.

#![forbid(unsafe_code)]

use std::sync::Arc;

use vcpufreq_device::{REG_CUR_PERF, REG_SET_PERF, REG_WIDTH, REGION_STRIDE, VcpuId, page_of};

use super::layout::{self, DOORBELL, DOORBELL_PAGE, PAGES};
use super::memory::SharedMemory;
use crate::mmio_device::MmioDevice;
use crate::offload::SlotMemory;

/// Memory, and the doorbell's page behind it, on the bus of a VMM.
pub struct ShmRegion {
    memory: Arc<SharedMemory>,
    registers: Arc<dyn MmioDevice>,
}

impl ShmRegion {
    /// Of `memory`, in front of the bridge's [registers](crate::Bridge::mmio).
    #[must_use]
    pub fn new(memory: Arc<SharedMemory>, registers: Arc<dyn MmioDevice>) -> Self {
        Self { memory, registers }
    }

    /// Bytes that it takes of the guest's address space.
    #[must_use]
    pub fn size(&self) -> u64 {
        SlotMemory::size(&*self.memory) + DOORBELL_PAGE
    }

    /// The vCPU whose page `offset` is in, and the offset there.
    fn register(&self, offset: u64) -> Option<(VcpuId, u64)> {
        page_of(offset.checked_sub(PAGES as u64)?).filter(|(vcpu, _)| vcpu.0 < self.memory.vcpus())
    }
}

/// Where the registers of `vcpu` begin.
fn page(vcpu: VcpuId) -> u64 {
    u64::from(vcpu.0) * REGION_STRIDE
}

impl MmioDevice for ShmRegion {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.register(offset) {
            // The device knows it now; memory may be older.
            Some((vcpu, REG_CUR_PERF)) => self.registers.read(page(vcpu) + REG_CUR_PERF, data),
            _ if data.len() == REG_WIDTH && offset % REG_WIDTH as u64 == 0 => {
                data.copy_from_slice(&self.memory.load(offset).to_le_bytes());
            }
            _ => data.fill(0),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(bytes) = <[u8; REG_WIDTH]>::try_from(data) else {
            return;
        };
        let value = u32::from_le_bytes(bytes);
        if let Some((vcpu, REG_SET_PERF)) = self.register(offset) {
            self.memory.store_request(vcpu, value);
        }
        if offset != SlotMemory::size(&*self.memory) + DOORBELL {
            return;
        }
        let rung = layout::rung(value).filter(|vcpu| vcpu.0 < self.memory.vcpus());
        if let Some(vcpu) = rung {
            let requested = self.memory.requested(vcpu).to_le_bytes();
            self.registers.write(page(vcpu) + REG_SET_PERF, &requested);
        }
    }
}
