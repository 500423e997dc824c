// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `ioeventfd`, on real KVM:
//!
//! - A read of a register page is no exit, and sees the device's latest store.
//! - A write of a table entry is no exit, and its value reaches the device.
//! - Any other value exits, after those that were written before it.
//! - A selection is in the page at the guest's next instruction.
//! - A guest that resets has it all again.
//! - When the worker dies, what was written is carried out, and what follows
//!   exits.
//! - What KVM refuses is reported, once for each path.
//! - 64 vCPUs with 16 entries each are within KVM's limits.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use vcpufreq_bridge::ioeventfd::{
    DomainWrites, EntryBell, IoeventfdRegion, PendingWrites, Unknown, Worker, WorkerParts,
};
use vcpufreq_bridge::{Doorbell, KvmSlot, KvmVm, OffloadState, PageMapping, Silent, SlotMemory};
use vcpufreq_device::fakes::FixedSource;
use vcpufreq_device::{
    ActuateError, Actuator, Clamp, Device, NoEvents, RegisterPages, region_size,
};
use vcpufreq_vm::bus::MmioDevice;

use kvm_ioctls::{Kvm, VmFd};
use vcpufreq_bridge::KvmOffload;
use vcpufreq_device::{Khz, PcpuPerf};
use vcpufreq_vm::bus::Bus;
use vmm_sys_util::eventfd::EventFd;

use super::*;

/// Counts the accesses that exit, and passes them on.
pub struct Counted {
    inner: Arc<dyn MmioDevice>,
    reads: AtomicUsize,
    writes: AtomicUsize,
}

impl Counted {
    pub fn new(inner: Arc<dyn MmioDevice>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            reads: AtomicUsize::new(0),
            writes: AtomicUsize::new(0),
        })
    }

    pub fn exits(&self) -> (usize, usize) {
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        (count(&self.reads), count(&self.writes))
    }
}

impl MmioDevice for Counted {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.inner.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.inner.write(offset, data);
    }
}

/// A device on the path `ioeventfd`, without its worker.
struct Path {
    bench: Bench,
    pending: Arc<PendingWrites>,
    offload: Option<Arc<KvmOffload>>,
    next: Option<Arc<KvmOffload>>,
    counted: Arc<Counted>,
}

impl Path {
    fn taken(&self) -> Arc<OffloadState> {
        self.offload.as_ref().unwrap().state.clone()
    }
}

fn new_event() -> Arc<EventFd> {
    Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())
}

fn doorbell(vcpu: u16, khz: Option<u32>) -> Doorbell {
    Doorbell::of_set_perf(VcpuId(vcpu), khz, new_event())
}

/// One for each entry of the table.
fn doorbells() -> Vec<Doorbell> {
    let bells = TABLE_KHZ.map(|khz| doorbell(0, Some(khz)));
    bells.into()
}

fn pages(vcpus: u16) -> Arc<PageMapping> {
    Arc::new(PageMapping::new(region_size(vcpus), false).unwrap())
}

fn offload(pages: Arc<dyn SlotMemory>, doorbells: Vec<Doorbell>) -> KvmOffload {
    KvmOffload {
        base: CPUFREQ_BASE,
        pages: Some(pages),
        doorbells: doorbells.into(),
        lost: new_event(),
        all_or_nothing: false,
        state: Arc::default(),
    }
}

fn path() -> Path {
    let bench = bench(1);
    let device = bench.region.device().clone();
    let pages = pages(1);
    let shown = RegisterPages::new(Box::new(pages.clone()), 1).unwrap();
    device.attach_pages(shown).unwrap();
    device.refresh(VcpuId(0));
    let doorbells = doorbells();
    let bells = doorbells.iter();
    let bells = bells.filter_map(|bell| {
        Some(EntryBell {
            vcpu: VcpuId(0),
            khz: bell.value?,
            event: bell.event.clone(),
        })
    });
    let pending = PendingWrites::new(
        vec![DomainWrites::new(bells.collect(), Arc::new(Unknown)).unwrap()],
        vec![0],
    );
    let region = IoeventfdRegion::new(bench.region.clone(), device, pending.clone());
    Path {
        bench,
        pending,
        offload: Some(Arc::new(offload(pages, doorbells))),
        next: None,
        counted: Counted::new(Arc::new(region)),
    }
}

