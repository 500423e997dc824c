// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine with the device on KVM:
//! `cargo run -p vcpufreq-device --features kvm --example attach`.
//!
//! Its guest reads cur_perf, asks for a frequency of its table, and halts. Neither access exits.
//! The code is for x86-64; what is around it is the same on any architecture.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))]

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use vcpufreq_device::host::{
    ActuatorKind, HostActuator, HostRoot, KernelTree, SysfsSource, Tid, uclamp_available,
};
use vcpufreq_device::kvm::{
    Bridge, BridgeConfig, BridgeDevice, Diagnostics, EventStats, IoEventFd, IoeventfdPlan, KvmVm,
    MmioDevice, PageMapping, ReadOnlySlot, SlotMemory, Totals, accesses_are_of,
};
use vcpufreq_device::{
    ClampMode, CurPerfVisibility, Device, DeviceConfig, DomainId, Headroom, Khz, PageMemory,
    PerfTable, Util, VcpuId, VcpuSpec,
};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

const BASE: u64 = 0x0a00_0000;
const CODE: u64 = 0x1000;
const RESULT: usize = 0x8000;

/// What a VMM implements: its virtual machine, of which memory slot 1 is free.
struct Vm(VmFd);

impl Vm {
    fn set_slot(
        &self,
        slot: u32,
        (guest, host): (u64, u64),
        size: u64,
        flags: u32,
    ) -> io::Result<()> {
        let slot = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: guest,
            memory_size: size,
            userspace_addr: host,
        };
        // SAFETY: the memory is RAM that outlives the VM, or pages that the library keeps mapped.
        unsafe { self.0.set_user_memory_region(slot) }.map_err(os_error)
    }
}

impl KvmVm for Vm {
    fn map_read_only(&self, slot: ReadOnlySlot) -> io::Result<()> {
        let place = (slot.guest_address(), slot.host_address());
        self.set_slot(1, place, slot.size(), KVM_MEM_READONLY)
    }

    fn unmap(&self, slot: ReadOnlySlot) -> io::Result<()> {
        self.set_slot(1, (slot.guest_address(), slot.host_address()), 0, 0)
    }

    fn add_ioeventfd(&self, to: IoEventFd<'_>) -> io::Result<()> {
        let place = IoEventAddress::Mmio(to.address);
        let added = match to.value {
            Some(khz) => self.0.register_ioevent(to.event, &place, khz),
            None => self.0.register_ioevent(to.event, &place, NoDatamatch),
        };
        added.map_err(os_error)
    }

    fn remove_ioeventfd(&self, to: IoEventFd<'_>) -> io::Result<()> {
        let place = IoEventAddress::Mmio(to.address);
        let removed = match to.value {
            Some(khz) => self.0.unregister_ioevent(to.event, &place, khz),
            None => self.0.unregister_ioevent(to.event, &place, NoDatamatch),
        };
        removed.map_err(os_error)
    }
}

