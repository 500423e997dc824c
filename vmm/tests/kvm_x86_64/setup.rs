// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of a few instructions, its device, and what the machine reports of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vcpufreq_bridge::{Attachment, KvmOffload, KvmSlot};
use vcpufreq_device::fakes::{FixedSource, RecordingActuator, RecordingEvents};
use vcpufreq_device::{
    Clock, Device, DeviceConfig, DomainId, Headroom, Khz, MmioRegion, PcpuPerf, PerfTable,
    RateLimit, Util, VcpuId, VcpuSpec, region_size,
};
use vcpufreq_host::Tid;
use vcpufreq_vm::bus::{Bus, MmioDevice};
use vcpufreq_vm::console_output::ConsoleEnd;
use vcpufreq_vm::layout::CPUFREQ_BASE;
use vcpufreq_vm::machine::{Bootable, KvmGuest};
use vcpufreq_vm::memory::{Memory, Region};
use vcpufreq_vm::vcpu::{VcpuEnd, VcpuStart, VcpuThreads};
use vcpufreq_vm::{Cpufreq, Hooks, RunReport, VmEnvironment, supervise};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

/// Where the guest's code is, one page for each vCPU.
pub const CODE: u64 = 0x1000;
/// Where it leaves results.
pub const RESULTS: u16 = 0x8000;
pub const RAM_SIZE: u64 = 0x1_0000;
pub const TABLE_KHZ: [u32; 3] = [600_000, 1_200_000, 1_800_000];

pub fn kvm_or_skip() -> Option<Kvm> {
    let kvm = Kvm::new().and_then(|kvm| kvm.create_vm().map(|_| kvm));
    kvm.inspect_err(|error| println!("SKIP: no usable /dev/kvm: {error}"))
        .ok()
}

/// 16-bit code. DS is based at the device under test, ES at RAM.
#[derive(Clone, Default)]
pub struct Code(Vec<u8>);

impl Code {
    /// `mov dword ds:[offset], value`
    pub fn write(mut self, offset: u16, value: u32) -> Self {
        self.0.extend([0x66, 0xc7, 0x06]);
        self.0.extend(offset.to_le_bytes());
        self.0.extend(value.to_le_bytes());
        self
    }

    /// The same anywhere in DS, with an offset of 32 bits.
    pub fn write_far(self, offset: u32, value: u32) -> Self {
        let far = self.raw(&[0x67, 0x66, 0xc7, 0x05]);
        far.raw(&offset.to_le_bytes()).raw(&value.to_le_bytes())
    }

    /// `mov eax, ds:[offset]`, `mov es:[result], eax`
    pub fn read(mut self, offset: u16, result: u16) -> Self {
        self.0.extend([0x66, 0xa1]);
        self.0.extend(offset.to_le_bytes());
        self.0.extend([0x26, 0x66, 0xa3]);
        self.0.extend((RESULTS + 4 * result).to_le_bytes());
        self
    }

    /// `mov eax, ds:[0]` until it is `khz`: `cmp eax, khz`, `jne`.
    pub fn wait_for(self, khz: u32) -> Self {
        let again = self.raw(&[0x66, 0xa1, 0x00, 0x00, 0x66, 0x3d]);
        again.raw(&khz.to_le_bytes()).raw(&[0x75, 0xf4])
    }

    /// Any other instruction.
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub fn halt(self) -> Self {
        self.raw(&[0xf4])
    }

    /// `jmp $`
    pub fn spin(self) -> Self {
        self.raw(&[0xeb, 0xfe])
    }

    /// `ud2`; without an interrupt table this is a triple fault.
    pub fn triple_fault(self) -> Self {
        self.raw(&[0x0f, 0x0b])
    }
}

