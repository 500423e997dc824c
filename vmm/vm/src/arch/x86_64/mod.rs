// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! x86-64: memory slots, bus, run loop and devices are real; what a Linux guest
//! needs to boot isn't there yet.

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::Bus;
use crate::gic::Gic;
use crate::guest::{LinuxGuest, not_there_yet};
use crate::machine::{Bootable, KvmGuest};
use crate::vcpu_end::VcpuEnd;

impl Bootable for LinuxGuest<'_> {
    fn boot(&mut self, _kvm: &Kvm, _console: &EventFd) -> anyhow::Result<KvmGuest> {
        Err(not_there_yet())
    }
}

/// Whether KVM has addresses for a guest with so much memory: no Linux guest boots here.
///
/// # Errors
/// None.
pub fn check_memory(_kvm: &Kvm, _mem_mib: u64) -> anyhow::Result<()> {
    Ok(())
}

/// The interrupt controller of a Linux guest: none boots here.
///
/// # Errors
/// None.
pub fn gic(_kvm: &Kvm) -> anyhow::Result<Gic> {
    Ok(Gic::V3)
}

/// Whether a guest's loads from device memory see the host's caches.
pub fn device_loads_see_caches(_vm: &VmFd) -> bool {
    true
}

/// What to do on an exit that only this architecture has.
pub fn handle_exit(_vcpu: &VcpuFd, reason: u32, _bus: &Bus) -> Option<VcpuEnd> {
    Some(VcpuEnd::Failed(format!(
        "KVM exits for a reason that isn't handled: {reason}"
    )))
}
