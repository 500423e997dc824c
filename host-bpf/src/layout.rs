// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bpf/vcpufreq_bpf.h` in Rust: what is in the maps. The programs and the VMM use them at the
//! same time, so what changes is atomic.

#![forbid(unsafe_code)]
// Without the loader, half of this has no user.
#![cfg_attr(not(feature = "load"), allow(dead_code))]

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use vcpufreq_device::CounterSnapshot;

pub(crate) const LAYOUT: u32 = 14;
/// The folder on the BPF file system where `vcpufreq scx` pins its maps.
pub const PINS: &str = "/sys/fs/bpf/vcpufreq-scx";
pub(crate) const TABLE_MAX: usize = 64;
/// Bytes of an operator's policy's name.
pub(crate) const POLICY_NAME: usize = 32;
/// `VCPUFREQ_POLICY_LAYOUT` of `bpf/vcpufreq_policy.h`.
pub(crate) const POLICY_LAYOUT: u32 = 1;
/// Buckets of a histogram: number *n* counts what took from 2^n to 2^(n+1) − 1 ns.
pub const BUCKETS: usize = 32;
pub(crate) const NO_CLAMP: u32 = u32::MAX;

pub(crate) const CLAMP_FLOOR: u32 = 0;
pub(crate) const CLAMP_EXACT: u32 = 1;
pub(crate) const CLAMP_CEILINGS: u32 = 2;
pub(crate) const REPORT_EXACT: u32 = 0;
pub(crate) const REPORT_TABLE: u32 = 1;
pub(crate) const REPORT_REQUEST: u32 = 2;
pub(crate) const BY_WORKER: u32 = 0;
pub(crate) const BY_KFUNC: u32 = 1;
pub(crate) const NO_ACTUATOR: u32 = 2;
pub(crate) const BY_SCX: u32 = 3;
pub(crate) const APPLY: u32 = 0;
pub(crate) const DEFERRED: u32 = 1;
pub(crate) const HANDLED: u32 = 2;
pub(crate) const REFRESH: u32 = 3;
pub(crate) const FIRST_CEILING: u32 = 4;

/// `struct vcpufreq_bpf_cpu`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CpuEntry {
    pub capacity: AtomicU32,
    pub reference_khz: AtomicU32,
}

/// `VCPUFREQ_DISPATCH_LAYOUT` of `bpf/dispatch.h`.
pub(crate) const DISPATCH_LAYOUT: u32 = 3;

/// `struct vcpufreq_dispatch_cpu`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct DispatchCpuEntry {
    pub khz: AtomicU32,
    pub pad: [u32; 15],
}

/// `struct vcpufreq_dispatch_slots`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SlotsEntry {
    pub layout: AtomicU32,
    pub maps: [AtomicU32; 6],
    pub links: [AtomicU32; 3],
    pub programs: [AtomicU32; 3],
    pub pad: u32,
    pub owners: [AtomicU32; 1024],
}

/// `struct vcpufreq_bpf_policy`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PolicyEntry {
    pub perf_max_khz: u32,
    pub reference_khz: u32,
    pub capacity: u32,
    pub limit: u32,
    pub headroom_num: u32,
    pub headroom_den: u32,
    pub clamp: u32,
    pub visibility: u32,
    pub actuator: u32,
    pub domain: u32,
    pub interval_ns: u64,
    pub burst_ns: u64,
    pub vm_interval_ns: u64,
    pub vm_burst_ns: u64,
    pub table_len: u32,
    pub tell: u8,
    pub sum: u8,
    pub floor: u16,
    pub table_khz: [u32; TABLE_MAX],
}

/// `struct vcpufreq_bpf_vcpu`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct VcpuEntry {
    pub latest: AtomicU64,
    pub latest_ns: AtomicU64,
    pub due_ns: AtomicU64,
    pub moving_ns: AtomicU64,
    pub cpu: AtomicU32,
    pub deferred: AtomicU32,
    pub own_util: AtomicU32,
    pub others_util: AtomicU32,
    pub woken_ns: AtomicU64,
    pub slept: AtomicU64,
    pub counters: BpfCounters<AtomicU64, AtomicU32>,
}

/// `struct vcpufreq_bpf_domain`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct DomainEntry {
    pub clamp: AtomicU32,
    pub pending: AtomicU32,
    pub granted_khz: AtomicU32,
    pub refresh: AtomicU32,
    pub others: AtomicU64,
    pub refreshed_ns: AtomicU64,
    pub ceiling_until: AtomicU64,
    pub bounds: AtomicU32,
    pub decided_by: AtomicU32,
    pub decided_ns: AtomicU64,
}

/// `struct vcpufreq_bpf_vm`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct VmEntry {
    pub base: AtomicU64,
    pub vcpus: AtomicU32,
    pub slot: AtomicU32,
    pub policy: AtomicU32,
    pub ended: AtomicU32,
    pub pad: [u32; 10],
    pub due_ns: AtomicU64,
    pub policy_name: [AtomicU8; POLICY_NAME],
}