fn os_error(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

#[derive(Debug)]
struct Stderr;

impl Diagnostics for Stderr {
    fn warn(&self, text: &str) {
        eprintln!("warning: {text}");
    }

    fn explain(&self, text: &str) {
        eprintln!("{text}");
    }
}

/// One vCPU with a table of two frequencies.
fn device(host: &HostRoot) -> anyhow::Result<BridgeDevice> {
    let config = DeviceConfig {
        vcpus: vec![VcpuSpec {
            table: PerfTable::try_from(vec![Khz(600_000), Khz(1_800_000)])?,
            capacity: Util::MAX,
            domain: DomainId(0),
        }],
        mode: ClampMode::Floor,
        headroom: Headroom::None,
        visibility: CurPerfVisibility::Exact,
        rate_limit: None,
    };
    let kind = match uclamp_available() {
        Ok(()) => ActuatorKind::Thread,
        Err(_) => ActuatorKind::Nothing,
    };
    let actuator = HostActuator::build(&kind, &KernelTree, &[DomainId(0)])?;
    let source = Arc::new(SysfsSource::new(host, 1)?);
    let stats = Arc::new(EventStats::new(1, None));
    Ok(Device::new(config, actuator, source, stats)?)
}

extern "C" fn kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// What the guest has read as cur_perf, its accesses that exited, and all that was counted.
pub fn run(kvm: &Kvm, host: &HostRoot) -> anyhow::Result<(u32, usize, Totals)> {
    register_signal_handler(SIGRTMIN(), kick)?;
    let config = BridgeConfig {
        base: BASE,
        pins: vec![vec![]],
        rt_pcpus: vec![],
        kick: SIGRTMIN(),
        ioeventfd: Some(IoeventfdPlan { clean: false }),
    };
    let diagnostics: Arc<dyn Diagnostics> = Arc::new(Stderr);
    let bridge = Bridge::start(device(host)?, &config, &[], &diagnostics)?;
    let handle = bridge.handle();

    let ram = PageMapping::new(0x1_0000, false)?;
    let vm = Vm(kvm.create_vm()?);
    vm.set_slot(0, (0, ram.address()), ram.size(), 0)?;
    let mut vcpu = guest(&vm.0, &ram)?;
    let mut offload = bridge.offload();
    // A VMM waits for `attachment.lost()` and calls `fall_back` when it is readable.
    let attachment = handle.attach(&vm, &mut offload);

    // On the thread of vCPU 0, before it runs the guest.
    accesses_are_of(VcpuId(0));
    handle.register_thread(VcpuId(0), Tid::current().get())?;
    handle.vcpu_moved(VcpuId(0));
    let exits = run_vcpu(&mut vcpu, &*bridge.mmio())?;
    handle.guest_ended();
    drop((attachment, vcpu));
    let read = PageMemory::words(&ram)[RESULT / 4].load(Relaxed);
    Ok((read, exits, bridge.stop()))
}

/// Runs it until it halts; how often it exited to the device.
fn run_vcpu(vcpu: &mut VcpuFd, mmio: &dyn MmioDevice) -> anyhow::Result<usize> {
    let mut exits = 0;
    loop {
        match vcpu.run() {
            Ok(VcpuExit::MmioRead(address, data)) => mmio.read(address - BASE, data),
            Ok(VcpuExit::MmioWrite(address, data)) => mmio.write(address - BASE, data),
            Ok(VcpuExit::Hlt) => return Ok(exits),
            Ok(other) => anyhow::bail!("the guest left with {other:?}"),
            Err(error) if error.errno() == libc::EINTR => continue,
            Err(error) => return Err(error.into()),
        }
        exits += 1;
    }
}

/// 16-bit code, with DS at the device and ES at RAM.
#[cfg(target_arch = "x86_64")]
fn guest(vm: &VmFd, ram: &PageMapping) -> anyhow::Result<VcpuFd> {
    let code: [u8; 20] = [
        0x66, 0xa1, 0x00, 0x00, // mov eax, ds:[0]
        0x26, 0x66, 0xa3, 0x00, 0x80, // mov es:[RESULT], eax
        0x66, 0xc7, 0x06, 0x04, 0x00, 0xc0, 0x27, 0x09, 0x00, // mov dword ds:[4], 600000
        0xf4, // hlt
        0x90,
    ];
    let words = PageMemory::words(ram);
    for (at, bytes) in (usize::try_from(CODE)? / 4..).zip(code.chunks_exact(4)) {
        words[at].store(u32::from_le_bytes(bytes.try_into()?), Relaxed);
    }
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

#[cfg(not(target_arch = "x86_64"))]
fn guest(_vm: &VmFd, _ram: &PageMapping) -> anyhow::Result<VcpuFd> {
    anyhow::bail!("the guest's code is for x86-64")
}

#[allow(dead_code)]
fn main() -> anyhow::Result<()> {
    let (cur_perf, exits, totals) = run(&Kvm::new()?, &HostRoot::default())?;
    println!("cur_perf {cur_perf} kHz, {exits} exits, {totals:?}");
    Ok(())
}
