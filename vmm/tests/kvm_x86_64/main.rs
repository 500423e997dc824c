// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the virtual machine promises of memory slots, bus, vCPU threads and
//! device, checked on real KVM with a few instructions of 16-bit code.
//!
//! - A guest's loads and stores reach the vcpufreq registers, and those alone.
//! - What no device claims reads as 0 and is counted.
//! - Memory slots are where their descriptions place them.
//! - vCPUs run at the same time; a vCPU that never exits can be stopped.
//! - A guest that resets starts again, on the same threads; one that halts ends.
//! - What KVM can't run ends the machine with a report, not with a panic.
//!
//! Without a usable /dev/kvm each test prints that it is skipped.
#![cfg(target_arch = "x86_64")]
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but not in what they share"
)]

mod in_kernel;
mod setup;
mod shm;

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vcpufreq_device::{DomainId, Event, RateLimit, Util, VcpuId};
use vcpufreq_host::proc_field;
use vcpufreq_vm::bus::Bus;
use vcpufreq_vm::layout::CPUFREQ_BASE;
use vcpufreq_vm::vcpu::{VcpuEnd, VcpuStart, VcpuThreads};
use vcpufreq_vm::{ExitReason, Hooks};
use vm_memory::{Bytes, GuestAddress};

use setup::*;

#[test]
fn a_guest_drives_the_vcpufreq_registers() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bench = bench(1);
    let bus = bus_with(&bench);
    let code = Code::default()
        .write(0x04, 900_000)
        .read(0x00, 0)
        .read(0x08, 1)
        .write(0x0c, 2)
        .read(0x10, 2)
        .write(0x0c, 3)
        .read(0x10, 3)
        .read(0x14, 4)
        .halt();
    let mut machine = machine(&kvm, &[code], CPUFREQ_BASE);
    assert_eq!(run_to_end(&mut machine, &bus), [(0, VcpuEnd::Halted)]);
    let results: Vec<_> = (0..5).map(|i| result(&machine.memory, i)).collect();
    assert_eq!(results, [1_200_000, 3, TABLE_KHZ[2], 0, 0]);
    let applied = bench.actuator.applied();
    assert_eq!(applied.len(), 1);
    assert_eq!(applied[0].0, DomainId(0));
    // 512 × 900 MHz / 1800 MHz
    assert_eq!(applied[0].1.min, Util::new(256).unwrap());
    assert_eq!(bus.unclaimed(), 0);
}

#[test]
fn a_vcpu_that_writes_anothers_register_pays_for_it() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bench = limited_bench(
        2,
        Some(RateLimit {
            per_second: NonZeroU32::MIN,
            burst: NonZeroU32::MIN,
        }),
    );
    let bus = bus_with(&bench);
    let both = |khz| Code::default().write(0x1004, khz).write(0x04, khz).halt();
    let one = |code: Code| {
        let mut machine = machine(&kvm, &[code], CPUFREQ_BASE);
        assert_eq!(run_to_end(&mut machine, &bus), [(0, VcpuEnd::Halted)]);
    };
    one(both(900_000));
    one(both(1_800_000));
    let counters = [0, 1].map(|vcpu| bench.region.device().counters(VcpuId(vcpu)).unwrap());
    // The first write of all had the one token of vCPU 0.
    assert_eq!(counters.map(|counted| counted.limited), [2, 1]);
    assert_eq!(bench.actuator.applied().len(), 1);
}

#[test]
fn illegal_accesses_are_told_and_do_not_end_the_guest() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bench = bench(1);
    let bus = bus_with(&bench);
    let code = Code::default()
        .raw(&[0xc6, 0x06, 0x04, 0x00, 0x55]) // mov byte ds:[4], 0x55
        .write(0x00, 1)
        .read(0x04, 0)
        .read(0x2000, 1)
        .write(0x04, 1_800_000)
        .halt();
    let mut machine = machine(&kvm, &[code], CPUFREQ_BASE);
    let marked = GuestAddress(RESULTS.into());
    machine
        .memory
        .map()
        .write_slice(&[0xaa; 8], marked)
        .unwrap();
    assert_eq!(run_to_end(&mut machine, &bus), [(0, VcpuEnd::Halted)]);
    assert_eq!(result(&machine.memory, 0), 0);
    assert_eq!(result(&machine.memory, 1), 0);
    let events = bench.events.all();
    let illegal = events.iter().filter_map(|event| match event {
        Event::IllegalAccess {
            offset, len, write, ..
        } => Some((*offset, *len, *write)),
        _ => None,
    });
    let expected = [
        (4, 1, true),
        (0, 4, true),
        (4, 4, false),
        (0x2000, 4, false),
    ];
    assert_eq!(illegal.collect::<Vec<_>>(), expected);
    assert_eq!(bench.actuator.applied().len(), 1);
}