/// `struct vcpufreq_scx_control` of `bpf/scx.h`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ControlEntry {
    pub layout: AtomicU32,
    pub state: AtomicU32,
    pub vcpus: AtomicU32,
    pub exit_kind: AtomicU32,
    pub maps: [AtomicU32; 2],
    pub exit_text: [AtomicU8; 104],
}

/// A register page.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct PageEntry {
    pub registers: [AtomicU32; 1024],
}

/// Size of `struct vcpufreq_bpf_event`, bytes.
pub(crate) const EVENT_SIZE: usize = 40;
/// Size of `struct vcpufreq_policy_ask`, bytes; the answer follows it in a call.
pub(crate) const ASK_SIZE: usize = 64;
/// Size of `struct vcpufreq_policy_call`, bytes.
pub(crate) const POLICY_CALL_SIZE: usize = 80;
/// Size of `struct vcpufreq_bpf_call`, bytes.
pub(crate) const CALL_SIZE: usize = 8;

// Worked out by hand from the header; the loader compares them with the object's maps.
const _: () = {
    assert!(size_of::<CpuEntry>() == 8);
    assert!(size_of::<DispatchCpuEntry>() == 64);
    assert!(size_of::<SlotsEntry>() == 14 * 4 + 4096);
    assert!(size_of::<PolicyEntry>() == 336);
    assert!(size_of::<VcpuEntry>() == 64 + 17 * 8 + 128);
    assert!(size_of::<DomainEntry>() == 56);
    assert!(size_of::<VmEntry>() == 104);
    assert!(size_of::<PageEntry>() == 4096);
    assert!(size_of::<ControlEntry>() == 128);
};

/// What was counted for a vCPU's registers since the VM started; the programs count in atomic fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BpfCounters<T = u64, B = u32> {
    /// Writes of set_perf.
    pub requests: T,
    /// Reads that left the guest. None of cur_perf does from a memory slot.
    pub reads: T,
    /// Requests put into force by the kernel module.
    pub in_kernel: T,
    /// Events passed to the worker.
    pub to_worker: T,
    /// Requests that an event that was under way already stands for too.
    pub coalesced: T,
    /// Requests whose clamp was in force already.
    pub unchanged: T,
    /// Requests over the rate limit; the worker applies the last of them later.
    pub limited: T,
    /// Requests that the module could not put into force.
    pub refused: T,
    /// Requests that no clamp serves: SCHED_DEADLINE, or a host without uclamp.
    pub not_applicable: T,
    /// Requests for the worker whose event found no room in the ring; reports of other requests can
    /// fill it. The vCPU's newest request may still be pending.
    pub dropped: T,
    /// Requests that the VMM wanted reported, and for whose event there was no room.
    pub unreported: T,
    /// How often its thread came onto a pCPU.
    pub switches: T,
    /// Changes of frequency while it ran.
    pub frequencies: T,
    /// How often frequency and place changed so fast that cur_perf was left as it was.
    pub unsettled: T,
    /// How often an operator's policy was asked.
    pub asked: T,
    /// Of these, how often its answer was outside of the VM's limits.
    pub bounded: T,
    /// Of these, how often it didn't answer, and the built-in rule's clamp counted.
    pub silent: T,
    /// Histogram of the time from a request to the next change of the vCPU's frequency. Entry *n*
    /// counts times from 2^n ns to less than 2^(n+1) ns; the first also counts 0 ns, and the last
    /// all times from 2^31 ns (`bpf/vcpufreq_bpf.h`).
    pub freq_after: [B; BUCKETS],
}

impl BpfCounters {
    /// What became of the requests, in the library's terms.
    #[must_use]
    pub fn outcomes(&self) -> CounterSnapshot {
        CounterSnapshot {
            requests: self.requests,
            applied: self.in_kernel,
            unchanged: self.unchanged,
            coalesced: self.coalesced,
            limited: self.limited,
            refused: self.refused,
            not_applicable: self.not_applicable,
            ..CounterSnapshot::default()
        }
    }
}

impl BpfCounters {
    /// How often an operator's policy was asked, was bounded, and was silent.
    #[must_use]
    pub fn decisions(&self) -> [u64; 3] {
        [self.asked, self.bounded, self.silent]
    }
}

impl BpfCounters<AtomicU64, AtomicU32> {
    pub(crate) fn snapshot(&self) -> BpfCounters {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        BpfCounters {
            requests: get(&self.requests),
            reads: get(&self.reads),
            in_kernel: get(&self.in_kernel),
            to_worker: get(&self.to_worker),
            coalesced: get(&self.coalesced),
            unchanged: get(&self.unchanged),
            limited: get(&self.limited),
            refused: get(&self.refused),
            not_applicable: get(&self.not_applicable),
            dropped: get(&self.dropped),
            unreported: get(&self.unreported),
            switches: get(&self.switches),
            frequencies: get(&self.frequencies),
            unsettled: get(&self.unsettled),
            asked: get(&self.asked),
            bounded: get(&self.bounded),
            silent: get(&self.silent),
            freq_after: std::array::from_fn(|n| self.freq_after[n].load(Relaxed)),
        }
    }
}
