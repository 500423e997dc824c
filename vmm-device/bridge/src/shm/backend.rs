// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The backend of shared memory: the device's pages are in it, and requests come by doorbells that
//! the virtual machine rings, of this process or of another one.

#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use vcpufreq_device::{Clamp, PageMemory, VcpuId};
use vcpufreq_host::Tid;
use vmm_sys_util::epoll::Epoll;
use vmm_sys_util::eventfd::EventFd;

use super::layout::{DOORBELL, ring};
use super::memory::SharedMemory;
use super::requests::{AllVcpus, LOOK_EVERY, ShmRequests};
use crate::bridge::{AccessPath, Backend, BridgeDevice, GuestFacts, RunningBackend, VcpuSnapshot};
use crate::embedder::Embedder;
use crate::error::BackendError;
use crate::ioeventfd::{PerfWatch, RunWatch, Worker, WorkerParts, freshness};
use crate::mmio_device::MmioDevice;
use crate::offload::{Doorbell, KvmOffload, OffloadState, SlotMemory};
use crate::sync::unpoisoned;

/// The name of the path with a memory of its own.
pub const SHM: &str = "shm";
/// The name of the path in the guest's RAM, or in the place of the registers.
pub const RAM: &str = "ram";

/// Serves a guest by shared memory, in another process or this one.
pub struct ShmBackend {
    memory: Arc<SharedMemory>,
    bells: Arc<[EventFd]>,
    all: AllVcpus,
    lost: Arc<OnceLock<Arc<EventFd>>>,
    look_every: Duration,
    /// KVM has a part of it: the guest is this process'.
    own_guest: bool,
}

impl ShmBackend {
    /// By `memory` and a doorbell for each vCPU; by memory in the guest's RAM without.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`: no more open files.
    pub fn new(memory: Arc<SharedMemory>, bells: Arc<[EventFd]>) -> io::Result<Self> {
        Ok(Self {
            memory,
            bells,
            all: AllVcpus::new()?,
            lost: Arc::default(),
            look_every: LOOK_EVERY,
            own_guest: false,
        })
    }

    /// For a guest of this process, which sees `memory` at the bridge's base. Behind memory with a
    /// header it sees the doorbell's page.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`: no more open files.
    pub fn of_own_guest(memory: Arc<SharedMemory>) -> io::Result<Self> {
        let bell = |_| EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let bells = (0..memory.vcpus()).filter(|_| memory.offset_in_ram().is_none());
        let bells: io::Result<Vec<_>> = bells.map(bell).collect();
        Ok(Self {
            own_guest: true,
            ..Self::new(memory, bells?.into())?
        })
    }

    /// The same, which looks so often for requests that no doorbell has announced; otherwise four
    /// times a second.
    #[must_use]
    pub fn looking_every(self, look_every: Duration) -> Self {
        Self { look_every, ..self }
    }

    /// What KVM is to do for a guest of this process.
    fn offload(&self, guest: &GuestFacts, lost: Arc<EventFd>) -> io::Result<KvmOffload> {
        let offset = self.memory.size() + DOORBELL;
        let bells = (0..).map(VcpuId).zip(self.bells.iter());
        let bells = bells.map(|(vcpu, bell)| {
            Ok(Doorbell {
                offset,
                value: Some(ring(vcpu)),
                event: Arc::new(bell.try_clone()?),
            })
        });
        Ok(KvmOffload {
            base: guest.base,
            pages: Some(self.memory.clone()),
            doorbells: bells.collect::<io::Result<_>>()?,
            lost,
            all_or_nothing: false,
            state: guest.state.clone(),
        })
    }

    /// What a server has the worker do for all vCPUs.
    #[must_use]
    pub fn all_vcpus(&self) -> AllVcpus {
        self.all.clone()
    }

    /// Once the backend has started, it has a file that is readable when no thread answers the
    /// doorbells any more.
    #[must_use]
    pub fn lost(&self) -> Arc<OnceLock<Arc<EventFd>>> {
        self.lost.clone()
    }
}