#[test]
fn what_no_device_claims_reads_zero_and_is_counted() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bus = Arc::new(Bus::new());
    let code = Code::default()
        .write(0x04, 7)
        .read(0x04, 0)
        .raw(&[0xe4, 0x60]) // in al, 0x60
        .raw(&[0x26, 0xa2, 0x04, 0x80]) // mov es:[0x8004], al
        .raw(&[0xe6, 0x80]) // out 0x80, al
        .halt();
    let mut machine = machine(&kvm, &[code], CPUFREQ_BASE);
    let marked = GuestAddress(RESULTS.into());
    machine
        .memory
        .map()
        .write_slice(&[0xff; 8], marked)
        .unwrap();
    assert_eq!(run_to_end(&mut machine, &bus), [(0, VcpuEnd::Halted)]);
    assert_eq!(result(&machine.memory, 0), 0);
    assert_eq!(result(&machine.memory, 1), 0xffff_ff00);
    assert_eq!(bus.unclaimed(), 4);
}

#[test]
fn a_second_slot_is_memory_of_its_own() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bus = Arc::new(Bus::new());
    let base = 0x4000_0000;
    let code = Code::default()
        .write(0x123, 0xcafe_f00d)
        .read(0x123, 0)
        .halt();
    let mut machine = machine(&kvm, &[code], base);
    machine
        .memory
        .add(&machine.vm, ram(base, RAM_SIZE))
        .unwrap();
    assert_eq!(run_to_end(&mut machine, &bus), [(0, VcpuEnd::Halted)]);
    assert_eq!(result(&machine.memory, 0), 0xcafe_f00d);
    let there: u32 = machine
        .memory
        .map()
        .read_obj(GuestAddress(base + 0x123))
        .unwrap();
    assert_eq!(there, 0xcafe_f00d);
    assert_eq!(machine.memory.size(), 2 * RAM_SIZE);
    assert_eq!(bus.unclaimed(), 0);
    let overlap = machine.memory.add(&machine.vm, ram(base, RAM_SIZE));
    assert!(overlap.unwrap_err().to_string().contains("doesn't fit"));
}

#[test]
fn vcpus_run_together_on_threads_of_their_own() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bench = bench(2);
    let bus = bus_with(&bench);
    // Each waits until the other has reported that it runs.
    let wait = |mine: u8, other: u8| {
        Code::default()
            .raw(&[0x26, 0xc6, 0x06, mine, 0x80, 1]) // mov byte es:[0x80mine], 1
            .raw(&[0x26, 0x80, 0x3e, other, 0x80, 1]) // cmp byte es:[0x80other], 1
            .raw(&[0x75, 0xf8]) // jne to the comparison
            .write(if mine == 0 { 0x04 } else { 0x1004 }, 1_800_000)
            .halt()
    };
    let mut machine = machine(&kvm, &[wait(0, 1), wait(1, 0)], CPUFREQ_BASE);
    let ends = run_to_end(&mut machine, &bus);
    assert_eq!(ends, [(0, VcpuEnd::Halted), (1, VcpuEnd::Halted)]);
    let mut domains: Vec<_> = bench.actuator.applied().iter().map(|a| a.0).collect();
    domains.sort_by_key(|domain| domain.0);
    assert_eq!(domains, [DomainId(0), DomainId(1)]);
}

#[test]
fn a_vcpu_that_never_exits_is_stopped() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bus = Arc::new(Bus::new());
    let told = Arc::new(RecordingHooks::default());
    let hooks: Arc<dyn Hooks> = told.clone();
    let mut threads = VcpuThreads::spawn(&[vec![], vec![]], &hooks).unwrap();
    for _ in 0..20 {
        let codes = [Code::default().spin(), Code::default().spin()];
        let machine = machine(&kvm, &codes, 0);
        let starts = machine.vcpus.into_iter().map(|fd| VcpuStart {
            fd,
            bus: bus.clone(),
        });
        threads.start(starts.collect()).unwrap();
        threads.stop();
        assert!(!threads.any_running());
    }
    let mut seen = told.threads.lock().unwrap().clone();
    seen.sort_unstable();
    assert!(matches!(seen[..], [(0, a), (1, b)] if a != b), "{seen:?}");
}

