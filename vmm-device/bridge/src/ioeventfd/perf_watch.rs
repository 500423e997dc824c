// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Wakes the worker when a cur_perf may have changed: a vCPU's thread has come
//! to another pCPU (the perf software event cpu-migrations), or a pCPU to
//! another frequency (the tracepoint `power:cpu_frequency`). Needs CAP_PERFMON
//! and tracefs; without, the worker looks at its period only.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use vcpufreq_device::VcpuId;
use vcpufreq_host::{CpuList, HostRoot, Tid};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::perf::{PerfEvent, Whose, tracepoint_text};
use crate::embedder::Embedder;
use crate::error::{Context, PathError};
use crate::sync::unpoisoned;

const TRACEPOINT: &str = "power/cpu_frequency";

/// The data of its events in the worker's epoll set.
pub const CHANGED: u64 = u64::MAX - 1;

/// What is watched. It ends with this.
#[derive(Debug)]
pub struct PerfWatch {
    epoll: Arc<Epoll>,
    host: HostRoot,
    /// The pCPUs that count, and the events of those that are online.
    pcpus: Vec<u32>,
    frequencies: Mutex<BTreeMap<u32, PerfEvent>>,
    threads: Box<[Mutex<Option<PerfEvent>>]>,
    /// Makes KVM_RUN return, if the vCPUs are this process'.
    kick: Option<c_int>,
    embedder: Arc<dyn Embedder>,
}

impl PerfWatch {
    /// Watches the frequencies of `pcpus`, as far as they are online; `epoll` hears of it. A vCPU's
    /// thread gets the signal `kick`, if there is one, on another pCPU.
    ///
    /// # Errors
    /// [`PathError::Missing`] without tracefs; [`PathError::Refused`] when a pCPU can't be watched:
    /// `EACCES` or `EPERM` without CAP_PERFMON.
    pub fn watch(
        host: &HostRoot,
        epoll: &Arc<Epoll>,
        pcpus: Vec<u32>,
        (vcpus, kick, embedder): (u16, Option<c_int>, &Arc<dyn Embedder>),
    ) -> Result<Self, PathError> {
        tracepoint(host).context("the tracepoint power:cpu_frequency can't be read (tracefs)")?;
        let watch = Self {
            epoll: epoll.clone(),
            host: host.clone(),
            frequencies: Mutex::default(),
            threads: (0..vcpus).map(|_| Mutex::default()).collect(),
            pcpus,
            kick,
            embedder: embedder.clone(),
        };
        watch.follow(&watch.pcpus)?;
        Ok(watch)
    }

    /// Watches these pCPUs anew, which have come or gone: the kernel takes a pCPU's events away
    /// when it goes offline, and doesn't bring them back.
    ///
    /// # Errors
    /// [`PathError::Refused`] for the last one that can't be watched (`EACCES` or `EPERM` without
    /// CAP_PERFMON); the others are watched.
    pub fn follow(&self, changed: &[u32]) -> Result<(), PathError> {
        let mut all = Ok(());
        let mut frequencies = self.frequencies();
        for pcpu in changed.iter().filter(|pcpu| self.pcpus.contains(pcpu)) {
            frequencies.remove(pcpu);
            match self.frequency(*pcpu) {
                Ok(Some(event)) => drop(frequencies.insert(*pcpu, event)),
                Ok(None) => {}
                Err(error) => all = Err(error),
            }
        }
        all
    }

    /// The pCPUs that are watched now.
    pub fn watched(&self) -> Vec<u32> {
        self.frequencies().keys().copied().collect()
    }

    /// `None` while it is offline.
    fn frequency(&self, pcpu: u32) -> Result<Option<PerfEvent>, PathError> {
        let event = match self.embedder.frequency_event(&self.host, pcpu) {
            Ok(None) => frequency_event(&self.host, pcpu),
            Ok(Some(event)) => Ok(event),
            Err(error) => Err(error),
        };
        let event = match event.and_then(PerfEvent::of_file) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
            event => event.context("perf events aren't permitted (CAP_PERFMON)")?,
        };
        hear(&self.epoll, &event)?;
        Ok(Some(event))
    }

    fn frequencies(&self) -> MutexGuard<'_, BTreeMap<u32, PerfEvent>> {
        // A thread that panicked left each of them whole.
        unpoisoned(self.frequencies.lock())
    }

    /// Watches where the thread of `vcpu` runs. It gets a signal itself, if it is this process', so
    /// that KVM_RUN returns on the new pCPU before the guest goes on there.
    ///
    /// # Errors
    /// [`PathError::Refused`] with `EACCES` or `EPERM` (without CAP_PERFMON), `ESRCH` (the thread
    /// has ended), `EMFILE`, or `ENOSPC` of epoll_ctl(2). The thread isn't watched then: the worker
    /// looks at its period.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), PathError> {
        let event = PerfEvent::migrations(tid).context("migrations can't be watched")?;
        if let Some(kick) = self.kick {
            let signalled = event.signal(tid, kick);
            signalled.context("migrations can't be signalled")?;
        }
        hear(&self.epoll, &event)?;
        let slot = self.threads.get(vcpu.index());
        if let Some(mut slot) = slot.and_then(|slot| slot.lock().ok()) {
            // That of a thread before it ends.
            *slot = Some(event);
        }
        Ok(())
    }
}

/// An event that wakes its reader when pCPU `number` changes its frequency.
///
/// # Errors
/// As perf_event_open(2): `ENODEV` while it is offline, `EACCES` without CAP_PERFMON.
/// [`NotFound`](io::ErrorKind::NotFound) without tracefs.
pub fn frequency_event(host: &HostRoot, number: u32) -> io::Result<OwnedFd> {
    let id = tracepoint(host).ok_or(io::ErrorKind::NotFound)?;
    PerfEvent::waking(id, Whose::Pcpu(number))
}

/// The tracepoint's number.
fn tracepoint(host: &HostRoot) -> Option<u64> {
    tracepoint_text(host, TRACEPOINT, "id")?.parse().ok()
}

fn hear(epoll: &Epoll, event: &PerfEvent) -> Result<(), PathError> {
    let when = EpollEvent::new(EventSet::IN, CHANGED);
    epoll
        .ctl(ControlOperation::Add, event.fd(), when)
        .context("can't watch a perf event")
}

/// How soon cur_perf is true again by `path`.
pub fn freshness(path: &str, perf_watch: Result<&PerfWatch, &PathError>) -> String {
    match perf_watch.map(PerfWatch::watched) {
        Ok(pcpus) if pcpus.is_empty() => {
            format!(
                "path {path}: cur_perf follows migrations; frequencies are looked after every 4 ms"
            )
        }
        Ok(pcpus) => format!(
            "path {path}: cur_perf follows migrations, and frequency changes on CPUs {}",
            pcpus.into_iter().collect::<CpuList>()
        ),
        Err(why) => {
            format!("path {path}: cur_perf is looked after every 4 ms or less often: {why}")
        }
    }
}