/// A guest with RAM at 0 and one vCPU for each piece of code.
pub fn machine(kvm: &Kvm, codes: &[Code], ds_base: u64) -> KvmGuest {
    let vm = kvm.create_vm().unwrap();
    let mut memory = Memory::default();
    memory.add(&vm, ram(0, RAM_SIZE)).unwrap();
    let vcpus = codes.iter().zip(0..).map(|(code, id)| {
        let entry = CODE * (id + 1);
        let at = GuestAddress(entry);
        memory.map().write_slice(&code.0, at).unwrap();
        vcpu_at(&vm, id, (entry, ds_base))
    });
    let vcpus = vcpus.collect();
    let vm = Arc::new(vm);
    KvmGuest { vcpus, vm, memory }
}

pub fn ram(base: u64, size: u64) -> Region {
    Region { base, size }
}

fn vcpu_at(vm: &VmFd, id: u64, (entry, ds_base): (u64, u64)) -> VcpuFd {
    let vcpu = vm.create_vcpu(id).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    (sregs.es.base, sregs.es.selector) = (0, 0);
    sregs.ds.base = ds_base;
    (sregs.ds.limit, sregs.ds.g) = (u32::MAX, 1);
    // Protected mode, so that a fault without an interrupt table is a triple
    // fault; the segments stay 16-bit ones.
    sregs.cr0 |= 1;
    sregs.idt.limit = 0;
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.get_regs().unwrap();
    (regs.rip, regs.rflags) = (entry, 2);
    vcpu.set_regs(&regs).unwrap();
    vcpu
}

pub fn result(machine: &Memory, index: u16) -> u32 {
    let at = GuestAddress(u64::from(RESULTS + 4 * index));
    machine.map().read_obj(at).unwrap()
}

/// Counts the calls of the virtual machine.
#[derive(Default)]
pub struct RecordingHooks {
    pub threads: Mutex<Vec<(u16, i32)>>,
    pub resets: AtomicUsize,
    pub lost: AtomicUsize,
    /// Where warnings go; else one is a panic.
    pub warnings: Option<Mutex<Vec<String>>>,
    /// Whether a vCPU's thread panics at its start.
    pub dies: bool,
    /// What comes after a path that is lost.
    pub next: Mutex<Option<Arc<KvmOffload>>>,
    /// What a reset and the loss of a path do besides.
    pub also: Option<Box<dyn Fn() + Send + Sync>>,
}

impl RecordingHooks {
    fn do_also(&self) {
        if let Some(also) = &self.also {
            also();
        }
    }
}