#[test]
fn a_thread_that_cannot_be_pinned_ends_the_start() {
    let hooks: Arc<dyn Hooks> = Arc::new(RecordingHooks::default());
    let error = VcpuThreads::spawn(&[vec![], vec![100_000]], &hooks)
        .err()
        .unwrap();
    assert!(format!("{error:#}").starts_with("can't pin vCPU 1 to CPUs [100000]"));
}

#[test]
fn threads_are_pinned_before_they_are_told_of() {
    let allowed = |tid: i32| {
        let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
        proc_field(&status, "Cpus_allowed_list").unwrap().to_owned()
    };
    let told = Arc::new(RecordingHooks::default());
    let hooks: Arc<dyn Hooks> = told.clone();
    let pins = [vec![0], vec![]];
    let threads = VcpuThreads::spawn(&pins, &hooks).unwrap();
    let seen = told.threads.lock().unwrap().clone();
    assert_eq!(allowed(seen[0].1), "0");
    let own = allowed(i32::try_from(std::process::id()).unwrap());
    assert_eq!(allowed(seen[1].1), own);
    drop(threads);
}

#[test]
fn a_thread_that_dies_ends_the_start() {
    let hooks: Arc<dyn Hooks> = Arc::new(RecordingHooks {
        dies: true,
        ..RecordingHooks::default()
    });
    let error = VcpuThreads::spawn(&[vec![]], &hooks).err().unwrap();
    assert_eq!(error.to_string(), "the thread of vCPU 0 died");
}

#[test]
fn code_that_kvm_cannot_run_ends_the_vcpu_with_a_reason() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bus = Arc::new(Bus::new());
    let mut machine = machine(&kvm, &[Code::default().halt()], 0);
    let mut sregs = machine.vcpus[0].get_sregs().unwrap();
    // Instructions from where neither memory nor a device is.
    sregs.cs.base = 0x2000_0000;
    machine.vcpus[0].set_sregs(&sregs).unwrap();
    let ends = run_to_end(&mut machine, &bus);
    assert!(matches!(&ends[..], [(0, VcpuEnd::Failed(_))]), "{ends:?}");
}

#[test]
fn a_guest_that_resets_starts_again_on_the_same_thread() {
    let Some(kvm) = kvm_or_skip() else { return };
    let bench = bench(1);
    let told = Arc::new(RecordingHooks::default());
    let request = |khz| Code::default().write(0x04, khz).read(0xf000, 0);
    let codes = vec![
        request(600_000).triple_fault(),
        request(1_200_000).triple_fault(),
        request(1_800_000).halt(),
    ];
    let report = supervised(
        &kvm,
        codes,
        &told,
        Some(cpufreq(&told, bench.region.clone(), None)),
    );
    assert_eq!(report.reason, ExitReason::PowerOff);
    assert_eq!(report.resets, 2);
    assert_eq!(told.resets.load(Ordering::Relaxed), 2);
    assert_eq!(told.threads.lock().unwrap().len(), 1);
    assert_eq!(bench.actuator.applied().len(), 3);
}

/// In a process of its own, for the files and threads of other tests.
#[test]
fn a_guest_that_only_resets_slows_down_and_costs_no_more_each_time() {
    const NAME: &str = "a_guest_that_only_resets_slows_down_and_costs_no_more_each_time";
    const ALONE: &str = "VCPUFREQ_TEST_ALONE";
    const RESETS: usize = 8;
    let Some(kvm) = kvm_or_skip() else { return };
    if std::env::var_os(ALONE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let alone = alone.args(["--exact", NAME]).env(ALONE, "1").output();
        let output = alone.unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        return assert!(output.status.success(), "{said}");
    }
    // What a reset may leave behind: open files and threads, counted at each.
    let costs: Arc<Mutex<Vec<[usize; 2]>>> = Arc::default();
    let counted = costs.clone();
    let told = Arc::new(RecordingHooks {
        also: Some(Box::new(move || {
            let open = ["fd", "task"].map(|what| {
                let entries = std::fs::read_dir(format!("/proc/self/{what}")).unwrap();
                entries.count()
            });
            counted.lock().unwrap().push(open);
        })),
        ..RecordingHooks::default()
    });
    let mut codes = vec![Code::default().triple_fault(); RESETS];
    codes.push(Code::default().halt());
    let started = std::time::Instant::now();
    let report = supervised(&kvm, codes, &told, None);
    assert_eq!(report.resets, u64::try_from(RESETS).unwrap());
    // Seven of them made it wait: 10 ms, 20 ms and so on.
    assert!(started.elapsed() >= 127 * Duration::from_millis(10));
    let costs = costs.lock().unwrap();
    assert!(costs.iter().all(|cost| *cost == costs[0]), "{costs:?}");
}
