// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine whose guest reads cur_perf, asks for 600 MHz, and halts.

use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use vcpufreq_bridge::{MmioDevice, PageMapping, SlotMemory};
use vcpufreq_device::PageMemory;

use super::BASE;

const CODE: u64 = 0x1000;

/// 64 KiB of RAM at address 0, in memory slot 0.
#[expect(unsafe_code, reason = "a memory slot is a raw address")]
pub fn ram(vm: &VmFd) -> anyhow::Result<PageMapping> {
    let ram = PageMapping::new(0x1_0000, false)?;
    let slot = kvm_userspace_memory_region {
        memory_size: ram.size(),
        userspace_addr: ram.address(),
        ..Default::default()
    };
    // SAFETY: the callers keep it mapped as long as a vCPU runs.
    unsafe { vm.set_user_memory_region(slot) }?;
    Ok(ram)
}

/// Runs a vCPU until it halts; how often it exited to the device.
pub fn run_vcpu(vcpu: &mut VcpuFd, mmio: &dyn MmioDevice) -> anyhow::Result<usize> {
    let mut exits = 0;
    loop {
        match vcpu.run() {
            Ok(VcpuExit::MmioRead(address, data)) => mmio.read(address - BASE, data),
            Ok(VcpuExit::MmioWrite(address, data)) => mmio.write(address - BASE, data),
            Ok(VcpuExit::Hlt | VcpuExit::SystemEvent(..)) => return Ok(exits),
            Ok(other) => anyhow::bail!("the guest left with {other:?}"),
            Err(error) if error.errno() == libc::EINTR => continue,
            Err(error) => return Err(error.into()),
        }
        exits += 1;
    }
}

fn load(ram: &PageMapping, code: &[u32]) {
    for (word, code) in PageMemory::words(ram)[0x1000 / 4..].iter().zip(code) {
        word.store(*code, Relaxed);
    }
}

/// 16-bit code, with DS at the device: mov eax, [0]; mov dword [4], 600000; hlt.
#[cfg(target_arch = "x86_64")]
pub fn vcpu(vm: &VmFd, ram: &PageMapping) -> anyhow::Result<VcpuFd> {
    load(ram, &[0x0000_a166, 0x0406_c766, 0x0927_c000, 0xf400_f400]);
    let vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    sregs.ds.base = BASE;
    sregs.cr0 |= 1;
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rflags) = (CODE, 2);
    vcpu.set_regs(&regs)?;
    Ok(vcpu)
}

/// What the guest has read.
#[cfg(target_arch = "x86_64")]
pub fn cur_perf_read(vcpu: &VcpuFd) -> anyhow::Result<u32> {
    Ok(u32::try_from(vcpu.get_regs()?.rax)?)
}

/// Code that runs without an MMU, and ends by PSCI's SYSTEM_OFF, which overwrites X0 to X3.
#[cfg(target_arch = "aarch64")]
pub fn vcpu(vm: &VmFd, ram: &PageMapping) -> anyhow::Result<VcpuFd> {
    let code = [
        0xd2a1_4001, // movz x1, #0xa00, lsl 16
        0xb940_0029, // ldr w9, [x1]
        0x5284_f800, // movz w0, #0x27c0
        0x72a0_0120, // movk w0, #9, lsl 16
        0xb900_0420, // str w0, [x1, #4]
        0x52b0_8000, // movz w0, #0x8400, lsl 16
        0x1100_2000, // add w0, w0, #8
        0xd400_0002, // hvc #0
    ];
    load(ram, &code);
    let vcpu = vm.create_vcpu(0)?;
    let mut init = kvm_bindings::kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init)?;
    init.features[0] |= 1 << kvm_bindings::KVM_ARM_VCPU_PSCI_0_2;
    vcpu.vcpu_init(&init)?;
    vcpu.set_one_reg(CORE_REGISTER + 0x40, &CODE.to_le_bytes())?;
    Ok(vcpu)
}

/// KVM's number of X0; X9 is 18 more, the program counter 0x40 (Documentation/virt/kvm/api.rst).
#[cfg(target_arch = "aarch64")]
const CORE_REGISTER: u64 = 0x6030_0000_0010_0000;

/// What the guest has read.
#[cfg(target_arch = "aarch64")]
pub fn cur_perf_read(vcpu: &VcpuFd) -> anyhow::Result<u32> {
    let mut value = [0; 8];
    vcpu.get_one_reg(CORE_REGISTER + 18, &mut value)?;
    Ok(u32::try_from(u64::from_le_bytes(value))?)
}
