// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine by its open file, whichever crate has opened it.
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

use super::offload::{IoEventFd, KvmVm, MemorySlot};

/// `KVM_SET_USER_MEMORY_REGION`, `_IOW(KVMIO, 0x46, struct kvm_userspace_memory_region)`.
const SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
/// `KVM_IOEVENTFD`, `_IOW(KVMIO, 0x79, struct kvm_ioeventfd)`.
const IOEVENTFD: libc::c_ulong = 0x4040_ae79;

/// A virtual machine and the number of a memory slot that it does not use.
#[derive(Clone)]
pub struct KvmSlot {
    /// The virtual machine's file, such as a `VmFd` of kvm-ioctls. KVM's requests go to it, whatever it is.
    pub vm: Arc<dyn AsRawFd + Send + Sync>,
    /// The slot's number, below what KVM answers to `KVM_CAP_NR_MEMSLOTS`.
    pub slot: u32,
}

impl KvmSlot {
    /// With 0 bytes the slot is free again.
    fn set(&self, slot: MemorySlot, bytes: u64) -> io::Result<()> {
        self.ioctl(
            SET_USER_MEMORY_REGION,
            &kvm_userspace_memory_region {
                slot: self.slot,
                flags: slot.flags(),
                guest_phys_addr: slot.guest_address(),
                memory_size: bytes,
                userspace_addr: slot.host_address(),
            },
        )
    }

    /// The registers take writes of four bytes.
    fn ioeventfd(&self, to: IoEventFd<'_>, flag: u32) -> io::Result<()> {
        let matches = u32::from(to.value.is_some()) << kvm_ioeventfd_flag_nr_datamatch;
        self.ioctl(
            IOEVENTFD,
            &kvm_ioeventfd {
                datamatch: to.value.unwrap_or(0).into(),
                addr: to.address,
                len: 4,
                fd: to.event.as_raw_fd(),
                flags: matches | flag,
                ..Default::default()
            },
        )
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &T) -> io::Result<()> {
        // SAFETY: both requests read one such struct at the pointer; files other than a virtual machine's
        // don't know these numbers. A MemorySlot stays mapped as long as its KvmOffload. The guest only
        // reads it, or all its users take it for memory that a guest changes at any time.
        match unsafe { libc::ioctl(self.vm.as_raw_fd(), request as _, &raw const *argument) } {
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
