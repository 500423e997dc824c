// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stolen time (Arm DEN0057; Linux `Documentation/virt/kvm/arm/pvtime.rst`).
//!
//! KVM writes the time during which a vCPU was ready but didn't run to a
//! 64-byte structure. The guest asks for its address by hypercall, which KVM
//! answers; the memory is a slot of its own, so that the guest's allocator
//! doesn't know it.

use anyhow::Context;
use kvm_bindings::{KVM_ARM_VCPU_PVTIME_CTRL, KVM_ARM_VCPU_PVTIME_IPA, kvm_device_attr};
use kvm_ioctls::{VcpuFd, VmFd};

use crate::layout::{PVTIME_BASE, PVTIME_SIZE, PVTIME_STRIDE};
use crate::memory::{Memory, Region};

fn attribute(address: u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_ARM_VCPU_PVTIME_CTRL,
        attr: u64::from(KVM_ARM_VCPU_PVTIME_IPA),
        addr: address,
        ..Default::default()
    }
}

/// Whether this host's KVM keeps stolen time.
pub fn is_supported(vcpu: &VcpuFd) -> bool {
    vcpu.has_device_attr(&attribute(0)).is_ok()
}

/// Gives each vCPU its structure.
pub fn set_up(vm: &VmFd, memory: &mut Memory, vcpus: &[VcpuFd]) -> anyhow::Result<()> {
    let region = Region {
        base: PVTIME_BASE,
        size: PVTIME_SIZE,
    };
    memory.add(vm, region)?;
    for (index, vcpu) in (0u64..).zip(vcpus) {
        let place = PVTIME_BASE + index * PVTIME_STRIDE;
        let pointer = std::ptr::from_ref(&place).expose_provenance() as u64;
        vcpu.set_device_attr(&attribute(pointer))
            .with_context(|| format!("KVM refused the stolen time of vCPU {index}"))?;
    }
    Ok(())
}
