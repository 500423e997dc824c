// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of the vcpufreq registers KVM answers itself: reads from the register
//! pages in a read-only memory slot, writes of set_perf by ioeventfds, each of
//! one value or of any.
//!
//! All of it belongs to the virtual machine in KVM, which a reset of the guest
//! makes anew; pages and eventfds outlive it. Whatever KVM refuses takes the
//! exit to the device on the bus instead, and so does everything once this is
//! detached: no access is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{IoEventAddress, VmFd};
use vcpufreq_device::{REG_SET_PERF, REGION_STRIDE, VcpuId};
use vmm_sys_util::eventfd::EventFd;

use super::layout::CPUFREQ_BASE;
use super::{Hooks, sys};

/// An eventfd that writes of one vCPU's set_perf signal.
#[derive(Debug)]
pub struct Doorbell {
    /// Whose register.
    pub vcpu: VcpuId,
    /// The value that signals; `None`: any.
    pub khz: Option<u32>,
    /// What it signals.
    pub event: Arc<EventFd>,
}

/// What KVM shall handle.
pub struct InKernel {
    /// What the guest reads.
    pub pages: Arc<dyn SlotMemory>,
    /// What its writes signal; other values exit.
    pub doorbells: Arc<[Doorbell]>,
    /// Readable when nobody answers the doorbells any more.
    pub lost: Arc<EventFd>,
    /// The path is of no use without the doorbells: KVM's refusal loses it.
    pub all_or_nothing: bool,
    /// What of it KVM has taken.
    pub taken: Arc<Taken>,
}

/// Memory that a slot shows to the guest; it stays where it is as long as it
/// lives.
pub trait SlotMemory: Send + Sync {
    /// Where it is in this process, on a page boundary.
    fn address(&self) -> u64;

    /// Its bytes, a multiple of the host's page size.
    fn size(&self) -> u64;
}

/// What KVM answers itself now, for whoever asks.
#[derive(Debug, Default)]
pub struct Taken {
    reads: AtomicBool,
    writes: AtomicBool,
    /// A refusal of the path in use has been told; it is the same after each
    /// reset.
    told: AtomicBool,
}

impl Taken {
    /// Whether reads come from memory.
    pub fn reads(&self) -> bool {
        self.reads.load(Relaxed)
    }

    /// Whether writes of table entries end in KVM.
    pub fn writes(&self) -> bool {
        self.writes.load(Relaxed)
    }
}

/// What KVM handles of one virtual machine.
pub struct Attached<'vm> {
    vm: &'vm VmFd,
    slot: kvm_userspace_memory_region,
    /// So many of the doorbells are connected.
    connected: usize,
    in_kernel: Arc<InKernel>,
}

impl InKernel {
    /// Says that this takes the place of a path that was lost: what KVM refuses
    /// of it is news.
    pub(super) fn succeed(&self) {
        self.taken.told.store(false, Relaxed);
    }

    /// Makes `vm` handle all of it. `slot` is the number of a free memory slot.
    /// What KVM refuses is a warning, and is left to the exit.
    pub fn attach<'vm>(
        self: &Arc<Self>,
        vm: &'vm VmFd,
        slot: u32,
        hooks: &dyn Hooks,
    ) -> Attached<'vm> {
        let mut attached = Attached {
            vm,
            slot: kvm_userspace_memory_region {
                slot,
                flags: KVM_MEM_READONLY,
                guest_phys_addr: CPUFREQ_BASE,
                memory_size: self.pages.size(),
                userspace_addr: self.pages.address(),
            },
            connected: 0,
            in_kernel: self.clone(),
        };
        let refused = [attached.show(), attached.connect()];
        let told = self.taken.told.load(Relaxed);
        for refused in refused.into_iter().flatten() {
            self.taken.told.store(true, Relaxed);
            if !told {
                hooks.on_warning(&refused);
            }
        }
        attached.tell();
        attached
    }
}

impl Doorbell {
    fn place(&self) -> u64 {
        CPUFREQ_BASE + u64::from(self.vcpu.0) * REGION_STRIDE + REG_SET_PERF
    }

    fn connect(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        match self.khz {
            // A u32 makes KVM match writes of four bytes only.
            Some(khz) => vm.register_ioevent(&self.event, &IoEventAddress::Mmio(self.place()), khz),
            None => sys::ioeventfd_of_any(vm, self.place(), &self.event, true),
        }
    }

    fn disconnect(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        match self.khz {
            Some(khz) => {
                vm.unregister_ioevent(&self.event, &IoEventAddress::Mmio(self.place()), khz)
            }
            None => sys::ioeventfd_of_any(vm, self.place(), &self.event, false),
        }
    }
}

impl Attached<'_> {
    /// Hands all accesses over to the device on the bus. Writes that were
    /// signalled before are for whoever answers the doorbells.
    pub fn detach(&mut self) {
        self.disconnect();
        if self.slot.memory_size > 0 {
            self.slot.memory_size = 0;
            // Fails for want of memory only; then the page stays as it is.
            let _ = sys::set_slot(self.vm, self.slot);
        }
        self.tell();
    }

    /// Readable when this is to be detached.
    pub fn lost(&self) -> &EventFd {
        &self.in_kernel.lost
    }

    /// Shows the pages; what to say when KVM doesn't.
    fn show(&mut self) -> Option<String> {
        let error = sys::set_slot(self.vm, self.slot).err()?;
        self.slot.memory_size = 0;
        Some(format!(
            "KVM refused a read-only slot for the vcpufreq registers ({error}): each read exits \
             to the VMM; see vcpufreq doctor"
        ))
    }

    /// Connects the doorbells, or none of them.
    fn connect(&mut self) -> Option<String> {
        let bells = &self.in_kernel.doorbells;
        let refused = bells.iter().position(|bell| bell.connect(self.vm).is_err());
        self.connected = refused.unwrap_or(bells.len());
        let (at, all) = (refused?, bells.len());
        self.disconnect();
        if self.in_kernel.all_or_nothing {
            // A full counter is readable too.
            let _ = self.in_kernel.lost.write(1);
        }
        Some(format!(
            "KVM refused ioeventfd {at} of {all}: each request exits to the VMM; see vcpufreq \
             doctor"
        ))
    }

    fn tell(&self) {
        let Taken { reads, writes, .. } = &*self.in_kernel.taken;
        reads.store(self.slot.memory_size > 0, Relaxed);
        writes.store(self.connected > 0, Relaxed);
    }

    fn disconnect(&mut self) {
        for bell in &self.in_kernel.doorbells[..self.connected] {
            // What was registered can be taken back.
            let _ = bell.disconnect(self.vm);
        }
        self.connected = 0;
    }
}
