// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM around main.rs, which knows nothing of the device: a bus, a wrapper of KVM, threads that
//! may make listed calls alone, a chroot before a vCPU runs, and a guest that writes 600,000
//! requests.
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::Context as _;
#[cfg(target_arch = "x86_64")]
use kvm_bindings::kvm_regs;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use vcpufreq_bridge::{Attachment, Bridge, BridgeHandle, EventSink, HostEvent, PageMapping};
use vcpufreq_device::{DeviceState, Event, PageMemory, VcpuId};
use vcpufreq_host::{HostRoot, Tid, affinity_of};
use vmm_sys_util::eventfd::EventFd;

use super::{Registers, Vm, builder, on_vcpu_thread};

/// What the guest writes in turn, in kHz.
pub const TABLE_KHZ: [u32; 2] = [600_000, 1_800_000];
/// Guest address of the first register.
const BASE: u64 = 0x0a00_0000;
/// Of two requests each.
#[cfg(target_arch = "x86_64")]
const TURNS: u64 = 300_000;
#[cfg(target_arch = "x86_64")]
const CODE: u64 = 0x1000;

/// Writes to the VMM's log.
pub fn log(text: &str) {
    println!("warning: {text}");
}

/// A device on the bus.
pub trait BusDevice: Send + Sync {
    /// Fills `data`.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Takes `data`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// The VMM's hypervisor.
pub trait Hypervisor: Send + Sync {
    /// Of the memory slot for devices; with 0 bytes it is free again.
    fn set_memory(&self, guest: u64, host: u64, size: u64, flags: u32) -> io::Result<()>;
    /// Writes of four bytes of `value` at `at` signal `event`; `None`: any writes.
    fn register_ioevent(&self, event: &EventFd, at: u64, value: Option<u32>) -> io::Result<()>;
    /// They do so no longer.
    fn unregister_ioevent(&self, event: &EventFd, at: u64, value: Option<u32>) -> io::Result<()>;
}

struct KvmWrapper {
    vm: VmFd,
    /// It removes an ioeventfd without its value, which KVM then doesn't find.
    ignores_values: bool,
}

fn address(at: u64) -> IoEventAddress {
    IoEventAddress::Mmio(at)
}

impl Hypervisor for KvmWrapper {
    #[expect(unsafe_code, reason = "a memory slot is a raw address")]
    fn set_memory(&self, guest: u64, host: u64, size: u64, flags: u32) -> io::Result<()> {
        let slot = kvm_userspace_memory_region {
            slot: 1,
            flags,
            guest_phys_addr: guest,
            memory_size: size,
            userspace_addr: host,
        };
        // SAFETY: the memory is mapped as long as the bridge, which outlives the vCPU.
        Ok(unsafe { self.vm.set_user_memory_region(slot) }?)
    }

    fn register_ioevent(&self, event: &EventFd, at: u64, value: Option<u32>) -> io::Result<()> {
        Ok(match value {
            Some(khz) => self.vm.register_ioevent(event, &address(at), khz),
            None => self.vm.register_ioevent(event, &address(at), NoDatamatch),
        }?)
    }

    fn unregister_ioevent(&self, event: &EventFd, at: u64, value: Option<u32>) -> io::Result<()> {
        Ok(match value.filter(|_| !self.ignores_values) {
            Some(khz) => self.vm.unregister_ioevent(event, &address(at), khz),
            None => self.vm.unregister_ioevent(event, &address(at), NoDatamatch),
        }?)
    }
}

/// What each thread of a Rust program calls.
const RUST: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // A debug build checks what it closes.
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

fn filter(calls: &[i64]) -> BpfProgram {
    let rules = RUST.iter().chain(calls).map(|call| (*call, Vec::new()));
    let arch = std::env::consts::ARCH.try_into().expect("a known machine");
    let rules: BTreeMap<_, _> = rules.collect();
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let filter = SeccompFilter::new(rules, kill, allow, arch).expect("rules");
    filter.try_into().expect("a program")
}

/// Starts a thread that may make these calls alone.
pub fn spawn(
    name: &str,
    body: Box<dyn FnOnce() + Send>,
    calls: &[i64],
) -> io::Result<JoinHandle<()>> {
    let filter = filter(calls);
    let confined = move || {
        apply_filter(&filter).expect("a filter");
        body();
    };
    thread::Builder::new().name(name.to_owned()).spawn(confined)
}

/// The thread that carries out requests dies at its first one.
static DIES: AtomicBool = AtomicBool::new(false);
/// Ends a run that would hang. None waits for it.
const PATIENCE: Duration = Duration::from_secs(600);

/// Panics when it is to.
#[derive(Debug)]
pub struct Events;

impl vcpufreq_device::Events for Events {
    fn record(&self, event: &Event) {
        self.record_at(event, 0, 0);
    }
}

impl EventSink for Events {
    fn record_at(&self, _: &Event, _: u64, _: i32) {
        if thread::current().name() == Some("requests") && DIES.swap(false, SeqCst) {
            panic!("as wanted");
        }
    }

