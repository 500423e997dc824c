// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine in KVM, as the device's library needs it.

use std::io;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{IoEventAddress, VmFd};
use vcpufreq_device::kvm::{IoEventFd, KvmVm, ReadOnlySlot};

use super::sys;

/// A virtual machine with the number of a free memory slot.
#[derive(Debug)]
pub struct FreeSlot<'a> {
    /// The virtual machine.
    pub vm: &'a VmFd,
    /// The number.
    pub number: u32,
}

impl FreeSlot<'_> {
    /// With 0 bytes, the slot is free again.
    fn set(&self, slot: ReadOnlySlot, bytes: u64) -> io::Result<()> {
        let slot = kvm_userspace_memory_region {
            slot: self.number,
            flags: KVM_MEM_READONLY,
            guest_phys_addr: slot.guest_address(),
            memory_size: bytes,
            userspace_addr: slot.host_address(),
        };
        sys::set_slot(self.vm, slot).map_err(io_error)
    }
}

impl KvmVm for FreeSlot<'_> {
    fn map_read_only(&self, slot: ReadOnlySlot) -> io::Result<()> {
        self.set(slot, slot.size())
    }

    fn unmap(&self, slot: ReadOnlySlot) -> io::Result<()> {
        self.set(slot, 0)
    }

    fn add_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()> {
        let IoEventFd {
            address,
            value,
            event,
        } = ioeventfd;
        let place = IoEventAddress::Mmio(address);
        let added = match value {
            // A u32 makes KVM match writes of four bytes only.
            Some(khz) => self.vm.register_ioevent(event, &place, khz),
            None => sys::ioeventfd_of_any(self.vm, address, event, true),
        };
        added.map_err(io_error)
    }

    fn remove_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()> {
        let IoEventFd {
            address,
            value,
            event,
        } = ioeventfd;
        let place = IoEventAddress::Mmio(address);
        let removed = match value {
            Some(khz) => self.vm.unregister_ioevent(event, &place, khz),
            None => sys::ioeventfd_of_any(self.vm, address, event, false),
        };
        removed.map_err(io_error)
    }
}

fn io_error(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}
