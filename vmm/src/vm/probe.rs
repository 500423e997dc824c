// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this host's KVM can take over of the vcpufreq registers, found out by
//! trying it on a virtual machine that is thrown away.

use std::path::Path;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{IoEventAddress, Kvm, VmFd};
use serde::Serialize;
use vcpufreq_device::REGION_ALIGN;
use vcpufreq_device::kvm::{PageMapping, SlotMemory};
use vmm_sys_util::eventfd::EventFd;

use super::layout::CPUFREQ_BASE;
use super::{arch, open_kvm, sys};

/// What KVM takes over, or why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathFacts {
    /// Memory that a guest can only read.
    pub readonly_slots: Result<(), String>,
    /// Writes that signal an eventfd.
    pub ioeventfds: Result<(), String>,
    /// A guest's loads from device memory see what is in the host's caches:
    /// FEAT_S2FWB on arm64, always on x86-64.
    pub coherent: bool,
}

impl PathFacts {
    /// Tries it with the KVM device at `path`.
    ///
    /// # Errors
    /// When not even an empty virtual machine can be made.
    pub fn ask(path: &Path) -> Result<Self, String> {
        let kvm = open_kvm(path).map_err(|error| error.to_string())?;
        Self::of(&kvm).map_err(|error| format!("KVM can't create a VM: {error}"))
    }

    fn of(kvm: &Kvm) -> Result<Self, kvm_ioctls::Error> {
        let vm = kvm.create_vm()?;
        Ok(Self {
            readonly_slots: readonly_slot(&vm),
            ioeventfds: ioeventfd(&vm),
            coherent: arch::device_loads_see_caches(&vm),
        })
    }
}

fn readonly_slot(vm: &VmFd) -> Result<(), String> {
    let pages = PageMapping::new(REGION_ALIGN, false).map_err(|error| error.to_string())?;
    let mut slot = kvm_userspace_memory_region {
        slot: 0,
        flags: KVM_MEM_READONLY,
        guest_phys_addr: CPUFREQ_BASE,
        memory_size: pages.size(),
        userspace_addr: pages.address(),
    };
    let refused = |error| format!("KVM refuses read-only memory slots ({error})");
    sys::set_slot(vm, slot).map_err(refused)?;
    slot.memory_size = 0;
    // The pages go when this returns: so does the slot.
    sys::set_slot(vm, slot).map_err(refused)
}

fn ioeventfd(vm: &VmFd) -> Result<(), String> {
    let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
    let event = event.map_err(|error| format!("no eventfd can be made ({error})"))?;
    vm.register_ioevent(&event, &IoEventAddress::Mmio(CPUFREQ_BASE + 4), 1_u32)
        .map_err(|error| format!("KVM refuses ioeventfds ({error})"))
}
