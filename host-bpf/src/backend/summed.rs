// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sums for a path whose requests reach no program, such as that of a VM in another process: the
//! programs look at what else runs on the vCPUs' pCPUs, and that is added to the device's clamps.
//!
//! ```text
//! request ─▶ path ─▶ device ─▶ HostActuator ─▶ LoadSums ─▶ cgroup
//! sched_switch ─▶ programs ─▶ event ─▶ thread ─▶ the same, with the newest request
//! ```

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use vcpufreq_bridge::{
    Backend, BackendError, BridgeDevice, BridgeThread, Embedder, GuestFacts, KvmOffload,
    MmioDevice, RunningBackend, VcpuSnapshot,
};
use vcpufreq_device::{Clamp, DomainId, PageMemory, VcpuId};
use vcpufreq_host::Tid;

use super::scx::{LOOK, TRIES};
use super::setup::{pcpus, policies};
use super::worker::SWEEP;
use super::{Scx, give_back_freed};
use crate::{ActuateBy, BpfEvent, HostBpf, ScxPins, VmConfig, WarningSink, WorkerEvents};

/// Until the thread sees that it is to end.
const END: Duration = Duration::from_millis(100);
/// Where no guest has a register: the programs on writes see none.
const NOWHERE: u64 = u64::MAX;

/// Another backend with the utilization of what else runs on a vCPU's pCPU in its clamps. Clamps of
/// domains without a cgroup stay as they are.
pub struct SummedBackend {
    inner: Box<dyn Backend>,
    scx: bool,
}

impl SummedBackend {
    /// For `inner`, whose requests the device carries out.
    #[must_use]
    pub fn new(inner: Box<dyn Backend>) -> Self {
        Self { inner, scx: false }
    }

    /// With requests by the service `vcpufreq scx`, which adds them up; by clamps when that is gone.
    #[must_use]
    pub fn by_scx(self) -> Self {
        Self { scx: true, ..self }
    }
}

impl Backend for SummedBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn start(
        &self,
        device: &Arc<BridgeDevice>,
        guest: &GuestFacts,
    ) -> Result<(Box<dyn RunningBackend>, Option<KvmOffload>), BackendError> {
        let sums =
            LoadSums::start(device, guest, self.scx).map_err(|error| format!("{error:#}"))?;
        let added = sums.clone();
        let sum = move |domain, clamp| added.added_to(domain, clamp);
        device.actuator().add_to_clamps(sum);
        let (inner, offload) = self.inner.start(device, guest)?;
        let thread = follow(&sums, device, guest);
        let thread = thread.map_err(|error| {
            inner.end();
            format!("{error:#}")
        })?;
        let path = SummedPath {
            inner,
            sums,
            device: device.clone(),
            thread: Mutex::new(Some(thread)),
        };
        Ok((Box::new(path), offload))
    }
}

/// What is added.
#[derive(Debug)]
struct LoadSums {
    host: HostBpf,
    scx: Option<Scx>,
    domains: Vec<DomainId>,
    stop: AtomicBool,
}

impl LoadSums {
    fn start(
        device: &Arc<BridgeDevice>,
        guest: &GuestFacts,
        scx: bool,
    ) -> anyhow::Result<Arc<Self>> {
        if scx {
            // Before anything is loaded.
            ScxPins::open()?;
        }
        let by = match scx {
            true => ActuateBy::Scx,
            false => ActuateBy::Worker,
        };
        let domains = device.config().domains();
        let warnings = guest.embedder.clone();
        let config = VmConfig {
            base: NOWHERE,
            vcpus: policies(device, &domains, by, !scx),
            pcpus: pcpus(device.source()),
            warn: WarningSink::new(move |text| warnings.warn(text)),
        };
        let host = HostBpf::start(config, |pcpu| device.source().khz(pcpu))?;
        // libbpf had the types of the host's kernel in memory.
        give_back_freed();
        let scx = scx.then(|| Scx::open(&host)).transpose()?;
        Ok(Arc::new(Self {
            host,
            scx,
            domains,
            stop: AtomicBool::new(false),
        }))
    }

    /// What is to be in force where a domain asks for `clamp`.
    fn added_to(&self, domain: DomainId, clamp: Clamp) -> Clamp {
        let index = self.domains.binary_search(&domain).ok();
        let Some(index) = index.and_then(|index| u32::try_from(index).ok()) else {
            return clamp;
        };
        let clamp = self.host.want(index, clamp);
        match self.by_scx(index) {
            // Beside its target nothing would lower it.
            true => Clamp::NONE,
            false => clamp,
        }
    }

    fn scx_is_on(&self) -> bool {
        self.scx.as_ref().is_some_and(Scx::is_on)
    }

    /// Whether a domain has what it wants by the scheduler.
    fn by_scx(&self, domain: u32) -> bool {
        (0..TRIES).any(|_| self.scx_is_on() && self.host.ask_scx(domain).is_ok())
    }