/// A pCPU at the frequency that guests wait for.
fn at_777() -> PcpuPerf {
    PcpuPerf {
        pcpu: 0,
        khz: Khz(777),
        reference: Khz(1_800_000),
        capacity: Util::new(512).unwrap(),
    }
}

/// Runs `code` until it halts, then what it left in `results`.
fn run_code(kvm: &Kvm, path: &Path, code: Code, results: u16) -> Vec<u32> {
    let mut machine = machine(kvm, &[code], CPUFREQ_BASE);
    let slot = machine.memory.next_slot();
    let offload = path.offload.as_ref().unwrap();
    let vm = in_slot(&machine.vm, slot);
    let _attached = offload.attach(&vm, &no_warning);
    let mut bus = Bus::new();
    bus.insert(CPUFREQ_BASE, region_size(1), path.counted.clone())
        .unwrap();
    let ends = run_to_end(&mut machine, &Arc::new(bus));
    assert_eq!(ends, [(0, VcpuEnd::Halted)]);
    (0..results).map(|i| result(&machine.memory, i)).collect()
}

fn in_slot(vm: &Arc<VmFd>, slot: u32) -> Arc<dyn KvmVm> {
    let vm = vm.clone();
    Arc::new(KvmSlot { vm, slot })
}

/// A refusal would be one.
fn no_warning(text: &str) {
    panic!("{text}");
}

fn applied(path: &Path) -> Vec<u16> {
    let applied = path.bench.actuator.applied();
    applied.iter().map(|(_, clamp)| clamp.min.get()).collect()
}

#[test]
fn a_read_is_no_exit() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let code = Code::default()
        .read(0x00, 0)
        .read(0x08, 1)
        .read(0x10, 2)
        .read(0x14, 3)
        .read(0x04, 4)
        .halt();
    let read = run_code(&kvm, &path, code, 5);
    assert_eq!(read, [1_200_000, 3, TABLE_KHZ[0], 0, 0]);
    assert_eq!(path.counted.exits(), (0, 0));
}

#[test]
fn a_write_of_a_table_entry_is_no_exit_and_arrives() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let code = Code::default()
        .write(0x04, TABLE_KHZ[2])
        .write(0x04, TABLE_KHZ[1])
        .halt();
    run_code(&kvm, &path, code, 0);
    assert_eq!(path.counted.exits(), (0, 0));
    assert!(applied(&path).is_empty());
    path.pending.drain(path.bench.region.device());
    // 512 × 1200 MHz / 1800 MHz
    assert_eq!(applied(&path), [341]);
    let counters = path.bench.region.device().counters(VcpuId(0)).unwrap();
    assert_eq!((counters.requests, counters.coalesced), (2, 1));
}

#[test]
fn another_value_exits_after_those_before_it() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let code = Code::default()
        .write(0x04, TABLE_KHZ[2])
        .write(0x04, 900_000)
        .raw(&[0xc6, 0x06, 0x04, 0x00, 0x40]) // mov byte ds:[4], 0x40
        .halt();
    run_code(&kvm, &path, code, 0);
    assert_eq!(path.counted.exits(), (0, 2));
    assert_eq!(applied(&path), [512, 256]);
}

#[test]
fn a_selection_is_in_the_page_at_once() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let code = Code::default()
        .write(0x0c, 2)
        .read(0x10, 0)
        .write(0x0c, 3)
        .read(0x10, 1)
        .write(0x0c, 1)
        .read(0x10, 2)
        .halt();
    let read = run_code(&kvm, &path, code, 3);
    assert_eq!(read, [TABLE_KHZ[2], 0, TABLE_KHZ[1]]);
    assert_eq!(path.counted.exits(), (0, 3));
}

/// Carries nothing out: panics at the first clamp.
struct Panics;

