// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine with the device on KVM:
//! `cargo run -p vcpufreq-device --features kvm --example attach`.
//!
//! Its guest reads cur_perf, asks for a frequency of its table, and halts. Neither access exits.
//! Its code is for x86-64 or arm64; what is around it is the same.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use vcpufreq_device::host::{
    ActuatorKind, HostActuator, HostRoot, KernelTree, SysfsSource, Tid, uclamp_available,
};
use vcpufreq_device::kvm::{
    AccessPath, Bridge, BridgeConfig, BridgeDevice, Diagnostics, EventStats, IoEventFd,
    IoeventfdPlan, KvmVm, MmioDevice, Offered, PageMapping, ReadOnlySlot, SlotMemory, Totals,
    accesses_are_of,
};
use vcpufreq_device::{
    ClampMode, CurPerfVisibility, Device, DeviceConfig, DomainId, Headroom, Khz, PageMemory,
    PerfTable, Util, VcpuId, VcpuSpec,
};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Guest address of the first register.
pub const BASE: u64 = 0x0a00_0000;
const CODE: u64 = 0x1000;

/// What a VMM implements: its virtual machine, of which memory slot 1 is free.
pub struct Vm(pub VmFd);

impl Vm {
    /// Sets a memory slot: guest and host address, size in bytes, KVM's flags.
    pub fn set_slot(
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

/// Prints diagnostics.
#[derive(Debug)]
pub struct Stderr;

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

/// The handler of the signal that makes KVM_RUN return.
pub extern "C" fn kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Runs the guest by the first of `backends`, or of `ioeventfd` and exits, that the host has.
/// Returns the path, what the guest has read as cur_perf, its accesses that exited, and all that
/// was counted.
pub fn run(
    kvm: &Kvm,
    host: &HostRoot,
    backends: &[Offered],
    ioeventfd: bool,
) -> anyhow::Result<(AccessPath, u32, usize, Totals)> {
    register_signal_handler(SIGRTMIN(), kick)?;
    let config = BridgeConfig {
        base: BASE,
        pins: vec![vec![]],
        rt_pcpus: vec![],
        kick: SIGRTMIN(),
        ioeventfd: ioeventfd.then_some(IoeventfdPlan { clean: false }),
    };
    let diagnostics: Arc<dyn Diagnostics> = Arc::new(Stderr);
    let bridge = Bridge::start(device(host)?, &config, backends, &diagnostics)?;
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
    let path = handle.snapshot().vcpus[0].path;
    handle.guest_ended();
    let read = cur_perf_read(&vcpu)?;
    drop((attachment, vcpu));
    Ok((path, read, exits, bridge.stop()))
}

/// Runs it until it halts; how often it exited to the device.
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
fn guest(vm: &VmFd, ram: &PageMapping) -> anyhow::Result<VcpuFd> {
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

#[cfg(target_arch = "x86_64")]
fn cur_perf_read(vcpu: &VcpuFd) -> anyhow::Result<u32> {
    Ok(u32::try_from(vcpu.get_regs()?.rax)?)
}

/// Code that runs without an MMU, and ends by PSCI's SYSTEM_OFF, which overwrites X0 to X3.
#[cfg(target_arch = "aarch64")]
fn guest(vm: &VmFd, ram: &PageMapping) -> anyhow::Result<VcpuFd> {
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

#[cfg(target_arch = "aarch64")]
fn cur_perf_read(vcpu: &VcpuFd) -> anyhow::Result<u32> {
    let mut value = [0; 8];
    vcpu.get_one_reg(CORE_REGISTER + 18, &mut value)?;
    Ok(u32::try_from(u64::from_le_bytes(value))?)
}

#[allow(dead_code)]
fn main() -> anyhow::Result<()> {
    let (path, cur_perf, exits, totals) = run(&Kvm::new()?, &HostRoot::default(), &[], true)?;
    println!("{path:?}: cur_perf {cur_perf} kHz, {exits} exits, {totals:?}");
    Ok(())
}
