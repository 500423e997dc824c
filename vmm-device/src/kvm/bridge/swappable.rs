// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device on the bus, which can be exchanged while the guest runs.

use std::sync::{Arc, PoisonError, RwLock};

use crate::kvm::mmio_device::MmioDevice;

/// Passes accesses on to whatever is in place.
pub struct SwappableDevice(RwLock<Arc<dyn MmioDevice>>);

impl SwappableDevice {
    /// With `device` in place.
    pub fn new(device: Arc<dyn MmioDevice>) -> Self {
        Self(RwLock::new(device))
    }

    /// Puts `device` in place; on return no access is at the old one.
    pub fn exchange(&self, device: Arc<dyn MmioDevice>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = device;
    }
}

impl MmioDevice for SwappableDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let device = self.0.read().unwrap_or_else(PoisonError::into_inner);
        device.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let device = self.0.read().unwrap_or_else(PoisonError::into_inner);
        device.write(offset, data);
    }
}