    fn record_change(&self, _: HostEvent) {}
}

/// `xor eax, edx; mov ds:[4], eax`, twice; `dec ecx; jnz`; `hlt`. DS is at the device.
const CODE_BYTES: [u8; 20] = [
    0x66, 0x31, 0xd0, 0x66, 0xa3, 0x04, 0x00, 0x66, 0x31, 0xd0, 0x66, 0xa3, 0x04, 0x00, 0x66, 0x49,
    0x75, 0xee, 0xf4, 0xf4,
];

#[expect(unsafe_code, reason = "a memory slot is a raw address")]
fn ram(vm: &VmFd) -> anyhow::Result<PageMapping> {
    let ram = PageMapping::new(0x1_0000, false)?;
    let slot = kvm_userspace_memory_region {
        memory_size: vcpufreq_bridge::SlotMemory::size(&ram),
        userspace_addr: vcpufreq_bridge::SlotMemory::address(&ram),
        ..Default::default()
    };
    // SAFETY: it is mapped longer than the vCPU runs.
    unsafe { vm.set_user_memory_region(slot) }?;
    let words = PageMemory::words(&ram)[0x1000 / 4..].iter();
    for (word, bytes) in words.zip(CODE_BYTES.chunks_exact(4)) {
        word.store(u32::from_le_bytes(bytes.try_into()?), SeqCst);
    }
    Ok(ram)
}

#[cfg(not(target_arch = "x86_64"))]
fn vcpu(_: &VmFd) -> anyhow::Result<VcpuFd> {
    anyhow::bail!("the guest of this example is for x86-64")
}

#[cfg(target_arch = "x86_64")]
fn vcpu(vm: &VmFd) -> anyhow::Result<VcpuFd> {
    let vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    sregs.ds.base = BASE;
    sregs.cr0 |= 1;
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rflags: 2,
        rcx: TURNS,
        rax: TABLE_KHZ[1].into(),
        rdx: (TABLE_KHZ[0] ^ TABLE_KHZ[1]).into(),
        ..kvm_regs::default()
    })?;
    Ok(vcpu)
}

/// Runs the guest on a confined thread of its own; how often it exited to the device.
fn run_vcpu(
    mut vcpu: VcpuFd,
    handle: BridgeHandle,
    bus: Arc<dyn BusDevice>,
) -> io::Result<JoinHandle<()>> {
    let calls = [vcpufreq_bridge::syscalls::VCPU, &[libc::SYS_ioctl]].concat();
    let body = move || {
        on_vcpu_thread(&handle).expect("a thread for the vCPU");
        apply_filter(&filter(&calls)).expect("a filter");
        loop {
            handle.before_run();
            match vcpu.run() {
                Ok(VcpuExit::MmioRead(at, data)) => bus.read(at - BASE, data),
                Ok(VcpuExit::MmioWrite(at, data)) => bus.write(at - BASE, data),
                Ok(VcpuExit::Hlt) => return,
                Err(error) if error.errno() == libc::EINTR => {}
                other => panic!("the guest left with {other:?}"),
            }
        }
    };
    thread::Builder::new().name("vcpu0".to_owned()).spawn(body)
}

/// The VMM's main loop, until the guest has halted, and the path is lost if it is to be. Returns
/// whether it was.
fn until_halted(
    vcpu: JoinHandle<()>,
    attachment: &mut Attachment,
    is_to_be_lost: bool,
) -> anyhow::Result<bool> {
    let (mut fell_back, end) = (false, Instant::now() + PATIENCE);
    while !vcpu.is_finished() || fell_back != is_to_be_lost {
        let is_lost = |lost: &EventFd| lost.read().is_ok();
        if attachment.lost().is_some_and(is_lost) {
            attachment.fall_back();
            fell_back = true;
        }
        anyhow::ensure!(Instant::now() < end, "the guest or the path goes on");
        thread::yield_now();
    }
    vcpu.join()
        .map_err(|_| anyhow::anyhow!("the vCPU's thread panicked"))?;
    Ok(fell_back)
}

