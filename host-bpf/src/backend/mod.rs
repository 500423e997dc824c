// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `bpf` of a bridge: programs in the host's kernel answer the guest.
//!
//! Each vCPU's set_perf has an eventfd that nobody waits for: KVM finishes the
//! write, the program on its tracepoint does what is to be done. The eventfds
//! count what KVM finished, so that writes that the programs didn't see are
//! found: the highest frequency is asked for then, until the next request.

mod calls;
mod events;
mod memory;
mod setup;
mod worker;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};

use crate::{BpfPages, HostBpf, HostModule, VmConfig, Warn, Worker, probe as probe_host};
use anyhow::Context;
use vcpufreq_device::{
    CounterSnapshot, Demand, DomainId, HISTOGRAM_BUCKETS, Histogram, HistogramSnapshot, Khz,
    PageMemory, REG_CUR_PERF, REGION_STRIDE, VcpuId, host::Tid, host::monotonic_ns,
};
use vmm_sys_util::eventfd::EventFd;

use calls::Calls;
use setup::{open_module, pcpus, policies};
use vcpufreq_device::kvm::Diagnostics;
use vcpufreq_device::kvm::MmioDevice;
use vcpufreq_device::kvm::{
    AccessPath, Backend, BridgeDevice, Guest, RunningBackend, VcpuSnapshot,
};
use vcpufreq_device::kvm::{KvmOffload, SlotMemory};

