// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine of kvm-ioctls.
#![expect(
    unsafe_code,
    reason = "memory slots and KVM_IOEVENTFD are ioctls on raw addresses"
)]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvm_bindings::{
    kvm_ioeventfd, kvm_ioeventfd_flag_nr_datamatch, kvm_ioeventfd_flag_nr_deassign,
    kvm_userspace_memory_region,
};
use kvm_ioctls::VmFd;

use super::offload::{IoEventFd, KvmVm, MemorySlot};

/// `KVM_IOEVENTFD`, `_IOW(KVMIO, 0x79, struct kvm_ioeventfd)`.
const IOEVENTFD: libc::c_ulong = 0x4040_ae79;

/// A virtual machine and the number of a memory slot that it does not use.
#[derive(Clone, Debug)]
pub struct KvmSlot {
    /// The virtual machine.
    pub vm: Arc<VmFd>,
    /// The slot's number, below what KVM answers to `KVM_CAP_NR_MEMSLOTS`.
    pub slot: u32,
}

impl KvmSlot {
    /// With 0 bytes the slot is free again.
    fn set(&self, slot: MemorySlot, bytes: u64) -> io::Result<()> {
        let slot = kvm_userspace_memory_region {
            slot: self.slot,
            flags: slot.flags(),
            guest_phys_addr: slot.guest_address(),
            memory_size: bytes,
            userspace_addr: slot.host_address(),
        };
        // SAFETY: a MemorySlot stays mapped as long as its KvmOffload. The guest only reads it, or
        // all its users take it for memory that a guest changes at any time.
        let set = unsafe { self.vm.set_user_memory_region(slot) };
        set.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    /// kvm-ioctls has writes of any value for any width only; the registers take four bytes.
    fn ioeventfd(&self, to: IoEventFd<'_>, flag: u32) -> io::Result<()> {
        let matches = u32::from(to.value.is_some()) << kvm_ioeventfd_flag_nr_datamatch;
        let ioeventfd = kvm_ioeventfd {
            datamatch: to.value.unwrap_or(0).into(),
            addr: to.address,
            len: 4,
            fd: to.event.as_raw_fd(),
            flags: matches | flag,
            ..Default::default()
        };
        // SAFETY: the kernel reads one kvm_ioeventfd at the pointer.
        match unsafe { libc::ioctl(self.vm.as_raw_fd(), IOEVENTFD as _, &raw const ioeventfd) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl KvmVm for KvmSlot {
    fn map(&self, slot: MemorySlot) -> io::Result<()> {
        self.set(slot, slot.size())
    }

    fn unmap(&self, slot: MemorySlot) -> io::Result<()> {
        self.set(slot, 0)
    }

    fn add_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()> {
        self.ioeventfd(ioeventfd, 0)
    }

    fn remove_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()> {
        self.ioeventfd(ioeventfd, 1 << kvm_ioeventfd_flag_nr_deassign)
    }
}
