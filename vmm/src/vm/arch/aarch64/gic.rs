// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interrupt controller: a GICv3 in KVM
//! (Linux `Documentation/virt/kvm/devices/arm-vgic-v3.rst`).

use anyhow::Context;
use kvm_bindings::{
    KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_NR_IRQS, KVM_VGIC_V3_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::{DeviceFd, VmFd};

use crate::vm::layout::{GIC_IRQS, GICD_BASE, GICR_BASE};

/// Creates and initialises the GIC of a VM whose `vcpus` vCPUs are all there.
///
/// The device lives as long as the VM; its descriptor isn't needed afterwards.
pub fn create(vm: &VmFd, vcpus: u16) -> anyhow::Result<()> {
    let mut device = kvm_create_device {
        type_: kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
        ..Default::default()
    };
    let gic = vm
        .create_device(&mut device)
        .context("KVM has no GICv3 for the guest (its host has an older GIC, or none)")?;
    // Number of redistributors in 63:52, base in 51:16, index of the region in 11:0.
    let redistributors = u64::from(vcpus) << 52 | GICR_BASE;
    let address = KVM_DEV_ARM_VGIC_GRP_ADDR;
    set(&gic, address, KVM_VGIC_V3_ADDR_TYPE_DIST, &GICD_BASE)
        .context("KVM refused the place of the GIC's distributor")?;
    let region = KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION;
    set(&gic, address, region, &redistributors)
        .context("KVM refused the place of the GIC's redistributors")?;
    set(&gic, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, &GIC_IRQS)
        .context("KVM refused the GIC's number of interrupts")?;
    let init = kvm_device_attr {
        group: KVM_DEV_ARM_VGIC_GRP_CTRL,
        attr: u64::from(KVM_DEV_ARM_VGIC_CTRL_INIT),
        ..Default::default()
    };
    gic.set_device_attr(&init)
        .context("KVM can't initialise the GIC")
}

fn set<T>(gic: &DeviceFd, group: u32, attr: u32, value: &T) -> Result<(), kvm_ioctls::Error> {
    gic.set_device_attr(&kvm_device_attr {
        group,
        attr: u64::from(attr),
        addr: std::ptr::from_ref(value).expose_provenance() as u64,
        ..Default::default()
    })
}
