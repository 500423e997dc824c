// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interrupt controller in KVM (Linux `Documentation/virt/kvm/devices/arm-vgic-v3.rst` and
//! `arm-vgic.rst`).

use anyhow::Context;
use kvm_bindings::{
    KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_NR_IRQS, KVM_VGIC_V2_ADDR_TYPE_CPU, KVM_VGIC_V2_ADDR_TYPE_DIST,
    KVM_VGIC_V3_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION, kvm_device_attr,
};
use kvm_ioctls::{DeviceFd, VmFd};

use crate::gic::Gic;
use crate::layout::{GIC_IRQS, GICC_BASE, GICD_BASE, GICR_BASE};

/// Creates and initialises the GIC of a VM whose `vcpus` vCPUs are all there.
///
/// The device lives as long as the VM; its descriptor isn't needed afterwards.
pub fn create(vm: &VmFd, gic: Gic, vcpus: u16) -> anyhow::Result<()> {
    let device = vm
        .create_device(&mut gic.device())
        .with_context(|| format!("KVM has no {gic} for the guest"))?;
    for (name, attr, place) in places(gic, vcpus) {
        set(&device, KVM_DEV_ARM_VGIC_GRP_ADDR, attr, &place)
            .with_context(|| format!("KVM refused the place of the {gic}'s {name}"))?;
    }
    set(&device, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, &GIC_IRQS)
        .context("KVM refused the GIC's number of interrupts")?;
    let init = kvm_device_attr {
        group: KVM_DEV_ARM_VGIC_GRP_CTRL,
        attr: u64::from(KVM_DEV_ARM_VGIC_CTRL_INIT),
        ..Default::default()
    };
    device
        .set_device_attr(&init)
        .context("KVM can't initialise the GIC")
}

/// What has a place: its name, KVM's number for it, the place.
fn places(gic: Gic, vcpus: u16) -> [(&'static str, u32, u64); 2] {
    // Number of redistributors in 63:52, base in 51:16, index of the region in 11:0.
    let redistributors = (u64::from(vcpus) << 52) | GICR_BASE;
    match gic {
        Gic::V2 => [
            ("distributor", KVM_VGIC_V2_ADDR_TYPE_DIST, GICD_BASE),
            ("CPU interface", KVM_VGIC_V2_ADDR_TYPE_CPU, GICC_BASE),
        ],
        Gic::V3 => [
            ("distributor", KVM_VGIC_V3_ADDR_TYPE_DIST, GICD_BASE),
            (
                "redistributors",
                KVM_VGIC_V3_ADDR_TYPE_REDIST_REGION,
                redistributors,
            ),
        ],
    }
}

fn set<T>(gic: &DeviceFd, group: u32, attr: u32, value: &T) -> Result<(), kvm_ioctls::Error> {
    gic.set_device_attr(&kvm_device_attr {
        group,
        attr: u64::from(attr),
        addr: std::ptr::from_ref(value).expose_provenance() as u64,
        ..Default::default()
    })
}