impl Hooks for RecordingHooks {
    fn on_vcpu_thread_start(&self, _vcpu: VcpuId, _tid: Tid) -> anyhow::Result<()> {
        Ok(())
    }

    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        assert!(!self.dies, "as the test wants");
        self.threads.lock().unwrap().push((vcpu.0, tid.get()));
        Ok(())
    }

    fn on_disk_thread(&self) {}

    fn on_reset(&self) {
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.do_also();
    }

    fn on_set_up(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn before_run(&self) {}

    fn helper_end(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn on_helper_end(&self) {}

    fn on_end(&self) {}

    fn on_warning(&self, text: &str) {
        let warnings = self.warnings.as_ref().expect(text);
        warnings.lock().unwrap().push(text.to_owned());
    }
}

/// Boots the same code each time, but the last of `codes` for ever.
struct Reboots {
    codes: Vec<Code>,
    boots: usize,
}

impl Bootable for Reboots {
    fn boot(&mut self, kvm: &Kvm, _console: &EventFd) -> anyhow::Result<KvmGuest> {
        let code = self.codes[self.boots.min(self.codes.len() - 1)].clone();
        self.boots += 1;
        Ok(machine(kvm, &[code], CPUFREQ_BASE))
    }
}

/// `device` on the bus, and in KVM `offload`, then what `told` has next.
pub fn cpufreq(
    told: &Arc<RecordingHooks>,
    device: Arc<dyn MmioDevice>,
    offload: Option<Arc<KvmOffload>>,
) -> Cpufreq {
    let (told, offload) = (told.clone(), Arc::new(Mutex::new(offload)));
    let attach = move |vm: KvmSlot| {
        let (of_lost, of_refused, now) = (told.clone(), told.clone(), offload.clone());
        let current = offload.lock().unwrap().clone();
        Attachment::new(
            Arc::new(vm),
            current.as_ref(),
            Box::new(move |_, detached| {
                detached.unwrap();
                of_lost.lost.fetch_add(1, Ordering::SeqCst);
                of_lost.do_also();
                let next = of_lost.next.lock().unwrap().take();
                now.lock().unwrap().clone_from(&next);
                next
            }),
            Box::new(move |text| of_refused.on_warning(text)),
        )
    };
    Cpufreq {
        device,
        size: region_size(1),
        attach: Arc::new(attach),
        guest_pages: None,
    }
}

/// A guest of one vCPU from its first boot to its end.
pub fn supervised(
    kvm: &Kvm,
    codes: Vec<Code>,
    told: &Arc<RecordingHooks>,
    cpufreq: Option<Cpufreq>,
) -> RunReport {
    let host = VmEnvironment {
        hooks: told.clone(),
        cpufreq,
        console: ConsoleEnd::default(),
    };
    let threads = VcpuThreads::spawn(&[vec![]], &host.hooks).unwrap();
    supervise(
        &mut Reboots { codes, boots: 0 },
        kvm,
        (threads, None),
        &host,
    )
    .unwrap()
}

/// Runs `machine` until all its vCPUs have ended by themselves.
pub fn run_to_end(machine: &mut KvmGuest, bus: &Arc<Bus>) -> Vec<(usize, VcpuEnd)> {
    let hooks: Arc<dyn Hooks> = Arc::new(RecordingHooks::default());
    let fds = std::mem::take(&mut machine.vcpus);
    let mut threads = VcpuThreads::spawn(&vec![vec![]; fds.len()], &hooks).unwrap();
    let starts = fds.into_iter().map(|fd| VcpuStart {
        fd,
        bus: bus.clone(),
    });
    threads.start(starts.collect()).unwrap();
    let mut ends = Vec::new();
    while threads.any_running() {
        ends.extend(threads.take_end());
        std::thread::sleep(Duration::from_millis(1));
    }
    ends.sort_by_key(|(vcpu, _)| *vcpu);
    ends
}

type FakeDevice = Device<Arc<RecordingActuator>, FixedSource, Arc<RecordingEvents>>;

pub struct Bench {
    pub actuator: Arc<RecordingActuator>,
    pub events: Arc<RecordingEvents>,
    pub region: Arc<MmioRegion<Arc<RecordingActuator>, FixedSource, Arc<RecordingEvents>>>,
}

/// A device with `vcpus` vCPUs of capacity 512 in a domain each, whose pCPU
/// runs at 1.2 of 1.8 GHz.
pub fn bench(vcpus: u32) -> Bench {
    limited_bench(vcpus, None)
}

/// A clock that stands still.
struct Stopped;

impl Clock for Stopped {
    fn now_ns(&self) -> u64 {
        0
    }
}

pub fn limited_bench(vcpus: u32, rate_limit: Option<RateLimit>) -> Bench {
    let spec = |domain| VcpuSpec {
        table: PerfTable::try_from(TABLE_KHZ.map(Khz).to_vec()).unwrap(),
        capacity: Util::new(512).unwrap(),
        domain: DomainId(domain),
    };
    let config = DeviceConfig {
        headroom: Headroom::for_kernel(7, 2),
        rate_limit,
        ..DeviceConfig::new((0..vcpus).map(spec).collect())
    };
    let (actuator, events) = (Arc::default(), Arc::default());
    let source = FixedSource::new(PcpuPerf {
        pcpu: 0,
        khz: Khz(1_200_000),
        reference: Khz(1_800_000),
        capacity: Util::new(512).unwrap(),
    });
    let device = FakeDevice::new(config, Arc::clone(&actuator), source, Arc::clone(&events));
    Bench {
        actuator,
        events,
        region: Arc::new(MmioRegion::new(Arc::new(
            device.unwrap().with_clock(Stopped),
        ))),
    }
}

pub fn bus_with(bench: &Bench) -> Arc<Bus> {
    let mut bus = Bus::new();
    let size = region_size(1);
    bus.insert(CPUFREQ_BASE, size, bench.region.clone())
        .unwrap();
    Arc::new(bus)
}