impl Actuator for Panics {
    fn apply(&self, _domain: DomainId, _clamp: Clamp) -> Result<(), ActuateError> {
        panic!("as the test wants");
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

/// Runs guests that drain what is pending at a reset and when the path is lost; how often it was
/// lost, and how often they were reset.
fn drained(kvm: &Kvm, path: &mut Path, codes: Vec<Code>) -> (usize, u64) {
    let (pending, device) = (path.pending.clone(), path.bench.region.device().clone());
    let told = Arc::new(RecordingHooks {
        next: Mutex::new(path.next.take()),
        also: Some(Box::new(move || pending.drain(&*device))),
        ..RecordingHooks::default()
    });
    let cpufreq = cpufreq(&told, path.counted.clone(), path.offload.take());
    let report = supervised(kvm, codes, &told, Some(cpufreq));
    assert_eq!(report.reason, ExitReason::PowerOff);
    path.pending.drain(path.bench.region.device());
    (told.lost.load(Ordering::SeqCst), report.resets)
}

#[test]
fn a_guest_that_resets_has_it_again() {
    let Some(kvm) = kvm_or_skip() else { return };
    let mut path = path();
    let taken = path.taken();
    assert_eq!((taken.reads(), taken.writes()), (false, false));
    let request = |khz| Code::default().read(0x00, 0).write(0x04, khz);
    let codes = vec![
        request(TABLE_KHZ[0]).triple_fault(),
        request(TABLE_KHZ[1]).triple_fault(),
        request(TABLE_KHZ[2]).halt(),
    ];
    assert_eq!(drained(&kvm, &mut path, codes), (0, 2));
    assert_eq!(path.counted.exits(), (0, 0));
    assert_eq!(applied(&path), [170, 341, 512]);
    assert_eq!((taken.reads(), taken.writes()), (true, true));
    let accesses = path.bench.region.device().accesses(VcpuId(0)).unwrap();
    assert_eq!((accesses.writes_exited, accesses.writes_in_kernel), (0, 3));
}

#[test]
fn a_dead_worker_loses_no_request() {
    let Some(kvm) = kvm_or_skip() else { return };
    let mut path = path();
    let config = path.bench.region.device().config().clone();
    let panics = Device::new(config, Panics, FixedSource::default(), NoEvents);
    let worker = Worker::start(WorkerParts {
        requests: path.pending.clone(),
        device: Arc::new(panics.unwrap()),
        vcpus: [AtomicBool::new(true)].into(),
        avoid: Vec::new(),
        embedder: Arc::new(Silent),
        run_watch: None,
    })
    .unwrap();
    let offload = path.offload.as_mut().unwrap();
    Arc::get_mut(offload).unwrap().lost = worker.lost();
    let taken = path.taken();
    // Asks, waits for 777, and asks again.
    let code = Code::default()
        .write(0x04, TABLE_KHZ[2])
        .wait_for(777)
        .write(0x04, TABLE_KHZ[0])
        .halt();
    let told = path.counted.clone();
    let bench = path.bench.region.clone();
    // The first read that exits is after the path was lost: then the guest
    // reads 777 and goes on.
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while told.exits().0 == 0 {
                std::thread::yield_now();
            }
            bench.device().source().set(Some(at_777()));
        });
        assert_eq!(drained(&kvm, &mut path, vec![code]), (1, 0));
    });
    assert_eq!(path.counted.exits().1, 1, "the last write exits");
    assert_eq!((taken.reads(), taken.writes()), (false, false));
    // The one that the worker had in hand, and the one that exits after it.
    assert_eq!(applied(&path), [512, 170]);
    drop(worker);
}

/// An eventfd for any value, as the path `bpf` has it; lost at its second
/// write's signal, after which the path `ioeventfd` takes over.
#[test]
fn any_value_signals_and_a_lost_path_gives_way_to_the_next() {
    let Some(kvm) = kvm_or_skip() else { return };
    let mut path = path();
    let next = path.offload.take().unwrap();
    let event = new_event();
    let first = |lost| {
        let bell = Doorbell {
            event: event.clone(),
            ..doorbell(0, None)
        };
        Arc::new(KvmOffload {
            lost,
            all_or_nothing: true,
            ..offload(next.pages.clone().unwrap(), vec![bell])
        })
    };
    // 12345 is in no table; two bytes are no request, and exit.
    let code = Code::default().write(0x04, 12_345).write(0x04, 1).halt();
    path.offload = Some(first(next.lost.clone()));
    assert_eq!(drained(&kvm, &mut path, vec![code]), (0, 0));
    assert_eq!(event.read().unwrap(), 2);
    assert_eq!(path.counted.exits(), (0, 0));

    let lost = new_event();
    lost.write(1).unwrap();
    path.offload = Some(first(lost));
    path.next = Some(next.clone());
    // Reads cur_perf until it is 777, which the test sets when the next path is in
    // place, then asks.
    let code = Code::default()
        .wait_for(777)
        .write(0x04, TABLE_KHZ[1])
        .halt();
    let taken = next.state.clone();
    let device = path.bench.region.device().clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !(taken.reads() && taken.writes()) {
                std::thread::yield_now();
            }
            device.source().set(Some(at_777()));
            device.refresh(VcpuId(0));
        });
        assert_eq!(drained(&kvm, &mut path, vec![code]), (1, 0));
    });
    assert_eq!(path.counted.exits().1, 0, "the request ends in KVM");
    assert_eq!(applied(&path), [341]);
    assert_eq!((taken.reads(), taken.writes()), (true, true));
}

