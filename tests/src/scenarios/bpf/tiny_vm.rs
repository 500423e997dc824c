// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM of one vCPU and a dozen instructions: spin, access a register so many times, spin, leave.
//!
//! The guest runs without page tables, so its accesses are those of a driver: on Arm of device memory.
#![expect(unsafe_code, reason = "a guest's code and memory are raw addresses")]

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod deed;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ptr::NonNull;

use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use vmm_sys_util::eventfd::EventFd;

use vcpufreq_host_bpf::Pages;

#[cfg(target_arch = "aarch64")]
use aarch64 as machine;
use deed::{CODE, LEAVE};
pub use deed::{Deed, RAM};
#[cfg(target_arch = "x86_64")]
use x86_64 as machine;

const PAGE: usize = 4096;

/// One load of the guest's memory.
const LOAD: Deed = Deed {
    before: 0,
    times: 1,
    address: RAM,
    value: 0,
    step: 0,
    read: true,
    after: 0,
};

/// What came of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TinyVmOutcome {
    /// Accesses that left for userspace, without the one that ends the run.
    pub exits: u64,
    /// What the last load gave.
    pub read: u32,
}

/// The VM. Its vCPU runs on the thread that calls [`TinyVm::run`].
#[derive(Debug)]
pub struct TinyVm {
    vcpu: VcpuFd,
    /// vCPUs that are there and never run.
    _others: Vec<VcpuFd>,
    vm: VmFd,
    _code: OwnPage,
}

/// A page of this process.
#[derive(Debug)]
struct OwnPage(NonNull<libc::c_void>);

impl TinyVm {
    /// With read-only pages at `base`, when there are any.
    pub fn new(pages: Option<(u64, Pages)>) -> Result<Self> {
        Self::with_vcpus(pages, 1)
    }

    /// With so many vCPUs, of which the last one runs.
    pub fn with_vcpus(pages: Option<(u64, Pages)>, vcpus: u64) -> Result<Self> {
        let kvm = Kvm::new().context("/dev/kvm")?;
        let vm = kvm.create_vm()?;
        let code = OwnPage::with(program())?;
        let page = Pages {
            address: code.0.cast(),
            len: PAGE,
        };
        add_slot(&vm, 0, CODE, page)?;
        if let Some((base, pages)) = pages {
            add_slot(&vm, 1, base, pages)?;
        }
        let mut others = Vec::new();
        for id in 0..vcpus {
            let vcpu = vm.create_vcpu(id)?;
            machine::initialize(&vm, &vcpu)?;
            others.push(vcpu);
        }
        let vcpu = others.pop().context("a VM without vCPUs")?;
        let mut tiny = Self {
            vcpu,
            _others: others,
            vm,
            _code: code,
        };
        if cfg!(target_arch = "x86_64") {
            // At a VM's first run KVM starts a thread, which the kernel takes for load of this pCPU.
            tiny.run(LOAD, |_, _| ())?;
        }
        Ok(tiny)
    }

    /// Writes of 4 bytes at this address end in the kernel, and wake no thread.
    pub fn swallow(&self, address: u64) -> Result<EventFd> {
        let event = EventFd::new(libc::EFD_NONBLOCK)?;
        self.vm
            .register_ioevent(&event, &IoEventAddress::Mmio(address), NoDatamatch)?;
        Ok(event)
    }

    /// Writes of this value of 4 bytes are finished in the kernel.
    pub fn swallow_value(&self, address: u64, value: u32) -> Result<EventFd> {
        let event = EventFd::new(libc::EFD_NONBLOCK)?;
        self.vm
            .register_ioevent(&event, &IoEventAddress::Mmio(address), value)?;
        Ok(event)
    }

    /// Does it, with `written` called for each write that leaves.
    pub fn run(&mut self, deed: Deed, mut written: impl FnMut(u64, u32)) -> Result<TinyVmOutcome> {
        machine::begin(&self.vcpu, deed)?;
        let mut exits = 0;
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::MmioWrite(LEAVE, data)) => {
                    let read = data.first_chunk().copied().map_or(0, u32::from_le_bytes);
                    return Ok(TinyVmOutcome { exits, read });
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    exits += 1;
                    written(
                        address,
                        data.first_chunk().copied().map_or(0, u32::from_le_bytes),
                    );
                }
                Ok(VcpuExit::MmioRead(_, data)) => {
                    exits += 1;
                    data.fill(0);
                }
                Ok(other) => bail!("the tiny VM left with {other:?}"),
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(error).context("KVM_RUN"),
            }
        }
    }
}

/// The machine's instructions, between their two labels.
fn program() -> &'static [u8] {
    unsafe extern "C" {
        static tiny_vm_start: u8;
        static tiny_vm_end: u8;
    }
    let (start, end) = (&raw const tiny_vm_start, &raw const tiny_vm_end);
    let length = end.addr() - start.addr();
    // SAFETY: `machine` has them in the program's read-only data.
    unsafe { std::slice::from_raw_parts(start, length) }
}

fn add_slot(vm: &VmFd, slot: u32, guest: u64, host: Pages) -> Result<()> {
    let region = kvm_userspace_memory_region {
        slot,
        // The first has the code, and is memory like any other.
        flags: if slot == 0 { 0 } else { KVM_MEM_READONLY },
        guest_phys_addr: guest,
        memory_size: u64::try_from(host.len)?,
        userspace_addr: u64::try_from(host.address.as_ptr().addr())?,
    };
    // SAFETY: memory that lives as long as the VM: its code, or the maps of the programs, which
    // are dropped after it.
    unsafe { vm.set_user_memory_region(region) }.context("adding a memory slot")
}

impl OwnPage {
    fn with(bytes: &[u8]) -> Result<Self> {
        ensure!(bytes.len() <= PAGE, "the guest's code is too long");
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh mapping where the kernel chooses.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, flags, -1, 0) };
        ensure!(
            page != libc::MAP_FAILED,
            "mmap: {}",
            std::io::Error::last_os_error()
        );
        let memory = Self(NonNull::new(page).context("mmap gave null")?);
        // SAFETY: `bytes` fits into the page, which nothing else has.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), page.cast(), bytes.len()) };
        Ok(memory)
    }
}

impl Drop for OwnPage {
    fn drop(&mut self) {
        // SAFETY: the mapping of `with`, unmapped once.
        unsafe { libc::munmap(self.0.as_ptr(), PAGE) };
    }
}
