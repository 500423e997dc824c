// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPU registers at the start of a guest.

use std::mem::offset_of;

use kvm_bindings::{KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_SIZE_U64, kvm_regs, user_pt_regs};
use kvm_ioctls::{Error, VcpuFd};

/// Id of the 64-bit core register at this offset in `kvm_regs`, which KVM
/// counts in 32-bit words.
const fn core_register(offset: usize) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / 4) as u64
}

const PC: u64 = core_register(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pc));
const X0: u64 = core_register(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, regs));

/// Makes `vcpu` start at `entry` with x0 = `fdt`, as Linux asks for
/// (`Documentation/arch/arm64/booting.rst`). The rest is as KVM resets it:
/// EL1h, interrupts masked, MMU off, x1 to x3 zero.
pub fn set_entry(vcpu: &VcpuFd, entry: u64, fdt: u64) -> Result<(), Error> {
    vcpu.set_one_reg(PC, &entry.to_le_bytes())?;
    vcpu.set_one_reg(X0, &fdt.to_le_bytes())?;
    Ok(())
}
