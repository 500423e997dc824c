// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Joins the device to a bus: offsets and bytes on one side, registers and values on the other.

#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::device::Device;
use crate::ports::{Actuator, Event, Events, Source};
use crate::regs::{REGION_STRIDE, ReadReg, WriteReg, page_of, region_size};
use crate::units::VcpuId;

/// The device as an MMIO region: one page a vCPU, padded to 64 KiB.
#[derive(Debug)]
pub struct MmioRegion<A, S, E> {
    device: Arc<Device<A, S, E>>,
}

impl<A: Actuator, S: Source, E: Events> MmioRegion<A, S, E> {
    /// The region of `device`.
    pub fn new(device: Arc<Device<A, S, E>>) -> Self {
        Self { device }
    }

    /// The device behind it.
    #[must_use]
    pub fn device(&self) -> &Arc<Device<A, S, E>> {
        &self.device
    }

    /// Bytes that the region takes of the guest's address space.
    #[must_use]
    pub fn size(&self) -> u64 {
        region_size(u16::try_from(self.device.vcpus.len()).unwrap_or(u16::MAX))
    }

    /// A guest's read of `data.len()` bytes at `offset` in the region. What is not in the
    /// contract reads as 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let (vcpu, in_page) = self.split(offset);
        self.device.count_exit(vcpu, false);
        match (vcpu, ReadReg::decode(in_page, data.len())) {
            (Some(vcpu), Some(reg)) => {
                data.copy_from_slice(&self.device.read(vcpu, reg).to_le_bytes());
            }
            (vcpu, _) => self.device.illegal(&Event::IllegalAccess {
                vcpu,
                offset,
                len: data.len(),
                write: false,
            }),
        }
    }

    /// [`Self::write_by`] a vCPU that isn't known.
    pub fn write(&self, offset: u64, data: &[u8]) {
        self.write_by(None, offset, data);
    }

    /// The vCPU `by` writes `data` at `offset` in the region. What is not in the contract is
    /// dropped.
    pub fn write_by(&self, by: Option<VcpuId>, offset: u64, data: &[u8]) {
        let (vcpu, in_page) = self.split(offset);
        self.device.count_exit(vcpu, true);
        let reg = WriteReg::decode(in_page, data.len());
        match (vcpu, reg, <[u8; 4]>::try_from(data)) {
            (Some(vcpu), Some(reg), Ok(bytes)) => {
                let value = u32::from_le_bytes(bytes);
                self.device.write_by(by, vcpu, reg, value);
            }
            (vcpu, ..) => self.device.illegal(&Event::IllegalAccess {
                vcpu,
                offset,
                len: data.len(),
                write: true,
            }),
        }
    }

    /// The vCPU whose page `offset` is in, if there is one, and the offset in that page.
    fn split(&self, offset: u64) -> (Option<VcpuId>, u64) {
        let page = page_of(offset).filter(|(vcpu, _)| vcpu.index() < self.device.vcpus.len());
        (page.map(|(vcpu, _)| vcpu), offset % REGION_STRIDE)
    }
}
