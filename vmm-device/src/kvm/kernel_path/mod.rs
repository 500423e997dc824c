// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `kernel`: reads of the vcpufreq registers from memory, writes of
//! set_perf finished by KVM, and one worker that does the rest.
//!
//! ```text
//! guest write ─▶ KVM: eventfd of (vCPU, value) ─▶ Inbox of the domain ─▶ Worker ─▶ device
//! guest write of another value ─▶ exit ─▶ KernelRegion: Inbox first, then the device
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

pub use domain_writes::{Inbox, Latest};
pub use mmio_trace::{Known, LastWrite, LastWrites, Recorder, Unknown};
pub use perf_watch::Changes;
pub use region::KernelRegion;
pub use worker::{Plan, Worker};

use std::fs;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::host::HostRoot;
use crate::{Actuator, Device, Events, Source, VcpuId, WriteReg};

/// What the kernel says of a tracepoint (`group/event`), if it can be read.
fn tracepoint_text(host: &HostRoot, tracepoint: &str, file: &str) -> Option<String> {
    let path = format!("sys/kernel/tracing/events/{tracepoint}/{file}");
    let text = fs::read_to_string(host.join(Path::new(&path))).ok()?;
    Some(text.trim().to_owned())
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

/// The inboxes of a guest, one for each domain.
pub struct Inboxes {
    /// One of them was left before all in it was seen.
    unfinished: AtomicBool,
    inboxes: Box<[Mutex<Inbox>]>,
    /// The inbox of each vCPU whose domain has one in which something can be.
    of_vcpu: Box<[Option<usize>]>,
}

impl Inboxes {
    /// `inboxes`, and which of them each vCPU's register belongs to.
    pub fn new(inboxes: Vec<Inbox>, of_vcpu: Vec<usize>) -> Arc<Self> {
        let used = |index: &usize| inboxes.get(*index).is_some_and(Inbox::can_be_used);
        let of_vcpu = of_vcpu.into_iter().map(|index| Some(index).filter(used));
        Arc::new(Self {
            of_vcpu: of_vcpu.collect(),
            unfinished: AtomicBool::new(false),
            inboxes: inboxes.into_iter().map(Mutex::new).collect(),
        })
    }

    /// The inbox of a vCPU's domain, if something can be in it. Waits for
    /// whoever carries its requests out.
    fn of(&self, vcpu: VcpuId) -> Option<MutexGuard<'_, Inbox>> {
        self.locked((*self.of_vcpu.get(vcpu.index())?)?)
    }

    /// Inbox `index`. A thread that panicked with it left nothing undone that
    /// the next one wouldn't do.
    fn locked(&self, index: usize) -> Option<MutexGuard<'_, Inbox>> {
        let inbox = self.inboxes.get(index)?.lock();
        Some(inbox.unwrap_or_else(PoisonError::into_inner))
    }

    fn fds(&self) -> impl Iterator<Item = RawFd> {
        (0..self.inboxes.len()).filter_map(|index| Some(self.locked(index)?.fd()))
    }

    /// Carries out everything that waits.
    pub fn drain(&self, device: &dyn Requests) {
        for index in 0..self.inboxes.len() {
            self.drain_one(index, device);
        }
    }

    /// Carries out what waits in inbox `index`.
    fn drain_one(&self, index: usize, device: &dyn Requests) {
        if let Some(mut inbox) = self.locked(index) {
            self.drain_locked(&mut inbox, device);
        }
    }

    /// A guest that writes all the time doesn't hold anybody up: the rest is
    /// [`Self::finish`]ed later, for its last value may come without a signal.
    fn drain_locked(&self, inbox: &mut Inbox, device: &dyn Requests) {
        if !inbox.drain(device) {
            self.unfinished.store(true, SeqCst);
        }
    }

    /// Goes on where an inbox was left.
    fn finish(&self, device: &dyn Requests) {
        if self.unfinished.swap(false, SeqCst) {
            self.drain(device);
        }
    }

    fn is_unfinished(&self) -> bool {
        self.unfinished.load(SeqCst)
    }
}
