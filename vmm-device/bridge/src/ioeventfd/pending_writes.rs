// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The writes of a guest that KVM has finished and that wait for the worker, or for an access that
//! exits.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use vcpufreq_device::{Actuator, Device, Events, Source, VcpuId};

use super::domain_writes::DomainWrites;
use super::worker::RequestQueue;
use crate::sync::{AtomicBool, Mutex, MutexGuard, unpoisoned};

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

    /// The writes of a vCPU's domain, if any can wait. Waits for the thread that carries them out.
    pub(super) fn of_vcpu(&self, vcpu: VcpuId) -> Option<MutexGuard<'_, DomainWrites>> {
        self.locked((*self.of_vcpu.get(vcpu.index())?)?)
    }

    /// The writes of domain `index`. A thread that panicked with them left nothing undone that
    /// the next one wouldn't do.
    pub(super) fn locked(&self, index: usize) -> Option<MutexGuard<'_, DomainWrites>> {
        Some(unpoisoned(self.domains.get(index)?.lock()))
    }

    /// Carries out everything that waits.
    pub fn drain(&self, device: &Device<impl Actuator, impl Source, impl Events>) {
        for mut writes in (0..self.domains.len()).filter_map(|index| self.locked(index)) {
            self.drain_locked(&mut writes, device);
        }
    }

    /// A guest that writes all the time holds no other up: the rest is
    /// [`Self::finish`]ed later, for its last value may come without a signal.
    pub(super) fn drain_locked(
        &self,
        writes: &mut DomainWrites,
        device: &Device<impl Actuator, impl Source, impl Events>,
    ) {
        if !writes.drain(device) {
            self.unfinished.store(true, SeqCst);
        }
    }
}

impl<A: Actuator, S: Source, E: Events> RequestQueue<Device<A, S, E>> for PendingWrites {
    fn fds(&self) -> Vec<RawFd> {
        let domains = 0..self.domains.len();
        let fds = domains.filter_map(|index| Some(self.locked(index)?.fd()));
        fds.collect()
    }

    fn drain_one(&self, index: usize, device: &Device<A, S, E>) {
        if let Some(mut writes) = self.locked(index) {
            self.drain_locked(&mut writes, device);
        }
    }

    fn finish(&self, device: &Device<A, S, E>) -> bool {
        let was_unfinished = self.unfinished.swap(false, SeqCst);
        if was_unfinished {
            self.drain(device);
        }
        was_unfinished
    }

    fn is_unfinished(&self) -> bool {
        self.unfinished.load(SeqCst)
    }
}
