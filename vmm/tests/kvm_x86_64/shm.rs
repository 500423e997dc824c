// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `shm`, on real KVM:
//!
//! - Reads, a store of a request and its ring are no exits, and the request reaches the device.
//! - A ring for no vCPU exits and does nothing.
//! - What KVM does not handle exits and does the same.
//! - A guest that resets finds the memory as it was made, and its request taken back.
//! - When the path is lost, requests exit.
//!
//! And the path `ram`, whose memory is in the place of the registers: a store is a request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use vcpufreq_bridge::shm::{SHM, SharedMemory, ShmBackend, ShmRegion};
use vcpufreq_bridge::{AccessPath, Bridge, BridgeConfig, Embedder, EventStats, KvmSlot, Offered};
use vcpufreq_device::{
    Device, DeviceConfig, Khz, PerfTable, REG_CUR_PERF, REG_SET_PERF, ReadReg, VcpuSpec,
};
use vcpufreq_host::fakes::FakeHost;
use vcpufreq_host::{ActuatorKind, HostActuator, KernelTree, SysfsSource};
use vcpufreq_vm::bus::{Bus, MmioDevice};
use vcpufreq_vm::{Cpufreq, ExitReason};

use super::in_kernel::Counted;
use super::*;

/// Ends a test that would hang. No test waits for it.
const PATIENCE: Duration = Duration::from_secs(600);
/// No test lasts as long: only rings announce requests.
const NEVER: Duration = Duration::from_secs(24 * 3600);
const MAGIC: u32 = 0x7166_7076;
const SET_PERF: u16 = 0x1004;
/// Behind 128 KiB of memory, which one vCPU has.
const DOORBELL: u32 = 0x2_000c;
const RING: u32 = 1 << 16;

#[derive(Debug)]
struct Strict;

impl Embedder for Strict {
    fn warn(&self, text: &str) {
        assert!(text.contains("the path shm is lost"), "{text}");
    }
}

struct Path {
    bridge: Bridge,
    counted: Arc<Counted>,
    size: u64,
    /// The host's files.
    _host: FakeHost,
}

fn path() -> Path {
    of(SharedMemory::create)
}

/// By the memory that `make` makes.
fn of(make: fn(&DeviceConfig) -> std::io::Result<SharedMemory>) -> Path {
    let host = FakeHost::empty();
    host.write("sys/devices/system/cpu/possible", "0\n");
    for file in ["cpuinfo_max_freq", "scaling_cur_freq"] {
        let file = format!("sys/devices/system/cpu/cpu0/cpufreq/{file}");
        host.write(&file, "1800000");
    }
    let config = DeviceConfig::new(vec![VcpuSpec {
        table: PerfTable::try_from(TABLE_KHZ.map(Khz).to_vec()).unwrap(),
        capacity: Util::new(512).unwrap(),
        domain: DomainId(0),
    }]);
    let memory = Arc::new(make(&config).unwrap());
    let config = match memory.offset_in_ram() {
        None => config,
        Some(_) => config.without_steps(),
    };
    let domains = config.domains();
    let nothing = HostActuator::build(&ActuatorKind::Nothing, &KernelTree, &domains).unwrap();
    let source = Arc::new(SysfsSource::new(&host.root(), 1).unwrap());
    let device = Device::new(config, nothing, source, Arc::new(EventStats::new(1, None)));
    let backend = ShmBackend::of_own_guest(memory.clone()).unwrap();
    let offered = Offered {
        backend: Box::new(backend.looking_every(NEVER)),
        required: Some("no worker".to_owned()),
    };
    let config = BridgeConfig::new(CPUFREQ_BASE, 1, Arc::new(Strict));
    let bridge = Bridge::start(device.unwrap(), &config, &[offered]).unwrap();
    let (region, size): (Arc<dyn MmioDevice>, _) = match memory.offset_in_ram() {
        None => {
            let region = ShmRegion::new(memory, bridge.mmio());
            let size = region.size();
            (Arc::new(region), size)
        }
        Some(_) => (bridge.mmio(), bridge.size()),
    };
    Path {
        size,
        counted: Counted::new(region),
        bridge,
        _host: host,
    }
}

impl Path {
    /// Runs `code` until it halts, with KVM's part or without; what it left in `results`.
    fn run(&self, kvm: &Kvm, (code, offload): (Code, bool), results: u16) -> Vec<u32> {
        let mut machine = machine(kvm, &[code], CPUFREQ_BASE);
        let (vm, slot) = (machine.vm.clone(), machine.memory.next_slot());
        let free = KvmSlot { vm, slot };
        let _attached = offload.then(|| self.bridge.handle().attach(free));
        let mut bus = Bus::new();
        let device: Arc<dyn MmioDevice> = self.counted.clone();
        bus.insert(CPUFREQ_BASE, self.size, device).unwrap();
        let ends = run_to_end(&mut machine, &Arc::new(bus));
        assert_eq!(ends, [(0, VcpuEnd::Halted)]);
        (0..results).map(|i| result(&machine.memory, i)).collect()
    }

    fn asked(&self) -> Option<Khz> {
        self.bridge.handle().snapshot().vcpus[0].request
    }