fn threads() -> io::Result<usize> {
    Ok(fs::read_dir("/proc/self/task")?.count())
}

fn files() -> io::Result<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count())
}

/// A host with a frequency for each pCPU, and this machine's procfs.
fn host(folder: &Path) -> io::Result<HostRoot> {
    let cpus = folder.join("sys/devices/system/cpu");
    let possible = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    for cpu in affinity_of(Tid::current())?.iter() {
        let cpufreq = cpus.join(format!("cpu{cpu}/cpufreq"));
        fs::create_dir_all(&cpufreq)?;
        for (name, khz) in [
            ("scaling_cur_freq", "1200000"),
            ("cpuinfo_max_freq", "1800000"),
        ] {
            fs::write(cpufreq.join(name), khz)?;
        }
    }
    fs::write(cpus.join("possible"), possible)?;
    std::os::unix::fs::symlink("/proc", folder.join("proc"))?;
    Ok(HostRoot::at(folder))
}

/// One virtual machine, from its start to its end, and what came of it.
fn one(kvm: &Kvm, bridge: Bridge, ignores_values: bool) -> anyhow::Result<DeviceState> {
    let vm = kvm.create_vm()?;
    let ram = ram(&vm)?;
    let fd = vcpu(&vm)?;
    let handle = bridge.handle();
    let mut attachment = handle.attach(Vm(Arc::new(KvmWrapper { vm, ignores_values })));
    let bus: Arc<dyn BusDevice> = Arc::new(Registers(bridge.mmio()));
    DIES.store(!ignores_values, SeqCst);
    let thread = run_vcpu(fd, handle.clone(), bus)?;
    let fell_back = until_halted(thread, &mut attachment, !ignores_values)?;

    let state = handle.save()?;
    handle.vcpu_unplugged(VcpuId(0));
    let unplugged = handle.snapshot().vcpus[0].thread.is_none();
    let again = handle.clone();
    let plugged = thread::spawn(move || on_vcpu_thread(&again).map(|()| pinned()));
    let pinned = plugged.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    let detached = attachment.detach().is_ok();
    let counters = bridge.stop().counters;
    println!(
        "requests {}, refused {}",
        counters.requests, counters.refused
    );
    println!("fell back {fell_back}, detached {detached}");
    println!("unplugged {unplugged}, pinned again {pinned}");
    drop(ram);
    Ok(state)
}

/// Whether the calling thread runs on one pCPU alone.
fn pinned() -> bool {
    let allowed = affinity_of(Tid::current());
    allowed.is_ok_and(|pcpus| pcpus.iter().count() == 1)
}

/// Runs the guest. If `IGNORES_VALUES` is in the environment, the KVM wrapper does.
pub fn run() -> anyhow::Result<()> {
    let ignores_values = std::env::var_os("IGNORES_VALUES").is_some();
    // What a hook of a panic looks up is not among the calls.
    std::panic::set_hook(Box::new(|_| {}));
    let kvm = Kvm::new()?;
    let (folder, empty) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let host = host(folder.path())?;
    let pcpu = affinity_of(Tid::current())?.iter().next();
    let pcpu = pcpu.context("no pCPU")?;
    let (before, end) = ((threads()?, files()?), Instant::now() + PATIENCE);
    let bridge = || builder(&host, BASE, pcpu).events(Box::new(Events)).start();
    drop(bridge()?);
    // A thread that has been joined may still be in procfs.
    while before != (threads()?, files()?) && Instant::now() < end {
        thread::yield_now();
    }
    println!("dropped {}", before == (threads()?, files()?));
    let (here, there) = (bridge()?, bridge()?);
    std::os::unix::fs::chroot(empty.path())?;
    std::env::set_current_dir("/")?;

    let state = one(&kvm, here, ignores_values)?;
    // As on another host.
    there.handle().restore(&state)?;
    let request = there.handle().snapshot().vcpus[0].request;
    println!("restored {:?}", request.map(|khz| khz.0));
    Ok(())
}
