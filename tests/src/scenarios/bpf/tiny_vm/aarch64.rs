// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's registers and instructions on Arm.

use anyhow::{Result, ensure};
use kvm_ioctls::{VcpuFd, VmFd};

use super::deed::{CODE, Deed, LEAVE};

/// `KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE`, and the place in `struct kvm_regs`.
const X0: u64 = 0x6030_0000_0010_0000;
const PC: u64 = X0 + 2 * 32;

/// At the first instruction.
pub fn initialize(vm: &VmFd, vcpu: &VcpuFd) -> Result<()> {
    let mut init = kvm_bindings::kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init)?;
    vcpu.vcpu_init(&init)?;
    set(vcpu, PC, CODE)
}

/// What the next run does.
pub fn begin(vcpu: &VcpuFd, deed: Deed) -> Result<()> {
    let registers = [
        deed.address,
        deed.value.into(),
        deed.before,
        deed.after,
        LEAVE,
        deed.times.max(1),
        deed.read.into(),
        deed.step.into(),
    ];
    let mut registers = (0..).zip(registers);
    registers.try_for_each(|(number, value)| set(vcpu, X0 + 2 * number, value))
}

fn set(vcpu: &VcpuFd, register: u64, value: u64) -> Result<()> {
    let written = vcpu.set_one_reg(register, &value.to_ne_bytes())?;
    ensure!(written == size_of::<u64>(), "a register of {written} bytes");
    Ok(())
}

// In: x0 address, w1 value, x2 and x3 turns before and after, x4 where to leave, x5 times, x6
// whether to load, w7 step.
std::arch::global_asm!(
    ".pushsection .rodata.tiny_vm, \"a\"",
    ".balign 4",
    ".globl tiny_vm_start",
    "tiny_vm_start:",
    "0: cbz x2, 1f",
    "sub x2, x2, #1",
    "b 0b",
    "1: cbnz x6, 2f",
    "str w1, [x0]",
    "add w1, w1, w7",
    "subs x5, x5, #1",
    "b.ne 1b",
    "b 3f",
    "2: ldr w1, [x0]",
    "subs x5, x5, #1",
    "b.ne 2b",
    "3: cbz x3, 4f",
    "sub x3, x3, #1",
    "b 3b",
    "4: str w1, [x4]",
    // The next run begins behind that write.
    "b 0b",
    ".globl tiny_vm_end",
    "tiny_vm_end:",
    ".popsection",
);