    fn expect(&self, khz: u32) {
        let until = Instant::now() + PATIENCE;
        while self.asked() != Some(Khz(khz)) {
            assert!(Instant::now() < until, "{:?}, not {khz}", self.asked());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Reads magic, length of the table, its second entry and, behind a request, that.
fn all(khz: u32) -> Code {
    let reads = Code::default().read(0x00, 0).read(0x1008, 1);
    let asks = reads.read(0x1204, 2).write(SET_PERF, khz);
    asks.write_far(DOORBELL, RING).read(SET_PERF, 3)
}

#[test]
fn reads_and_requests_are_no_exits() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let read = path.run(&kvm, (all(TABLE_KHZ[1]).halt(), true), 4);
    assert_eq!(read, [MAGIC, 3, TABLE_KHZ[1], TABLE_KHZ[1]]);
    assert_eq!(path.counted.exits(), (0, 0));
    path.expect(TABLE_KHZ[1]);
    // Any value, for there is no eventfd of each.
    let code = Code::default().write(SET_PERF, 12_345);
    path.run(&kvm, (code.write_far(DOORBELL, RING).halt(), true), 0);
    path.expect(12_345);
    assert_eq!(path.counted.exits(), (0, 0));
    let counters = path.bridge.stop().counters;
    assert_eq!((counters.requests, counters.refused), (2, 0));
}

#[test]
fn registers_that_are_memory_have_no_exits() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = of(SharedMemory::in_place_of_registers);
    let [cur, set] = [REG_CUR_PERF, REG_SET_PERF].map(|offset| u16::try_from(offset).unwrap());
    let [len, first] = [ReadReg::PerftblLen, ReadReg::PerftblRd]
        .map(|register| u16::try_from(register.offset()).unwrap());
    let code = Code::default().read(len, 0).read(first, 1).read(cur, 2);
    let code = code.write(set, TABLE_KHZ[1]).read(set, 3);
    let read = path.run(&kvm, (code.halt(), true), 4);
    assert_eq!(read, [1, TABLE_KHZ[2], TABLE_KHZ[2], TABLE_KHZ[1]]);
    path.expect(TABLE_KHZ[1]);
    // Any value: the table has one entry.
    path.run(&kvm, (Code::default().write(set, 12_345).halt(), true), 0);
    path.expect(12_345);
    assert_eq!(path.counted.exits(), (0, 0));
    // Without KVM's part the device itself answers.
    let code = Code::default().read(len, 0).write(set, 1);
    let read = path.run(&kvm, (code.halt(), false), 1);
    assert_eq!((read, path.counted.exits()), (vec![1], (1, 1)));
    assert_eq!(path.asked(), Some(Khz(1)));
}

#[test]
fn a_ring_for_no_vcpu_does_nothing() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let code = Code::default().write(SET_PERF, TABLE_KHZ[1]);
    let rings = [0, 1, RING + 1, RING + RING, u32::MAX];
    let code = rings
        .into_iter()
        .fold(code, |code, ring| code.write_far(DOORBELL, ring));
    path.run(&kvm, (code.write_far(DOORBELL - 4, RING).halt(), true), 0);
    assert_eq!(path.counted.exits(), (0, 6));
    assert_eq!(path.bridge.stop().counters.requests, 0);
}

#[test]
fn what_kvm_does_not_handle_exits_and_does_the_same() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let read = path.run(&kvm, (all(TABLE_KHZ[2]).halt(), false), 4);
    assert_eq!(read, [MAGIC, 3, TABLE_KHZ[1], TABLE_KHZ[2]]);
    assert_eq!(path.counted.exits(), (4, 2));
    assert_eq!(path.asked(), Some(Khz(TABLE_KHZ[2])), "before it goes on");
    assert_eq!(
        path.bridge.handle().snapshot().vcpus[0].path,
        AccessPath::Exit
    );
}

#[test]
fn a_guest_that_resets_finds_memory_anew() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    // What it writes over is read by the one that comes after it, which halts if that isn't so.
    let scribbles = all(TABLE_KHZ[2]).write(0x00, 1).write(0x1008, 1);
    let scribbles = scribbles.write(0x1204, 1).triple_fault();
    let check = |code: Code, offset: u16, value: u32| {
        let load = code.raw(&[0x66, 0xa1]).raw(&offset.to_le_bytes());
        let compare = load.raw(&[0x66, 0x3d]).raw(&value.to_le_bytes());
        // Over a halt.
        compare.raw(&[0x74, 0x01]).halt()
    };
    let cells = [
        (0, MAGIC),
        (0x1008, 3),
        (0x1204, TABLE_KHZ[1]),
        (SET_PERF, 0),
    ];
    let fresh = cells
        .into_iter()
        .fold(Code::default(), |code, (at, value)| check(code, at, value));
    let codes = vec![scribbles, fresh.triple_fault(), Code::default().halt()];
    let (handle, attaching) = (path.bridge.handle(), path.bridge.handle());
    let told = Arc::new(RecordingHooks {
        also: Some(Box::new(move || handle.reset())),
        ..RecordingHooks::default()
    });
    let cpufreq = Cpufreq {
        device: path.counted.clone(),
        size: path.size,
        attach: Arc::new(move |vm| attaching.attach(vm)),
        guest_pages: None,
    };
    let report = supervised(&kvm, codes, &told, Some(cpufreq));
    assert_eq!((report.reason, report.resets), (ExitReason::PowerOff, 2));
    assert_eq!(path.counted.exits(), (0, 0));
    let snapshot = path.bridge.handle().snapshot();
    assert_eq!(snapshot.vcpus[0].path, AccessPath::Backend(SHM));
    assert!(snapshot.vcpus[0].request.is_none_or(|khz| khz == Khz(0)));
}

#[test]
fn a_lost_path_gives_way_to_exits() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    path.run(&kvm, (all(TABLE_KHZ[0]).halt(), true), 0);
    path.expect(TABLE_KHZ[0]);
    let vm = Arc::new(kvm.create_vm().unwrap());
    let mut attachment = path.bridge.handle().attach(KvmSlot { vm, slot: 0 });
    attachment.fall_back();
    assert!(attachment.lost().is_none(), "all accesses exit");
    path.run(&kvm, (all(TABLE_KHZ[2]).halt(), false), 0);
    assert_eq!(path.asked(), Some(Khz(TABLE_KHZ[2])));
}
