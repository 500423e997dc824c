// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A reader of a guest's RAM in the place of the server's: a program on the tracepoint kvm_exit looks at
//! a vCPU's request each time that the vCPU leaves its guest. It wakes a thread, which clamps the
//! vCPU's. The project has no such reader; `qemu-late` measures what it would be like.

use std::ffi::OsStr;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, RingBufferBuilder};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use vcpufreq_host::{SchedAttr, Tid};

use crate::harness::plan::{GuestDevice, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::Vm;

const OBJECT: &str = "/lab/bpf/stores.bpf.o";
const PROGRAM: &str = "read_store";
/// Has the kernel time programs.
const STATS: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// Where QEMU's `virt` has RAM.
const RAM: u64 = 0x4000_0000;
/// Until the thread sees that it is to end.
const END: Duration = Duration::from_millis(100);
/// Bytes of what the program has of a vCPU, and of what it tells.
const WATCHED: usize = 32;
const STORE: usize = 16;

/// A request that the program has seen, and that is in force.
#[derive(Clone, Copy)]
pub struct Carried {
    pub tid: i32,
    pub seen_us: u64,
    pub applied_us: u64,
}

/// The program and the thread. They end when it is dropped.
pub struct ExitReader {
    vcpus: MapHandle,
    carried: Arc<Mutex<Vec<Carried>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
    _link: Link,
    _object: Object,
}

impl ExitReader {
    /// For the vCPUs of a guest whose registers are in its RAM; vCPU n is on policy n.
    pub fn start(vm: &Vm, device: &GuestDevice) -> Result<Self> {
        sysfs::write(STATS, 1)?;
        let object = ObjectBuilder::default().open_file(OBJECT)?;
        let object = object.load().context(OBJECT)?;
        let [vcpus, stores] = ["vcpus", "stores"].map(|name| map(&object, name));
        let (vcpus, stores) = (vcpus?, stores?);
        let ram = mapped_ram(vm.pid())?;
        let mut of_tids = Vec::new();
        for (vcpu, policy) in Policy::all()?.into_iter().enumerate() {
            let tid = vm.vcpu_tid(vcpu)?;
            let address = ram + device.cur_perf(vcpu) + 4 - RAM;
            let mut watched = [0; WATCHED];
            watched[..8].copy_from_slice(&address.to_ne_bytes());
            vcpus.update(&tid.to_ne_bytes(), &watched, MapFlags::ANY)?;
            of_tids.push((tid, policy));
        }
        let (carried, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (into, until) = (Arc::clone(&carried), stop.clone());
        let thread = thread::spawn(move || carry_out(&stores, &of_tids, &into, &until));
        let program = object.progs_mut().next().context("no program")?;
        Ok(Self {
            vcpus,
            carried,
            stop,
            thread: Some(thread),
            _link: program.attach()?,
            _object: object,
        })
    }

    /// What it has carried out so far.
    pub fn carried(&self) -> Vec<Carried> {
        let carried = self.carried.lock();
        carried.map(|all| all.clone()).unwrap_or_default()
    }

    /// How often the program has looked, and how often it could not; its runs and their time.
    pub fn looks(&self) -> Result<ExitLooks> {
        let mut all = ExitLooks::default();
        for tid in self.vcpus.keys() {
            let watched = self.vcpus.lookup(&tid, MapFlags::ANY)?;
            let watched = watched.context("a vCPU has gone")?;
            all.looks += number(&watched, 8)?;
            all.failed += number(&watched, 16)?;
        }
        let mut programs = ProgInfoIter::default();
        let program = programs.find(|one| one.name == OsStr::new(PROGRAM));
        let program = program.context("no program")?;
        (all.runs, all.run_ns) = (program.run_cnt, program.run_time_ns);
        Ok(all)
    }
}

impl Drop for ExitReader {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // What it says is of a guest that has been measured.
        let _ = self.thread.take().map(JoinHandle::join);
        let _ = sysfs::write(STATS, 0);
    }
}

/// Counts of the program.
#[derive(Clone, Copy, Default)]
pub struct ExitLooks {
    looks: u64,
    failed: u64,
    runs: u64,
    run_ns: u64,
}

impl ExitLooks {
    /// What has come since `before`.
    pub fn since(self, before: Self) -> Value {
        let (runs, ns) = (self.runs - before.runs, self.run_ns - before.run_ns);
        json!({
            "looks": self.looks - before.looks, "failed": self.failed - before.failed,
            "runs": runs, "ns_each": ns.checked_div(runs),
        })
    }
}

fn map(object: &Object, name: &str) -> Result<MapHandle> {
    let mut maps = object.maps();
    let found = maps.find(|map| map.name() == OsStr::new(name));
    Ok(MapHandle::try_from(&found.context("no such map")?)?)
}

fn number(bytes: &[u8], at: usize) -> Result<u64> {
    let bytes = bytes.get(at..at + 8).context("too short")?;
    Ok(u64::from_ne_bytes(bytes.try_into()?))
}

/// Where process `pid` has its guest's RAM: the largest memory that it shares.
fn mapped_ram(pid: u32) -> Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let shared = maps.lines().filter(|line| line.contains(" rw-s 00000000 "));
    let range = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).ok());
        Some((end? - start?, start?))
    };
    let largest = shared.filter_map(range).max();
    largest.map(|(_, start)| start).context("no shared RAM")
}

/// Clamps the threads of vCPUs as the program finds their requests, until it is to stop.
fn carry_out(
    stores: &MapHandle,
    vcpus: &[(i32, Policy)],
    carried: &Mutex<Vec<Carried>>,
    stop: &AtomicBool,
) -> Result<()> {
    // As the server's thread.
    let policies: Vec<_> = vcpus.iter().map(|(_, policy)| policy.clone()).collect();
    vcpufreq_host::stay_off(&first_cpus(&policies))?;
    vcpufreq_host::clamp_current_thread_to_zero()?;
    let mut ring = RingBufferBuilder::new();
    ring.add(stores, |bytes| {
        let one = clamp(bytes, vcpus);
        if let (Some(one), Ok(mut all)) = (one, carried.lock()) {
            all.push(one);
        }
        0
    })?;
    let ring = ring.build()?;
    while !stop.load(Relaxed) {
        ring.poll(END)?;
    }
    Ok(())
}

fn clamp(store: &[u8], vcpus: &[(i32, Policy)]) -> Option<Carried> {
    let store: &[u8; STORE] = store.try_into().ok()?;
    let number = |at: usize| Some(u32::from_ne_bytes(store[at..at + 4].try_into().ok()?));
    let tid = i32::try_from(number(8)?).ok()?;
    let (_, policy) = vcpus.iter().find(|(of, _)| *of == tid)?;
    let util = policy.util(number(12)?.min(policy.max()));
    SchedAttr::clamp(util, 1024).set(Tid::new(tid)?).ok()?;
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).ok()?);
    Some(Carried {
        tid,
        seen_us: u64::from_ne_bytes(store[..8].try_into().ok()?) / 1000,
        applied_us: u64::try_from(now.as_micros()).ok()?,
    })
}