    /// Has clamps follow the load beside the vCPUs, until it is stopped.
    fn work(&self, worker: &WorkerEvents, device: &BridgeDevice, embedder: &dyn Embedder) {
        let members = &device.config().vcpus;
        let apply = |id: &DomainId| {
            let first = members.iter().position(|member| member.domain == *id);
            let first = first.and_then(|at| u16::try_from(at).ok());
            first
                .into_iter()
                .for_each(|vcpu| device.apply_again(VcpuId(vcpu)));
        };
        let mut sweep_at = Instant::now() + SWEEP;
        while !self.stop.load(SeqCst) {
            let look = match self.scx_is_on() {
                true => LOOK,
                false => END,
            };
            let events = match worker.wait(look) {
                Ok(events) => events,
                Err(why) => {
                    embedder.warn(&format!("other load isn't followed any more: {why}"));
                    break;
                }
            };
            for event in events {
                let BpfEvent::Refresh(domain) = event else {
                    continue;
                };
                // In this order: a change behind it has an event of its own. To the device it is a
                // request, which it counts.
                self.host.begin_refresh(domain);
                let domain = usize::try_from(domain).unwrap_or(usize::MAX);
                self.domains.get(domain).into_iter().for_each(apply);
            }
            if self.scx.as_ref().is_some_and(|scx| scx.has_left(embedder)) {
                self.domains.iter().for_each(apply);
            }
            if Instant::now() >= sweep_at {
                self.host.sweep();
                sweep_at = Instant::now() + SWEEP;
            }
        }
    }
}

/// Starts the thread that waits for changes of the load.
fn follow(
    sums: &Arc<LoadSums>,
    device: &Arc<BridgeDevice>,
    guest: &GuestFacts,
) -> anyhow::Result<JoinHandle<()>> {
    let worker = sums.host.worker()?;
    let (sums, device, embedder) = (sums.clone(), device.clone(), guest.embedder.clone());
    let avoid = guest.pcpus_of_vcpus.clone();
    let body = Box::new(move || {
        // Best effort: without these it is a thread like any other.
        let _ = vcpufreq_host::stay_off(&avoid);
        let _ = vcpufreq_host::clamp_current_thread_to_zero();
        embedder.on_thread(BridgeThread::Requests);
        sums.work(&worker, &device, &*embedder);
    });
    guest
        .embedder
        .spawn(BridgeThread::Requests, body)
        .context("can't start the thread that follows other load")
}

/// The path, running.
struct SummedPath {
    inner: Box<dyn RunningBackend>,
    sums: Arc<LoadSums>,
    device: Arc<BridgeDevice>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl SummedPath {
    fn stop(&self) {
        self.sums.stop.store(true, SeqCst);
        // No panic is possible while it is held.
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        // A panic of that thread was reported when it happened.
        thread.into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl RunningBackend for SummedPath {
    fn memory(&self) -> Box<dyn PageMemory> {
        self.inner.memory()
    }

    fn region(&self, inner: Arc<dyn MmioDevice>) -> Arc<dyn MmioDevice> {
        self.inner.region(inner)
    }

    fn keeps_cur_perf(&self) -> bool {
        self.inner.keeps_cur_perf()
    }

    fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), BackendError> {
        self.inner.register_thread(vcpu, tid)?;
        Ok(self.sums.host.register_other_thread(vcpu, tid)?)
    }

    fn follow_pcpus(&self, changed: &[u32]) -> Result<(), BackendError> {
        self.inner.follow_pcpus(changed)?;
        let source = self.device.source();
        let khz = |pcpu| source.khz(pcpu);
        Ok(self.sums.host.set_pcpus(&pcpus(source), khz)?)
    }

    fn confine(&self) {
        self.inner.confine();
        self.sums.host.confine();
    }

    fn reset(&self) {
        self.inner.reset();
    }

    fn apply_again(&self, vcpu: VcpuId) {
        self.inner.apply_again(vcpu);
    }

    fn set_bounds(&self, vcpu: VcpuId, bounds: Clamp) -> bool {
        self.inner.set_bounds(vcpu, bounds)
    }

    fn hand_over(&self) -> String {
        self.stop();
        self.inner.hand_over()
    }

    fn end(&self) {
        self.stop();
        self.inner.end();
    }

    fn sync_counters(&self) {
        self.inner.sync_counters();
    }

    fn fill_snapshot(&self, vcpu: VcpuId, snapshot: &mut VcpuSnapshot) {
        self.inner.fill_snapshot(vcpu, snapshot);
        let sums = &self.sums;
        snapshot.load = sums.host.load(vcpu);
        let pcpu = snapshot.pcpu.filter(|_| sums.scx_is_on());
        snapshot.target = pcpu.and_then(|(pcpu, _)| sums.host.target(pcpu));
    }

    fn decided_by(&self) -> Option<(String, [u64; 3])> {
        self.inner.decided_by()
    }
}
