// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `ioeventfd`: reads of the vcpufreq registers from memory, writes of
//! set_perf finished by KVM, and one worker that does the rest.
//!
//! ```text
//! guest write ─▶ KVM: eventfd of (vCPU, value) ─▶ DomainWrites of the domain ─▶ Worker ─▶ device
//! guest write of another value ─▶ exit ─▶ KernelRegion: DomainWrites first, then the device
//! guest read  ◀─ page ◀─ device ◀─ Worker: at a period, and when told of a change
//! ```
//!
//! Not here: KVM's side of it, which is `offload`.

mod domain_writes;
mod mmio_trace;
mod perf;
mod perf_watch;
mod refresh_timer;
mod region;
mod worker;

pub use domain_writes::{DomainWrites, Latest};
pub use mmio_trace::{Known, LastWrite, MmioTrace, Unknown, WriteOrder};
pub use perf_watch::PerfWatch;
pub use region::KernelRegion;
pub use worker::{Plan, Worker};

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::host::HostRoot;
use crate::{Actuator, Device, Events, Source, VcpuId, WriteReg};

/// What the kernel says of a tracepoint (`group/event`), if it can be read.
fn tracepoint_text(host: &HostRoot, tracepoint: &str, file: &str) -> Option<String> {
    let path = format!("sys/kernel/tracing/events/{tracepoint}/{file}");
    host.text(path)
}

/// What the worker does to the device.
pub trait Requests: Send + Sync {
    /// The guest asks for `khz` in the register of `vcpu`.
    fn request(&self, vcpu: VcpuId, khz: u32);
    /// The guest wrote what is requested of `vcpu` next at `at_ns`
    /// (CLOCK_MONOTONIC).
    fn written(&self, vcpu: VcpuId, at_ns: u64);
    /// KVM has finished so many writes to the set_perf of `vcpu`.
    fn finished(&self, vcpu: VcpuId, count: u64);
    /// So many requests of `vcpu` were overtaken by a newer one.
    fn coalesced(&self, vcpu: VcpuId, count: u64);
    /// Learns cur_perf of `vcpu` and shows it in its page.
    fn refresh(&self, vcpu: VcpuId);
}

impl<A: Actuator, S: Source, E: Events> Requests for Device<A, S, E> {
    fn request(&self, vcpu: VcpuId, khz: u32) {
        // An eventfd doesn't tell which vCPU has written.
        self.write(vcpu, WriteReg::SetPerf, khz);
    }

    fn written(&self, vcpu: VcpuId, at_ns: u64) {
        self.written_at(vcpu, at_ns);
    }

    fn finished(&self, vcpu: VcpuId, count: u64) {
        self.count_in_kernel(vcpu, count);
    }

    fn coalesced(&self, vcpu: VcpuId, count: u64) {
        self.count_coalesced(vcpu, count);
    }

    fn refresh(&self, vcpu: VcpuId) {
        self.refresh(vcpu);
    }
}

/// The writes of a guest that wait, of each domain.
pub struct PendingWrites {
    /// One of them was left before all in it was seen.
    unfinished: AtomicBool,
    domains: Box<[Mutex<DomainWrites>]>,
    /// The domain of each vCPU, by index, where something can wait.
    of_vcpu: Box<[Option<usize>]>,
}

impl PendingWrites {
    /// Of these domains, and which of them each vCPU's register belongs to.
    pub fn new(domains: Vec<DomainWrites>, of_vcpu: Vec<usize>) -> Arc<Self> {
        let used = |index: &usize| domains.get(*index).is_some_and(DomainWrites::can_be_used);
        let of_vcpu = of_vcpu.into_iter().map(|index| Some(index).filter(used));
        Arc::new(Self {
            of_vcpu: of_vcpu.collect(),
            unfinished: AtomicBool::new(false),
            domains: domains.into_iter().map(Mutex::new).collect(),
        })
    }

    /// The writes of a vCPU's domain, if any can wait. Waits for
    /// whoever carries its requests out.
    fn of(&self, vcpu: VcpuId) -> Option<MutexGuard<'_, DomainWrites>> {
        self.locked((*self.of_vcpu.get(vcpu.index())?)?)
    }

    /// The writes of domain `index`. A thread that panicked with them left nothing undone that
    /// the next one wouldn't do.
    fn locked(&self, index: usize) -> Option<MutexGuard<'_, DomainWrites>> {
        let writes = self.domains.get(index)?.lock();
        Some(writes.unwrap_or_else(PoisonError::into_inner))
    }

    fn fds(&self) -> impl Iterator<Item = RawFd> {
        (0..self.domains.len()).filter_map(|index| Some(self.locked(index)?.fd()))
    }

    /// Carries out everything that waits.
    pub fn drain(&self, device: &dyn Requests) {
        for index in 0..self.domains.len() {
            self.drain_one(index, device);
        }
    }

    /// Carries out what waits of domain `index`.
    fn drain_one(&self, index: usize, device: &dyn Requests) {
        if let Some(mut writes) = self.locked(index) {
            self.drain_locked(&mut writes, device);
        }
    }

    /// A guest that writes all the time doesn't hold anybody up: the rest is
    /// [`Self::finish`]ed later, for its last value may come without a signal.
    fn drain_locked(&self, writes: &mut DomainWrites, device: &dyn Requests) {
        if !writes.drain(device) {
            self.unfinished.store(true, SeqCst);
        }
    }

    /// Goes on where a domain was left.
    fn finish(&self, device: &dyn Requests) {
        if self.unfinished.swap(false, SeqCst) {
            self.drain(device);
        }
    }

    fn is_unfinished(&self) -> bool {
        self.unfinished.load(SeqCst)
    }
}
