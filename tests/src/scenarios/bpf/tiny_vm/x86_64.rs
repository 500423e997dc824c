// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's registers and instructions on x86-64: 32-bit code in flat segments.

use anyhow::Result;
use kvm_bindings::kvm_regs;
use kvm_ioctls::{VcpuFd, VmFd};

use super::deed::{CODE, Deed, LEAVE};

/// CR0: protection enable, and the bit that is always set.
const PROTECTED: u64 = 0x11;
/// Types of segments: code that is read, and data that is written, both accessed.
const CODE_TYPE: u8 = 0xb;
const DATA_TYPE: u8 = 0x3;
/// The bit of RFLAGS that is always set.
const FLAGS: u64 = 2;

/// At the first instruction.
pub fn initialize(_: &VmFd, vcpu: &VcpuFd) -> Result<()> {
    let mut special = vcpu.get_sregs()?;
    special.cr0 = PROTECTED;
    let data = [&mut special.ds, &mut special.es, &mut special.ss];
    let all = data.into_iter().map(|segment| (segment, DATA_TYPE));
    for (segment, kind) in all.chain([(&mut special.cs, CODE_TYPE)]) {
        (segment.base, segment.limit) = (0, u32::MAX);
        (segment.g, segment.db, segment.type_) = (1, 1, kind);
    }
    vcpu.set_sregs(&special)?;
    let registers = kvm_regs {
        rip: CODE,
        rflags: FLAGS,
        ..kvm_regs::default()
    };
    Ok(vcpu.set_regs(&registers)?)
}

/// What the next run does.
pub fn begin(vcpu: &VcpuFd, deed: Deed) -> Result<()> {
    let registers = kvm_regs {
        rax: deed.address,
        rbx: deed.value.into(),
        rcx: deed.before,
        rdi: deed.after,
        rsp: LEAVE,
        rsi: deed.times.max(1),
        rbp: deed.read.into(),
        rdx: deed.step.into(),
        ..vcpu.get_regs()?
    };
    Ok(vcpu.set_regs(&registers)?)
}

// In: eax address, ebx value, ecx and edi turns before and after, esp where to leave, esi times, ebp
// whether to load, edx step. A label of ones and zeros would be a number here.
std::arch::global_asm!(
    ".pushsection .rodata.tiny_vm, \"a\"",
    ".code32",
    ".globl tiny_vm_start",
    "tiny_vm_start:",
    "2: jecxz 3f",
    "dec ecx",
    "jmp 2b",
    "3: test ebp, ebp",
    "jnz 4f",
    "mov [eax], ebx",
    "add ebx, edx",
    "dec esi",
    "jnz 3b",
    "jmp 5f",
    "4: mov ebx, [eax]",
    "dec esi",
    "jnz 4b",
    "5: mov ecx, edi",
    "6: jecxz 7f",
    "dec ecx",
    "jmp 6b",
    "7: mov [esp], ebx",
    // The next run begins behind that write.
    "jmp 2b",
    ".globl tiny_vm_end",
    "tiny_vm_end:",
    ".code64",
    ".popsection",
);
