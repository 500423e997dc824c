// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a guest that maps memory as a device sees what is in the host's
//! caches: with FEAT_S2FWB, KVM's stage 2 makes such loads cacheable.

use std::ffi::c_ulong;

use kvm_bindings::kvm_vcpu_init;
use kvm_ioctls::VmFd;

/// `KVM_CAP_ARM_CACHEABLE_PFNMAP_SUPPORTED`, Linux 6.17: FEAT_S2FWB and
/// instruction caches that need no cleaning.
const CACHEABLE_PFNMAP: c_ulong = 243;
/// ID_AA64MMFR2_EL1 as `KVM_GET_ONE_REG` names it: op0 3, op1 0, CRn 0, CRm 7,
/// op2 2.
const ID_AA64MMFR2_EL1: u64 = 0x6030_0000_0013_c03a;
/// Its field FWB.
const FWB: u64 = 0xf << 40;

/// KVM's answer; without one, no.
pub fn device_loads_see_caches(vm: &VmFd) -> bool {
    vm.check_extension_raw(CACHEABLE_PFNMAP) > 0 || has_fwb(vm).unwrap_or(false)
}

fn has_fwb(vm: &VmFd) -> Result<bool, kvm_ioctls::Error> {
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init)?;
    let vcpu = vm.create_vcpu(0)?;
    vcpu.vcpu_init(&init)?;
    let mut register = [0; 8];
    vcpu.get_one_reg(ID_AA64MMFR2_EL1, &mut register)?;
    Ok(u64::from_le_bytes(register) & FWB != 0)
}
