// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `bpf` of a bridge: programs in the host's kernel answer the guest.
//!
//! Each vCPU's set_perf has an eventfd without a waiter: KVM completes the write, and the program
//! on its tracepoint carries out the request. The eventfds count the writes that KVM completed. If
//! a program missed one, the backend requests the vCPU's maximum until the next request.

mod events;
mod memory;
mod running;
mod scx;
mod setup;
pub mod summed;
mod times;
mod worker;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use anyhow::Context;
use vcpufreq_bridge::{
    Backend, BackendError, BridgeDevice, BridgeThread, Embedder, GuestFacts, KvmOffload,
    RunningBackend, SlotMemory,
};
use vcpufreq_device::{CounterSnapshot, DomainId, Histogram};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    BpfPages, HostBpf, HostModule, ScxError, ScxPins, VmConfig, WarningSink, probe as probe_host,
};
pub use memory::give_back_freed;
use setup::{by, open_module, pcpus, policies};

/// How the path `bpf` would work here, or why it doesn't.
///
/// # Errors
/// The text of what [`probe`](crate::probe()) finds missing, with what to do about it.
pub fn offer() -> Result<String, String> {
    probe_host(Path::new("/")).map_err(|error| error.to_string())?;
    let writes = match HostModule::is_loaded() {
        true => "requests by BPF and the module vcpufreq_host, in force before the guest goes on",
        false => {
            "requests by BPF and a worker, for the module vcpufreq_host isn't loaded (see \
             host-bpf/module/README.md)"
        }
    };
    Ok(format!("reads from memory that BPF keeps true; {writes}"))
}

/// The path `bpf`, as it is offered to a bridge.
#[derive(Clone, Debug, Default)]
pub struct BpfBackend {
    sum: bool,
    scx: bool,
}

impl BpfBackend {
    /// Whether the utilization of what else runs on a vCPU's pCPU is added to what the vCPU asks
    /// for: uclamp takes the maximum of the two. Never with `ClampMode::Exact`, and never above
    /// what the vCPU could ask for by itself. By default it is not.
    #[must_use]
    pub fn with_sum(self, sum: bool) -> Self {
        Self { sum, ..self }
    }

    /// With requests by the service `vcpufreq scx`; by clamps when that is gone.
    #[must_use]
    pub fn by_scx(self) -> Self {
        Self { scx: true, ..self }
    }
}

/// The path `bpf`, running.
struct BpfPath {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

/// Loses the path when the worker has died, or has never begun.
struct ReportPanic(Option<Arc<Shared>>);

impl ReportPanic {
    fn new(shared: &Arc<Shared>) -> Self {
        Self(Some(shared.clone()))
    }

    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for ReportPanic {
    fn drop(&mut self) {
        let lost = self.0.iter();
        lost.for_each(|shared| shared.lose("the thread that carries out requests has died"));
    }
}

struct Shared {
    host: Arc<HostBpf>,
    module: Option<HostModule>,
    scx: Option<Scx>,
    device: Arc<BridgeDevice>,
    embedder: Arc<dyn Embedder>,
    domains: Vec<DomainId>,
    /// Refusals of the module that have been reported, for each domain.
    refusals: Box<[AtomicU64]>,
    vcpus: Box<[WatchedVcpu]>,
    /// What KVM signals at each write, for each vCPU.
    signals: Box<[Arc<EventFd>]>,
    pcpus_of_vcpus: Vec<u32>,
    lost: Arc<EventFd>,
    why_lost: OnceLock<String>,
    stop: AtomicBool,
    /// Held while a clamp is put into force.
    applying: Mutex<()>,
}

/// The service's maps, for requests as targets of its scheduler.
#[derive(Debug)]
struct Scx {
    pins: ScxPins,
    /// It was seen to be gone.
    left: AtomicBool,
}

impl Scx {
    /// Those that the VM's programs have: the service may have been started again since it was
    /// found.
    fn open(host: &HostBpf) -> Result<Self, ScxError> {
        Ok(Self {
            pins: host.scx()?,
            left: AtomicBool::new(false),
        })
    }
}

/// A vCPU, as far as the programs don't know it, and the device doesn't count it.
#[derive(Default)]
struct WatchedVcpu {
    /// Index of its domain.
    domain: u32,
    /// How often KVM has signalled a write.
    signals: AtomicU64,
    /// Signals of writes that the programs have not seen.
    missed: AtomicU64,
    /// When that was found, in ns of CLOCK_MONOTONIC; 0: never.
    missed_at_ns: AtomicU64,
    tid: AtomicI32,
    /// Requests left to the worker whose event found no room, as far as was seen.
    dropped: AtomicU64,
    /// What the device's counters have of the programs'.
    synced: Mutex<CounterSnapshot>,
    /// Requests to be served that no program has reported.
    unserved: AtomicU64,
    /// Requests, reported or not, that the worker has served or found superseded.
    served: AtomicU64,
    /// From a request to its clamp, when the worker did it.
    clamp_after: Histogram,
}

impl Backend for BpfBackend {
    fn name(&self) -> &'static str {
        "bpf"
    }

