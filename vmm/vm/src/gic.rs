// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which interrupt controller a guest gets. KVM decides: a host with a GICv3 has it for guests, a
//! host with a GIC-400 (Raspberry Pi 4 and 5) has a GICv2.

use std::fmt;

use anyhow::ensure;
use kvm_bindings::{
    kvm_create_device, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2,
    kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::VmFd;
use serde::Serialize;

use super::layout::MAX_VCPUS;

/// A version of Arm's Generic Interrupt Controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gic {
    /// GIC-400 and its like.
    V2,
    /// GICv3, and GICv4 too.
    V3,
}

impl Gic {
    /// The newest one that KVM makes for `vm`, which is a trial and gets no other; `None` where
    /// KVM makes none.
    pub fn probe(vm: &VmFd) -> Option<Self> {
        let made = |gic: &Self| vm.create_device(&mut gic.device()).is_ok();
        [Self::V3, Self::V2].into_iter().find(made)
    }

    /// What KVM makes it from.
    pub fn device(self) -> kvm_create_device {
        let type_ = match self {
            Self::V2 => kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2,
            Self::V3 => kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
        };
        kvm_create_device {
            type_,
            ..Default::default()
        }
    }

    /// Most vCPUs of a guest with it (`VGIC_V2_MAX_CPUS`, `VGIC_V3_MAX_CPUS`).
    pub fn max_vcpus(self) -> usize {
        match self {
            Self::V2 => 8,
            Self::V3 => MAX_VCPUS,
        }
    }

    /// Checks that `vcpus` vCPUs are no more than KVM's `max` and the GIC's.
    ///
    /// # Errors
    /// When they are more.
    pub fn check_vcpus(self, vcpus: usize, max: usize) -> anyhow::Result<()> {
        let most = max.min(self.max_vcpus());
        ensure!(
            vcpus <= most,
            "{vcpus} vCPUs are more than the {most} of this host's KVM with its {self}; give fewer with --cpus"
        );
        Ok(())
    }
}

impl fmt::Display for Gic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V2 => "GICv2",
            Self::V3 => "GICv3",
        })
    }
}

#[cfg(test)]
mod tests {
    //! A GICv2 has 8 vCPUs, whatever KVM's limit; one line reports it.

    use super::*;

    #[test]
    fn more_vcpus_than_the_gic_has_are_one_line() {
        for (gic, vcpus, max, most) in [
            (Gic::V2, 9, 512, 8),
            (Gic::V2, 5, 4, 4),
            (Gic::V3, 513, 1024, 512),
        ] {
            let line = gic.check_vcpus(vcpus, max).unwrap_err().to_string();
            let begin = format!(
                "{vcpus} vCPUs are more than the {most} of this host's KVM with its {gic};"
            );
            assert!(line.starts_with(&begin), "{line}");
            gic.check_vcpus(most, max).unwrap();
        }
    }
}