/// How the path `bpf` would work here with the programs of `object`, or why it doesn't.
///
/// # Errors
/// What is missing, and what to do about it.
pub fn offer(object: &Path) -> Result<String, String> {
    probe_host(Path::new("/")).map_err(|error| error.to_string())?;
    if let Err(error) = File::open(object) {
        return Err(format!(
            "no BPF object at {} ({error}); build it (make -C host-bpf/bpf) and name it with \
             --bpf-object",
            object.display()
        ));
    }
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
#[derive(Clone, Debug)]
pub struct BpfBackend {
    object: PathBuf,
}

impl BpfBackend {
    /// With the programs of this object file.
    #[must_use]
    pub fn new(object: PathBuf) -> Self {
        Self { object }
    }
}

/// The path `bpf`, running.
struct BpfPath {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
    /// Once this is lost, and while the guest that then ran has hypercalls.
    calls: Mutex<Option<Calls>>,
}

struct Shared {
    host: Arc<HostBpf>,
    module: Option<HostModule>,
    device: Arc<BridgeDevice>,
    diagnostics: Arc<dyn Diagnostics>,
    hypercalls: bool,
    domains: Vec<DomainId>,
    /// What the module could not put into force, as far as it was told, for
    /// each domain.
    refusals: Box<[AtomicU64]>,
    vcpus: Box<[Vcpu]>,
    pcpus_of_vcpus: Vec<u32>,
    lost: Arc<EventFd>,
    why_lost: OnceLock<String>,
    stop: AtomicBool,
    /// Held while a clamp is put into force.
    applying: Mutex<()>,
}

/// A vCPU, as far as the programs don't know it.
struct Vcpu {
    /// Index of its domain.
    domain: u32,
    /// What KVM signals at each write.
    signal: Arc<EventFd>,
    signals: AtomicU64,
    /// Signals of writes that the programs have not seen.
    missed: AtomicU64,
    /// When that was found, in ns of CLOCK_MONOTONIC; 0: never.
    missed_at_ns: AtomicU64,
    tid: AtomicI32,
    applied: AtomicU64,
    refused: AtomicU64,
    not_applicable: AtomicU64,
    superseded: AtomicU64,
    /// Requests that another one of those found at the same time stands for.
    coalesced: AtomicU64,
    /// Requests that count as put into force, by the program or the worker, and that
    /// the module could not put into force when its turn came.
    failed: AtomicU64,
    /// Requests left to the worker whose event found no room, as far as was seen.
    dropped: AtomicU64,
    /// The same of requests that were to be told.
    untold: AtomicU64,
    /// Requests that the programs have counted, and the device has too.
    passed_on: AtomicU64,
    /// Requests of its domain that a reset has taken back, each of which is one itself.
    taken_back: AtomicU64,
    /// Requests that no program has seen, found later.
    found: AtomicU64,
    /// Requests to be served, of which no program has told.
    owed: AtomicU64,
    /// Of these and those that programs have told of: served, or found to be overtaken.
    served: AtomicU64,
    /// From a request to its clamp, when the worker did it.
    clamp_after: Histogram,
}

impl Backend for BpfBackend {
    fn name(&self) -> &'static str {
        "bpf"
    }

    /// Loads and attaches the programs, and starts the worker.
    fn start(
        &self,
        device: &Arc<BridgeDevice>,
        guest: &Guest,
        diagnostics: &Arc<dyn Diagnostics>,
    ) -> anyhow::Result<(Box<dyn RunningBackend>, KvmOffload)> {
        let domains = device.config().domains();
        let module = open_module(device, &domains);
        let module = module.unwrap_or_else(|error| {
            diagnostics.warn(&format!(
                "the module vcpufreq_host can't be used ({error:#}): a worker carries out requests"
            ));
            None
        });
        let warnings = diagnostics.clone();
        let config = VmConfig {
            object: self.object.clone(),
            base: guest.base,
            vcpus: policies(device, &domains, module.is_some()),
            pcpus: pcpus(device.source()),
            hypercalls: guest.hypercalls,
            warn: Warn::new(move |text| warnings.warn(text)),
        };
        let bpf = HostBpf::start(config, |pcpu| device.source().khz(pcpu))?;
        // libbpf had the types of the host's kernel in memory.
        memory::give_back_freed();
        let bpf = Arc::new(bpf);
        let worker = bpf.worker()?;
        if module.is_some() {
            device.actuator().forget();
        }
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let vcpus = device.config().vcpus.iter().map(|spec| {
            let domain = domains.partition_point(|id| *id < spec.domain);
            Ok(Vcpu::new(u32::try_from(domain)?, Arc::new(event()?)))
        });
        let vcpus = vcpus.collect::<anyhow::Result<Box<[_]>>>();
        let shared = Arc::new(Shared {
            host: bpf.clone(),
            module,
            device: device.clone(),
            diagnostics: diagnostics.clone(),
            hypercalls: guest.hypercalls,
            refusals: domains.iter().map(|_| AtomicU64::new(0)).collect(),
            domains,
            vcpus: vcpus.context("can't make an eventfd for each vCPU")?,
            pcpus_of_vcpus: guest.pcpus_of_vcpus.clone(),
            lost: Arc::new(event().context("can't make an eventfd")?),
            why_lost: OnceLock::new(),
            stop: AtomicBool::new(false),
            applying: Mutex::default(),
        });
        let offload = shared.offload(guest);
        let thread = Builder::new().name("requests".to_owned());
        let working = shared.clone();
        let thread = thread
            .spawn(move || working.work(&worker))
            .context("can't start the thread that carries out requests")?;
        let path = BpfPath {
            shared,
            worker: Mutex::new(Some(thread)),
            calls: Mutex::default(),
        };
        Ok((Box::new(path), offload))
    }
}

impl RunningBackend for BpfPath {
    fn memory(&self) -> Box<dyn PageMemory> {
        Box::new(BpfPages(self.shared.host.clone()))
    }

    /// The device for accesses that exit: `inner`, but cur_perf is the programs'.
    fn region(&self, inner: Arc<dyn MmioDevice>) -> Arc<dyn MmioDevice> {
        Arc::new(BpfRegion {
            inner,
            shared: self.shared.clone(),
        })
    }

    fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        if let Some(known) = self.shared.vcpus.get(vcpu.index()) {
            known.tid.store(tid.get(), Relaxed);
        }
        Ok(self.shared.host.register_thread(vcpu)?)
    }

    fn follow_pcpus(&self) -> anyhow::Result<()> {
        let source = self.shared.device.source();
        let khz = |pcpu| source.khz(pcpu);
        Ok(self.shared.host.set_pcpus(&pcpus(source), khz)?)
    }

    fn reset(&self) {
        let shared = &self.shared;
        // What the guest did before is no request of the one that starts.
        shared.count_missed(|_, known, _| {
            known.served.fetch_add(1, Relaxed);
            known.superseded.fetch_add(1, Relaxed);
        });
        if let Err(error) = shared.host.reset() {
            shared.diagnostics.warn(&format!(
                "the guest's requests can't be taken back: {error}"
            ));
        }
        for known in &shared.vcpus {
            known.missed_at_ns.store(0, SeqCst);
        }
        for domain in shared.all_domains() {
            let vcpu = shared.last_writer(domain);
            if let Some(known) = shared.vcpus.get(vcpu.index()) {
                known.taken_back.fetch_add(1, Relaxed);
            }
            shared.settle(vcpu, domain);
        }
    }

    /// Requests by hypercall, if there are any, the device gets from the one program that stays.
    fn hand_over(&self) -> (String, anyhow::Result<()>) {
        let shared = &self.shared;
        self.stop();
        let calls = match shared.hypercalls {
            true => self.take_calls(),
            false => {
                shared.host.detach();
                Ok(None)
            }
        };
        // The device may have new requests in force by now: nothing is assumed.
        shared.count_missed(|_, _, _| ());
        shared.count_left();
        for domain in shared.all_domains() {
            if let Some((vcpu, khz)) = shared.newest(domain) {
                shared.device.inherit(vcpu, khz);
            }
        }
        let calling = calls.and_then(|events| self.serve_calls(events));
        let why = shared.why_lost.get();
        let why = why.map_or_else(|| "KVM refused its ioeventfds".to_owned(), String::clone);
        (why, calling)
    }

    fn end_calls(&self) {
        let calls = self
            .calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(calls) = calls {
            self.shared.host.detach();
            calls.end();
        }
    }

    fn end(&self) {
        self.stop();
        self.shared.count_missed(|_, _, _| ());
        self.shared.count_left();
    }

    fn counters(&self, vcpu: VcpuId) -> CounterSnapshot {
        let shared = &self.shared;
        let by_programs = shared.host.counters(vcpu).unwrap_or_default();
        let Some(known) = shared.vcpus.get(vcpu.index()) else {
            return CounterSnapshot::default();
        };
        let failed = known.failed.load(Relaxed);
        let passed_on = known.passed_on.load(Relaxed);
        CounterSnapshot {
            requests: by_programs.requests.saturating_sub(passed_on)
                + known.taken_back.load(Relaxed)
                + known.found.load(Relaxed),
            applied: (by_programs.in_kernel + known.applied.load(Relaxed)).saturating_sub(failed),
            unchanged: by_programs.unchanged,
            superseded: known.superseded.load(Relaxed),
            coalesced: by_programs.coalesced + known.coalesced.load(Relaxed),
            limited: by_programs.limited,
            refused: by_programs.refused + failed + known.refused.load(Relaxed),
            not_applicable: by_programs.not_applicable.saturating_sub(passed_on)
                + known.not_applicable.load(Relaxed),
            ..CounterSnapshot::default()
        }
    }

    fn tell(&self, vcpu: VcpuId, snapshot: &mut VcpuSnapshot) {
        let shared = &self.shared;
        let Some(known) = shared.vcpus.get(vcpu.index()) else {
            return;
        };
        let counters = self.counters(vcpu);
        let by_programs = shared.host.counters(vcpu).unwrap_or_default();
        let taken_back = known.taken_back.load(Relaxed);
        snapshot.accesses.writes_in_kernel += counters.requests.saturating_sub(taken_back);
        let device = shared.device.counters(vcpu).unwrap_or_default();
        snapshot.counters = device + counters;
        if self.shared.stop.load(SeqCst) {
            // The path that took over says the rest.
            return;
        }
        snapshot.path = AccessPath::Backend("bpf");
        snapshot.asked = shared.host.asked(known.domain);
        snapshot.cur_perf = shared.host.cur_perf(vcpu).unwrap_or(Khz(0));
        snapshot.clamp = shared.host.wanted(known.domain).unwrap_or(Demand::NONE);
        let in_module = shared.module.as_ref();
        let in_module = in_module.and_then(|module| module.applied(known.domain).ok());
        snapshot.clamp_after = match in_module {
            Some(applied) => histogram(&applied.after_ns),
            None => known.clamp_after.snapshot(),
        };
        snapshot.freq_after = histogram(&by_programs.freq_after);
    }
}