    fn start(
        &self,
        device: &Arc<BridgeDevice>,
        guest: &GuestFacts,
    ) -> Result<(Box<dyn RunningBackend>, Option<KvmOffload>), BackendError> {
        let started = self.start_path(device, guest);
        let (path, offload) = started.map_err(|error| format!("{error:#}"))?;
        Ok((Box::new(path), Some(offload)))
    }
}

impl BpfBackend {
    /// Loads and attaches the programs, and starts the worker.
    fn start_path(
        &self,
        device: &Arc<BridgeDevice>,
        guest: &GuestFacts,
    ) -> anyhow::Result<(BpfPath, KvmOffload)> {
        let (domains, embedder) = (device.config().domains(), &guest.embedder);
        if self.scx {
            // Before anything is loaded.
            ScxPins::open()?;
        }
        let module = match self.scx {
            true => Ok(None),
            false => open_module(device, &domains),
        };
        let module = module.unwrap_or_else(|error| {
            embedder.warn(&format!(
                "the module vcpufreq_host can't be used ({error:#}): a worker carries out requests"
            ));
            None
        });
        let warnings = embedder.clone();
        let config = VmConfig {
            base: guest.base,
            vcpus: policies(device, &domains, by(device, self.scx, &module), self.sum),
            pcpus: pcpus(device.source()),
            warn: WarningSink::new(move |text| warnings.warn(text)),
        };
        let bpf = HostBpf::start(config, |pcpu| device.source().khz(pcpu))?;
        // libbpf had the types of the host's kernel in memory.
        give_back_freed();
        let scx = self.scx.then(|| Scx::open(&bpf)).transpose()?;
        let bpf = Arc::new(bpf);
        let worker = bpf.worker()?;
        if module.is_some() {
            device.actuator().forget();
        }
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let vcpus = device.config().vcpus.iter().map(|spec| {
            let domain = domains.partition_point(|id| *id < spec.domain);
            Ok(WatchedVcpu {
                domain: u32::try_from(domain)?,
                ..WatchedVcpu::default()
            })
        });
        let vcpus = vcpus.collect::<anyhow::Result<Box<[_]>>>()?;
        let signals = vcpus.iter().map(|_| Ok(Arc::new(event()?)));
        let signals = signals.collect::<anyhow::Result<Box<[_]>>>();
        let shared = Arc::new(Shared {
            host: bpf.clone(),
            module,
            scx,
            device: device.clone(),
            embedder: embedder.clone(),
            refusals: domains.iter().map(|_| AtomicU64::new(0)).collect(),
            domains,
            vcpus,
            signals: signals.context("can't make an eventfd for each vCPU")?,
            pcpus_of_vcpus: guest.pcpus_of_vcpus.clone(),
            lost: Arc::new(event().context("can't make an eventfd")?),
            why_lost: OnceLock::new(),
            stop: AtomicBool::new(false),
            applying: Mutex::default(),
        });
        let offload = shared.offload(guest);
        let working = shared.clone();
        let last_words = ReportPanic::new(&shared);
        let body = Box::new(move || working.work(&worker, last_words));
        let thread = embedder
            .spawn(BridgeThread::Requests, body)
            .context("can't start the thread that carries out requests")?;
        let path = BpfPath {
            shared,
            worker: Mutex::new(Some(thread)),
        };
        Ok((path, offload))
    }
}

impl SlotMemory for BpfPages {
    fn address(&self) -> u64 {
        self.0.pages().address.as_ptr().expose_provenance() as u64
    }

    fn size(&self) -> u64 {
        self.0.pages().len as u64
    }

    fn guest_writes(&self) -> bool {
        false
    }
}
