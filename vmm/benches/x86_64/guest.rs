// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of one loop.

use kvm_bindings::kvm_regs;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vcpufreq::vm::layout::CPUFREQ_BASE;
use vcpufreq::vm::memory::{Memory, Region};
use vm_memory::{Bytes, GuestAddress};

use super::host::TABLE_KHZ;

const CODE: u64 = 0x1000;

/// What a turn of the loop does.
#[derive(Clone, Copy, Debug)]
pub enum Loop {
    /// Nothing.
    Empty,
    /// A load from the guest's memory.
    Load,
    /// A read of cur_perf.
    Read,
    /// A write of set_perf, of two entries of the table in turn.
    Write,
}

impl Loop {
    /// 16-bit code, with DS at the device and ES at memory.
    fn code(self) -> Vec<u8> {
        let turn: Vec<u8> = match self {
            Self::Empty => vec![],
            // mov eax, es:[0x8000]
            Self::Load => vec![0x26, 0x66, 0xa1, 0x00, 0x80],
            // mov eax, ds:[0]
            Self::Read => vec![0x66, 0xa1, 0x00, 0x00],
            // xor eax, edx; mov ds:[4], eax
            Self::Write => vec![0x66, 0x31, 0xd0, 0x66, 0xa3, 0x04, 0x00],
        };
        // dec ecx; jnz
        let back = u8::try_from(turn.len() + 4).map_or(0, u8::wrapping_neg);
        let mut code = turn;
        code.extend([0x66, 0x49, 0x75, back, 0xf4]);
        code
    }
}

/// The guest and its vCPU.
pub struct Guest {
    pub vcpu: VcpuFd,
    vm: Option<VmFd>,
    memory: Memory,
}

impl Guest {
    pub fn new(kvm: &Kvm, code: Loop) -> anyhow::Result<Self> {
        let vm = kvm.create_vm()?;
        let mut memory = Memory::default();
        let ram = Region {
            base: 0,
            size: 0x1_0000,
        };
        memory.add(&vm, ram)?;
        memory.map().write_slice(&code.code(), GuestAddress(CODE))?;
        let vcpu = vm.create_vcpu(0)?;
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        (sregs.es.base, sregs.es.selector) = (0, 0);
        sregs.ds.base = CPUFREQ_BASE;
        sregs.cr0 |= 1;
        vcpu.set_sregs(&sregs)?;
        let vm = Some(vm);
        Ok(Self { vcpu, vm, memory })
    }

    /// The VM, to be kept as long as the guest.
    pub fn vm(&mut self) -> VmFd {
        self.vm.take().expect("it is taken once")
    }

    pub fn next_slot(&self) -> u32 {
        self.memory.next_slot()
    }

    /// Puts it in front of so many turns.
    pub fn rewind(&self, turns: u32) -> Result<(), kvm_ioctls::Error> {
        let [low, _, high] = TABLE_KHZ;
        self.vcpu.set_regs(&kvm_regs {
            rip: CODE,
            rflags: 2,
            rcx: turns.into(),
            rax: low.into(),
            rdx: (low ^ high).into(),
            ..kvm_regs::default()
        })
    }
}