impl BpfPath {
    /// Leaves hypercalls to the program that sees them; its events, and from when
    /// on they count: what is older the device inherits.
    fn take_calls(&self) -> anyhow::Result<Option<(Worker, u64)>> {
        let host = &self.shared.host;
        host.leave_calls()?;
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.shared.vcpus) {
            let untold = host.counters(vcpu).map_or(0, |counted| counted.untold);
            known.untold.store(untold, Relaxed);
        }
        Ok(Some((host.worker()?, monotonic_ns())))
    }

    fn serve_calls(&self, events: Option<(Worker, u64)>) -> anyhow::Result<()> {
        if let Some((worker, since_ns)) = events {
            let calls = Calls::start(&self.shared, worker, since_ns)?;
            *self.calls.lock().unwrap_or_else(PoisonError::into_inner) = Some(calls);
        }
        Ok(())
    }

    fn stop(&self) {
        self.end_calls();
        self.shared.stop.store(true, SeqCst);
        let thread = self
            .worker
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // A panic of that thread was reported when it happened.
            let _ = thread.join();
        }
        self.shared.look_at_module();
    }
}

impl Vcpu {
    fn new(domain: u32, signal: Arc<EventFd>) -> Self {
        Self {
            domain,
            signal,
            signals: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            missed_at_ns: AtomicU64::new(0),
            tid: AtomicI32::new(0),
            applied: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            not_applicable: AtomicU64::new(0),
            superseded: AtomicU64::new(0),
            coalesced: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            untold: AtomicU64::new(0),
            passed_on: AtomicU64::new(0),
            taken_back: AtomicU64::new(0),
            found: AtomicU64::new(0),
            owed: AtomicU64::new(0),
            served: AtomicU64::new(0),
            clamp_after: Histogram::default(),
        }
    }
}

/// The device on the bus as long as programs keep cur_perf: a hypercall that
/// asks for it exits, and `inner` knows neither requests nor frequencies.
struct BpfRegion {
    inner: Arc<dyn MmioDevice>,
    shared: Arc<Shared>,
}

impl MmioDevice for BpfRegion {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let vcpu = u16::try_from(offset / REGION_STRIDE).map(VcpuId).ok();
        let of_cur_perf = offset % REGION_STRIDE == REG_CUR_PERF && data.len() == 4;
        match vcpu.and_then(|vcpu| self.shared.host.cur_perf(vcpu)) {
            Some(khz) if of_cur_perf => {
                data.copy_from_slice(&khz.0.to_le_bytes());
                self.shared.device.count_exit(vcpu, false);
            }
            _ => self.inner.read(offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.inner.write(offset, data);
    }
}

/// The pages, as a slot shows them.
struct Shown(Arc<HostBpf>);

impl SlotMemory for Shown {
    fn address(&self) -> u64 {
        self.0.pages().address.expose_provenance().get() as u64
    }

    fn size(&self) -> u64 {
        self.0.pages().len as u64
    }
}

/// Bucket *n* of the kernel's side starts at 2^n ns.
fn histogram(buckets: &[u32]) -> HistogramSnapshot {
    let mut counts = [0; HISTOGRAM_BUCKETS];
    for (to, from) in counts[1..].iter_mut().zip(buckets) {
        *to = u64::from(*from);
    }
    HistogramSnapshot { counts }
}