#[test]
fn sixty_four_vcpus_are_within_kvms_limits() {
    let Some(kvm) = kvm_or_skip() else { return };
    let vm = Arc::new(kvm.create_vm().unwrap());
    let of = |vcpu| (1..=16).map(move |khz| doorbell(vcpu, Some(khz)));
    let offload = Arc::new(offload(pages(64), (0..64).flat_map(of).collect()));
    let vm = in_slot(&vm, 0);
    let mut attached = offload.attach(&vm, &no_warning);
    attached.detach().unwrap();
    let _ = offload.attach(&vm, &no_warning);
}

#[test]
fn what_kvm_refuses_is_a_warning_and_exits() {
    let Some(kvm) = kvm_or_skip() else { return };
    let vm = Arc::new(kvm.create_vm().unwrap());
    // The same value twice: KVM takes the first and refuses the second.
    let mut twice = doorbells();
    twice.extend(doorbells());
    let refused = Arc::new(offload(pages(1), twice));
    let warnings = Mutex::new(Vec::new());
    let too_high = u32::MAX;
    let _ = refused.attach(&in_slot(&vm, too_high), &|text| {
        warnings.lock().unwrap().push(text.to_owned());
    });
    let warnings = warnings.into_inner().unwrap();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("KVM refused a memory slot"));
    assert!(warnings[1].starts_with("KVM refused ioeventfd 3 of 6"));
    let taken = &refused.state;
    assert_eq!((taken.reads(), taken.writes()), (false, false));
    // Nothing of it is left: it can be connected.
    let again = Arc::new(offload(refused.pages.clone().unwrap(), doorbells()));
    let _ = again.attach(&in_slot(&vm, 0), &no_warning);
}

/// KVM refuses the eventfds of one path, and of the next one: both refusals are reported, and the
/// second one not again after a reset.
#[test]
fn what_kvm_refuses_of_the_next_path_is_told_too() {
    let Some(kvm) = kvm_or_skip() else { return };
    let path = path();
    let usual = path.offload.as_ref().unwrap();
    let state: Arc<OffloadState> = Arc::default();
    let refused = |values: &[Option<u32>], all_or_nothing| {
        // Each value twice, which KVM doesn't take.
        let bells = values.iter().chain(values);
        let bells = bells.map(|khz| doorbell(0, *khz)).collect();
        Arc::new(KvmOffload {
            all_or_nothing,
            state: state.clone(),
            ..offload(usual.pages.clone().unwrap(), bells)
        })
    };
    let values = TABLE_KHZ.map(Some);
    let told = Arc::new(RecordingHooks {
        next: Mutex::new(Some(refused(&values, false))),
        warnings: Some(Mutex::default()),
        ..RecordingHooks::default()
    });
    let cpufreq = cpufreq(&told, path.counted.clone(), Some(refused(&[None], true)));
    // Waits for 777, resets, and halts.
    let wait = Code::default().wait_for(777).triple_fault();
    let codes = vec![wait, Code::default().halt()];
    let device = path.bench.region.device().clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Reads come from memory again once the next path is in place.
            while told.lost.load(Ordering::SeqCst) == 0 || !state.reads() {
                std::thread::yield_now();
            }
            device.source().set(Some(at_777()));
            device.refresh(VcpuId(0));
        });
        let report = supervised(&kvm, codes, &told, Some(cpufreq));
        assert_eq!(report.resets, 1);
    });
    let warnings = told.warnings.as_ref().unwrap().lock().unwrap().clone();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("KVM refused ioeventfd 1 of 2"));
    assert!(warnings[1].starts_with("KVM refused ioeventfd 3 of 6"));
}