impl Backend for ShmBackend {
    fn name(&self) -> &'static str {
        match self.memory.offset_in_ram() {
            Some(_) => RAM,
            None => SHM,
        }
    }

    fn start(
        &self,
        device: &Arc<BridgeDevice>,
        guest: &GuestFacts,
    ) -> Result<(Box<dyn RunningBackend>, Option<KvmOffload>), BackendError> {
        let all = self.all.clone();
        let embedder = guest.embedder.clone();
        let requests = ShmRequests::new(self.memory.clone(), self.bells.clone(), all, embedder);
        let requests = Arc::new(requests.looking_every(self.look_every));
        let in_ram = self.memory.offset_in_ram().is_some();
        let run_watch = in_ram.then(|| Arc::new(RunWatch::new(self.memory.vcpus())));
        let worker = Worker::start(WorkerParts {
            requests: requests.clone(),
            device: device.clone(),
            vcpus: guest.threads.clone(),
            avoid: guest.pcpus_of_vcpus.clone(),
            embedder: guest.embedder.clone(),
            run_watch: run_watch.clone(),
        })?;
        // A backend is started once.
        let _ = self.lost.set(worker.lost());
        let offload = self.own_guest.then(|| self.offload(guest, worker.lost()));
        let offload = offload.transpose()?;
        let host = device.source().root();
        let (pcpus, vcpus) = (guest.watched_pcpus(host), self.memory.vcpus());
        let perf_watch = PerfWatch::watch(
            host,
            worker.epoll(),
            pcpus,
            (vcpus, guest.kick, &guest.embedder),
        );
        let embedder = &guest.embedder;
        embedder.explain(&freshness(self.name(), perf_watch.as_ref()));
        // To wake the worker, PREEMPT_RT runs a thread on the vCPU's pCPU (irq_work/N).
        let watches = guest.rt_pcpus.is_empty();
        if in_ram && !watches {
            let why = "a perf event would disturb the real-time vCPU";
            embedder.explain(&never_sleeps(self.name(), why));
        }
        let path = ShmPath {
            name: self.name(),
            memory: self.memory.clone(),
            requests,
            device: device.clone(),
            state: self.own_guest.then(|| guest.state.clone()),
            perf_watch: perf_watch.ok(),
            run_watch: run_watch
                .filter(|_| watches)
                .map(|watch| (watch, worker.epoll().clone())),
            worker: Mutex::new(Some(worker)),
            embedder: embedder.clone(),
        };
        Ok((Box::new(path), offload))
    }
}

fn never_sleeps(path: &str, why: &str) -> String {
    format!("path {path}: the worker reads every ms, also while no vCPU runs: {why}")
}

/// The path, running.
struct ShmPath {
    name: &'static str,
    memory: Arc<SharedMemory>,
    requests: Arc<ShmRequests>,
    device: Arc<BridgeDevice>,
    /// What KVM has of it, if the guest is this process'.
    state: Option<Arc<OffloadState>>,
    perf_watch: Option<PerfWatch>,
    /// Where no doorbell rings and no vCPU is real-time; and what wakes the worker.
    run_watch: Option<(Arc<RunWatch>, Arc<Epoll>)>,
    worker: Mutex<Option<Worker>>,
    embedder: Arc<dyn Embedder>,
}

impl RunningBackend for ShmPath {
    fn memory(&self) -> Box<dyn PageMemory> {
        Box::new(self.memory.clone())
    }

    fn region(&self, inner: Arc<dyn MmioDevice>) -> Arc<dyn MmioDevice> {
        inner
    }

    fn keeps_cur_perf(&self) -> bool {
        false
    }

    fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), BackendError> {
        let watched = self.perf_watch.as_ref();
        let watched = watched.map(|watch| watch.register_thread(vcpu, tid));
        if let Some(Err(why)) = watched {
            let why = freshness(self.name, Err(&why));
            self.embedder.warn(&format!("vCPU {vcpu}: {why}"));
        }
        if let Some((watch, epoll)) = &self.run_watch {
            let watched = watch.register_thread(epoll, vcpu, tid);
            watched.unwrap_or_else(|why| {
                let why = format!("perf events aren't permitted (CAP_PERFMON): {why}");
                self.embedder.explain(&never_sleeps(self.name, &why));
            });
        }
        Ok(())
    }

    fn follow_pcpus(&self, changed: &[u32]) -> Result<(), BackendError> {
        let followed = self.perf_watch.as_ref().map(|watch| watch.follow(changed));
        Ok(followed.transpose().map(drop)?)
    }

    /// The device applies requests.
    fn apply_again(&self, _: VcpuId) {}

    /// The device's.
    fn set_bounds(&self, _: VcpuId, _: Clamp) -> bool {
        false
    }

    /// All of it is this VM's.
    fn confine(&self) {}

    fn reset(&self) {
        self.requests.start_anew(self.device.config());
        self.device.show_all();
    }

    fn hand_over(&self) -> String {
        self.end();
        self.requests.drain(&self.device);
        "the thread that carries out requests has died".to_owned()
    }

    fn end(&self) {
        drop(unpoisoned(self.worker.lock()).take());
    }

    /// The device counts itself.
    fn sync_counters(&self) {}

    fn fill_snapshot(&self, _: VcpuId, snapshot: &mut VcpuSnapshot) {
        let of_kvm = |state: &Arc<OffloadState>| state.reads() || state.writes();
        if self.state.as_ref().is_none_or(of_kvm) {
            snapshot.path = AccessPath::Backend(self.name);
        }
    }

    fn decided_by(&self) -> Option<(String, [u64; 3])> {
        None
    }
}
