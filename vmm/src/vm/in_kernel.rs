// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of the vcpufreq registers KVM answers itself: reads from the register
//! pages in a read-only memory slot, writes of set_perf by ioeventfds.
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
use super::pages::PageMapping;
use super::{Hooks, sys};

/// An eventfd that one value in one vCPU's set_perf signals.
#[derive(Debug)]
pub struct Doorbell {
    /// Whose register.
    pub vcpu: VcpuId,
    /// The value.
    pub khz: u32,
    /// What it signals.
    pub event: Arc<EventFd>,
}

/// What KVM shall handle.
pub struct InKernel {
    /// What the guest reads.
    pub pages: Arc<PageMapping>,
    /// What its writes signal; other values exit.
    pub doorbells: Arc<[Doorbell]>,
    /// Readable when nobody answers the doorbells any more.
    pub lost: Arc<EventFd>,
    /// What of it KVM has taken.
    pub taken: Arc<Taken>,
}

/// What KVM answers itself now, for whoever asks.
#[derive(Debug, Default)]
pub struct Taken {
    reads: AtomicBool,
    writes: AtomicBool,
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
pub struct Attached<'a> {
    vm: &'a VmFd,
    slot: kvm_userspace_memory_region,
    doorbells: &'a [Doorbell],
    taken: &'a Taken,
}

impl InKernel {
    /// Makes `vm` handle all of it. `slot` is the number of a free memory slot.
    /// What KVM refuses is a warning, and is left to the exit.
    pub fn attach<'a>(&'a self, vm: &'a VmFd, slot: u32, hooks: &dyn Hooks) -> Attached<'a> {
        let slot = kvm_userspace_memory_region {
            slot,
            flags: KVM_MEM_READONLY,
            guest_phys_addr: CPUFREQ_BASE,
            memory_size: self.pages.size(),
            userspace_addr: self.pages.address(),
        };
        let mut attached = Attached {
            vm,
            slot,
            doorbells: &[],
            taken: &self.taken,
        };
        if let Err(error) = sys::set_slot(vm, slot) {
            attached.slot.memory_size = 0;
            hooks.on_warning(&format!(
                "KVM refused a read-only slot for the vcpufreq registers ({error}): each read \
                 exits to the VMM; see vcpufreq doctor"
            ));
        }
        let refused = self
            .doorbells
            .iter()
            .position(|bell| bell.connect(vm).is_err());
        let connected = refused.unwrap_or(self.doorbells.len());
        attached.doorbells = &self.doorbells[..connected];
        if let Some(at) = refused {
            attached.disconnect();
            hooks.on_warning(&format!(
                "KVM refused ioeventfd {at} of {}: each request exits to the VMM; see vcpufreq \
                 doctor",
                self.doorbells.len()
            ));
        }
        attached.tell();
        attached
    }
}

impl Doorbell {
    fn place(&self) -> IoEventAddress {
        IoEventAddress::Mmio(CPUFREQ_BASE + u64::from(self.vcpu.0) * REGION_STRIDE + REG_SET_PERF)
    }

    fn connect(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        // A u32 makes KVM match writes of four bytes only.
        vm.register_ioevent(&self.event, &self.place(), self.khz)
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

    fn tell(&self) {
        let Taken { reads, writes } = self.taken;
        reads.store(self.slot.memory_size > 0, Relaxed);
        writes.store(!self.doorbells.is_empty(), Relaxed);
    }

    fn disconnect(&mut self) {
        for bell in std::mem::take(&mut self.doorbells) {
            // What was registered can be taken back.
            let _ = self
                .vm
                .unregister_ioevent(&bell.event, &bell.place(), bell.khz);
        }
    }
}
