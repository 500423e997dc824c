// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What answers a guest's accesses, as a VMM's bus sees it; it can be exchanged while the guest runs.

use std::cell::Cell;
use std::sync::{Arc, RwLock};

use vcpufreq_device::{Actuator, Events, MmioRegion, Source, VcpuId};
use vcpufreq_host::current_cpu;

use crate::sync::unpoisoned;

thread_local! {
    /// The vCPU that this thread runs. Not an argument of each access: the register region alone
    /// needs it, below devices that wrap it.
    static VCPU: Cell<Option<VcpuId>> = const { Cell::new(None) };
    /// The pCPU on which it last entered the guest.
    static PCPU: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Accesses that this thread makes from now on are those of `vcpu`: for a device without a bridge. With
/// one, [`register_this_thread`](crate::BridgeHandle::register_this_thread) does it.
pub fn accesses_are_of(vcpu: VcpuId) {
    VCPU.set(Some(vcpu));
    PCPU.set(None);
}

/// The vCPU that this thread runs, if it is on another pCPU than at the last call.
pub(crate) fn moved_vcpu() -> Option<VcpuId> {
    let now = current_cpu().ok();
    VCPU.get().filter(|_| PCPU.replace(now) != now)
}

/// Something that answers guest accesses to a range of addresses.
///
/// Called on the thread of the vCPU that made the access. Whatever a guest does, neither function
/// may panic. At the console, the vCPU waits for the reader of its output. At the vcpufreq
/// registers, it waits for a host call for the same domain, which on the path `ioeventfd` the
/// worker may be making (`IoeventfdRegion`), and, while one path replaces another, for accesses under
/// way.
pub trait MmioDevice: Send + Sync {
    /// Fills `data` with what the guest reads at `offset` from the range's start.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Takes what the guest writes at `offset` from the range's start.
    fn write(&self, offset: u64, data: &[u8]);
}

impl<A: Actuator, S: Source, E: Events> MmioDevice for MmioRegion<A, S, E> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        Self::read(self, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.write_by(VCPU.get(), offset, data);
    }
}

/// Passes accesses on to whatever is in place.
pub struct SwappableDevice(RwLock<Arc<dyn MmioDevice>>);

impl SwappableDevice {
    /// With `device` in place.
    pub fn new(device: Arc<dyn MmioDevice>) -> Self {
        Self(RwLock::new(device))
    }

    /// Puts `device` in place; on return no access is at the old one.
    pub fn exchange(&self, device: Arc<dyn MmioDevice>) {
        *unpoisoned(self.0.write()) = device;
    }
}

impl MmioDevice for SwappableDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let device = unpoisoned(self.0.read());
        device.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let device = unpoisoned(self.0.read());
        device.write(offset, data);
    }
}
