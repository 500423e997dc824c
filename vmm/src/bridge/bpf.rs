// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `bpf` of a bridge: programs in the host's kernel answer the guest.
//!
//! Each vCPU's set_perf has an eventfd that nobody waits for: KVM finishes the
//! write, the program on its tracepoint does what is to be done. The eventfds
//! count what KVM finished, so that writes that the programs didn't see are
//! found: the highest frequency is asked for then, until the next request.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::Path as FilePath;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use vcpufreq_device::{
    ActuateError, Actuator, CounterSnapshot, Demand, DomainId, Event, Events, HISTOGRAM_BUCKETS,
    Histogram, HistogramSnapshot, Khz, PageMemory, Util, VcpuId,
    host::{self, HostActuator, Tid},
};
use vcpufreq_host_bpf::{
    self as host_bpf, ActuateBy, BpfPages, HostBpf, HostModule, Outcome, Pcpu, Target, Told,
    VcpuPolicy, VmConfig, Waiting, Worker,
};
use vmm_sys_util::eventfd::EventFd;

use super::{BpfPlan, BridgeDevice, Guest};
use crate::facts::{HostCpus, HostTree};
use crate::path::Path;
use crate::run::warn;
use crate::run_report::{Observer, add};
use crate::stats::VcpuStats;
use crate::sys;
use crate::vm::in_kernel::{Doorbell, InKernel, SlotMemory, Taken};
use crate::vm::layout::CPUFREQ_BASE;

/// How often to look for writes that the programs haven't seen.
const LOOK: Duration = Duration::from_millis(100);
/// So many looks in a row that find nothing but such writes: the programs are
/// gone.
const LOOKS_IN_VAIN: u32 = 2;

/// How the path `bpf` would work here, or why it doesn't.
///
/// # Errors
/// What is missing, and what to do about it.
pub fn offer(plan: &BpfPlan) -> Result<String, String> {
    host_bpf::probe(FilePath::new("/")).map_err(|error| error.to_string())?;
    if let Err(error) = File::open(&plan.object) {
        return Err(format!(
            "no BPF object at {} ({error}); build it (make -C host-bpf/bpf) and name it with \
             --bpf-object",
            plan.object.display()
        ));
    }
    let writes = match HostModule::is_loaded() {
        true => "requests by BPF and the module vcpufreq_host, in force before the guest goes on",
        false => {
            "requests by BPF and a worker, for the module vcpufreq_host isn't loaded (see \
             host-module/README.md)"
        }
    };
    Ok(format!("reads from memory that BPF keeps true; {writes}"))
}

/// The path `bpf`, running.
pub struct BpfPath {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    host: Arc<HostBpf>,
    module: Option<HostModule>,
    device: Arc<BridgeDevice>,
    observer: Arc<Observer>,
    domains: Vec<DomainId>,
    vcpus: Box<[Vcpu]>,
    pcpus_of_vcpus: Vec<u32>,
    lost: Arc<EventFd>,
    why_lost: OnceLock<String>,
    stop: AtomicBool,
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
    /// How many they had seen by then.
    seen_at_miss: AtomicU64,
    tid: AtomicI32,
    applied: AtomicU64,
    refused: AtomicU64,
    not_applicable: AtomicU64,
    /// From a request to its clamp, when the worker did it.
    clamp_after: Histogram,
}

impl BpfPath {
    /// Loads and attaches the programs, and starts the worker.
    ///
    /// # Errors
    /// What the host refused; then nothing of it is left.
    pub fn start(
        device: &Arc<BridgeDevice>,
        guest: &Guest,
        plan: &BpfPlan,
        observer: &Arc<Observer>,
    ) -> anyhow::Result<(Self, InKernel)> {
        let domains = device.config().domains();
        let module = open_module(device, &domains);
        let module = module.unwrap_or_else(|error| {
            warn(&format!(
                "the module vcpufreq_host can't be used ({error:#}): a worker carries out requests"
            ));
            None
        });
        let host = HostTree::default();
        let config = VmConfig {
            object: plan.object.clone(),
            base: CPUFREQ_BASE,
            vcpus: policies(device, &domains, module.is_some(), observer.writes_events()),
            pcpus: pcpus(&host),
            hypercalls: plan.hypercalls,
        };
        let bpf = HostBpf::start(config, |pcpu| khz_of(&host, pcpu))?;
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
            observer: observer.clone(),
            domains,
            vcpus: vcpus.context("can't make an eventfd for each vCPU")?,
            pcpus_of_vcpus: guest.pcpus_of_vcpus.clone(),
            lost: Arc::new(event().context("can't make an eventfd")?),
            why_lost: OnceLock::new(),
            stop: AtomicBool::new(false),
        });
        let in_kernel = shared.in_kernel(guest.taken.clone());
        let thread = Builder::new().name("requests".to_owned());
        let working = shared.clone();
        let thread = thread
            .spawn(move || working.work(&worker))
            .context("can't start the thread that carries out requests")?;
        let path = Self {
            shared,
            worker: Mutex::new(Some(thread)),
        };
        Ok((path, in_kernel))
    }

    /// The pages, as the device stores to them.
    pub fn memory(&self) -> Box<dyn PageMemory> {
        Box::new(BpfPages(self.shared.host.clone()))
    }

    /// Says that the calling thread runs `vcpu`.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn register_thread(&self, vcpu: VcpuId) -> anyhow::Result<()> {
        if let Some(known) = self.shared.vcpus.get(vcpu.index()) {
            known.tid.store(Tid::current().get(), Relaxed);
        }
        Ok(self.shared.host.register_thread(vcpu)?)
    }

    /// Takes the guest's requests back.
    pub fn reset(&self) {
        let shared = &self.shared;
        if let Err(error) = shared.host.reset() {
            warn(&format!(
                "the guest's requests can't be taken back: {error}"
            ));
        }
        for domain in shared.all_domains() {
            shared.settle(domain);
        }
    }

    /// Detaches the programs and hands the guest's requests over to the device,
    /// which gets all new ones by now; says why.
    pub fn hand_over(&self, device: &BridgeDevice) -> String {
        let shared = &self.shared;
        self.stop();
        shared.host.detach();
        shared.look();
        for domain in shared.all_domains() {
            if let Some((vcpu, khz)) = shared.newest(domain) {
                device.inherit(vcpu, khz);
            }
        }
        let why = shared.why_lost.get();
        why.map_or_else(|| "KVM refused its ioeventfds".to_owned(), String::clone)
    }

    /// Ends its thread.
    pub fn stop(&self) {
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
    }

    /// What was counted for a vCPU here, and not by the device.
    pub fn counters(&self, vcpu: VcpuId) -> CounterSnapshot {
        let shared = &self.shared;
        let by_programs = shared.host.counters(vcpu).unwrap_or_default();
        let Some(known) = shared.vcpus.get(vcpu.index()) else {
            return CounterSnapshot::default();
        };
        CounterSnapshot {
            requests: by_programs.requests,
            applied: by_programs.in_kernel + known.applied.load(Relaxed),
            unchanged: by_programs.unchanged,
            coalesced: by_programs.coalesced,
            limited: by_programs.limited,
            refused: by_programs.refused + known.refused.load(Relaxed),
            not_applicable: by_programs.not_applicable + known.not_applicable.load(Relaxed),
            ..CounterSnapshot::default()
        }
    }

    /// Adds what is known here of a vCPU.
    pub fn tell(&self, vcpu: VcpuId, stats: &mut VcpuStats) {
        let shared = &self.shared;
        let Some(known) = shared.vcpus.get(vcpu.index()) else {
            return;
        };
        let counters = self.counters(vcpu);
        let by_programs = shared.host.counters(vcpu).unwrap_or_default();
        stats.accesses.writes_in_kernel += counters.requests;
        let device = shared.device.counters(vcpu).unwrap_or_default();
        stats.counts = add(device, counters).into();
        if self.is_lost() {
            return;
        }
        stats.path = Path::Bpf;
        stats.asks_khz = shared.host.asked(known.domain).map(|khz| khz.0);
        stats.gets_khz = shared.host.cur_perf(vcpu).map_or(0, |khz| khz.0);
        let clamp = shared.host.wanted(known.domain).unwrap_or(Demand::NONE);
        stats.uclamp = (clamp.min.get(), clamp.max.get());
        let in_module = shared.module.as_ref();
        let in_module = in_module.and_then(|module| module.applied(known.domain).ok());
        stats.clamp_after = match in_module {
            Some(applied) => histogram(&applied.after_ns).into(),
            None => known.clamp_after.snapshot().into(),
        };
        stats.freq_after = histogram(&by_programs.freq_after).into();
    }

    fn is_lost(&self) -> bool {
        self.shared.stop.load(SeqCst)
    }
}

impl Vcpu {
    fn new(domain: u32, signal: Arc<EventFd>) -> Self {
        Self {
            domain,
            signal,
            signals: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            seen_at_miss: AtomicU64::new(u64::MAX),
            tid: AtomicI32::new(0),
            applied: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            not_applicable: AtomicU64::new(0),
            clamp_after: Histogram::default(),
        }
    }
}

/// What one look has found.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// Writes that the programs haven't seen.
    missed: u64,
    /// Writes that they had seen by then, since the start.
    seen: u64,
}

impl Shared {
    fn in_kernel(&self, taken: Arc<Taken>) -> InKernel {
        let bells = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let bells = bells.map(|(vcpu, known)| Doorbell {
            vcpu,
            khz: None,
            event: known.signal.clone(),
        });
        InKernel {
            pages: Arc::new(Shown(self.host.clone())),
            doorbells: bells.collect(),
            lost: self.lost.clone(),
            all_or_nothing: true,
            taken,
        }
    }

    fn all_domains(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.domains.len()).unwrap_or(u32::MAX)
    }

    /// The worker: what the programs leave to it, until it is stopped.
    fn work(&self, worker: &Worker) {
        // Best effort: without these it is a thread like any other.
        let _ = crate::vm::sys::stay_off(&self.pcpus_of_vcpus);
        let _ = host::clamp_current_thread_to_zero();
        let last_words = LastWords(self);
        match self.serve(worker) {
            Ok(()) => std::mem::forget(last_words),
            Err(error) => self.lose(error),
        }
    }

    fn serve(&self, worker: &Worker) -> Result<(), String> {
        let mut waiting: Vec<Waiting> = Vec::new();
        let (mut look_at, mut before, mut in_vain) = (0, Look::default(), 0);
        while !self.stop.load(SeqCst) {
            let now = sys::monotonic_ns();
            let due = waiting.iter().filter_map(|w| w.not_before_ns);
            let until = due.fold(look_at, u64::min).saturating_sub(now);
            let events = worker.wait(Duration::from_nanos(until));
            for event in events.map_err(|error| error.to_string())? {
                match event {
                    host_bpf::Event::Waiting(request) => waiting.push(request),
                    host_bpf::Event::Told(told) => self.told(&told),
                }
            }
            let now = sys::monotonic_ns();
            waiting.retain(|request| {
                let due = request.not_before_ns.is_none_or(|ns| ns <= now);
                if due {
                    self.serve_one(request);
                }
                !due
            });
            if now >= look_at {
                look_at = now + u64::try_from(LOOK.as_nanos()).unwrap_or(u64::MAX);
                let found = self.look();
                in_vain = match found.missed {
                    0 => in_vain,
                    _ if found.seen != before.seen => 0,
                    _ => in_vain + 1,
                };
                before = found;
            }
            if in_vain == LOOKS_IN_VAIN {
                return Err("its programs don't see the guest's requests any more".to_owned());
            }
        }
        Ok(())
    }

    fn lose(&self, why: impl Into<String>) {
        // The first reason is the one to tell.
        let _ = self.why_lost.set(why.into());
        self.stop.store(true, SeqCst);
        // A full counter is readable too.
        let _ = self.lost.write(1);
    }

    /// Looks for writes that KVM has finished and no program has seen, and asks
    /// for the highest in their place. Signals are counted first: each write is
    /// seen before it is signalled.
    fn look(&self) -> Look {
        let mut found = Look::default();
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            let news = known.signal.read().unwrap_or(0);
            let signals = known.signals.fetch_add(news, SeqCst) + news;
            let seen = self.host.seen(vcpu);
            found.seen += seen;
            let missed = signals.saturating_sub(seen);
            let news = missed.saturating_sub(known.missed.load(SeqCst));
            if news == 0 {
                continue;
            }
            found.missed += news;
            known.missed.store(missed, SeqCst);
            known.seen_at_miss.store(seen, SeqCst);
            let max = self.device.config().vcpus[vcpu.index()].table.max();
            self.host.assume(vcpu, max, seen);
            self.settle(known.domain);
        }
        found
    }

    /// What a domain's members asked for last; the maximum where that was not
    /// seen.
    fn newest(&self, domain: u32) -> Option<(VcpuId, Khz)> {
        let members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let members = members.filter(|(_, known)| known.domain == domain);
        let asked = members.filter_map(|(vcpu, known)| {
            let latest = self.host.latest(vcpu)?;
            let unseen = known.seen_at_miss.load(SeqCst) == self.host.seen(vcpu);
            if unseen {
                let max = self.device.config().vcpus[vcpu.index()].table.max();
                return Some((u64::MAX, (vcpu, max)));
            }
            (latest.khz != Khz(0)).then_some((latest.at_ns, (vcpu, latest.khz)))
        });
        asked.max_by_key(|(at, _)| *at).map(|(_, asked)| asked)
    }

    fn serve_one(&self, request: &Waiting) {
        let vcpu = request.vcpu;
        let apply = |domain, demand| self.apply(vcpu, domain, demand);
        if self.host.serve(request, apply)
            && let (Some(known), Some(latest)) =
                (self.vcpus.get(vcpu.index()), self.host.latest(vcpu))
        {
            let took = sys::monotonic_ns().saturating_sub(latest.at_ns);
            known.clamp_after.record(took);
        }
    }

    /// Puts what a domain wants into force, for its first vCPU.
    fn settle(&self, domain: u32) {
        let first = self.vcpus.iter().position(|known| known.domain == domain);
        let vcpu = first.and_then(|index| u16::try_from(index).ok());
        if let Some(vcpu) = vcpu.map(VcpuId) {
            self.host
                .settle(domain, |domain, demand| self.apply(vcpu, domain, demand));
        }
    }

    fn apply(&self, vcpu: VcpuId, domain: u32, demand: Demand) -> bool {
        let index = usize::try_from(domain).unwrap_or(usize::MAX);
        let (Some(&id), Some(known)) = (self.domains.get(index), self.vcpus.get(vcpu.index()))
        else {
            return false;
        };
        let applied = match &self.module {
            Some(module) => module
                .apply(domain, demand)
                .map_err(|error| refusal(id, error.raw_os_error())),
            None => self.device.actuator().apply(id, demand),
        };
        let (counter, event) = match applied {
            Ok(()) => (&known.applied, applied_event(vcpu, id, demand)),
            Err(ActuateError::NotApplicable { reason, .. }) => {
                (&known.not_applicable, not_applicable(vcpu, id, reason))
            }
            Err(error) => (&known.refused, refused(vcpu, id, demand, error)),
        };
        counter.fetch_add(1, Relaxed);
        self.observer.record(&event);
        applied.is_ok()
    }

    /// Passes a request that the programs tell of to the events file.
    fn told(&self, told: &Told) {
        let Told { vcpu, demand, .. } = *told;
        let index = usize::try_from(told.domain).unwrap_or(usize::MAX);
        let (Some(&domain), Some(known)) = (self.domains.get(index), self.vcpus.get(vcpu.index()))
        else {
            return;
        };
        let khz = told.khz;
        let request = Event::Request { vcpu, domain, khz };
        let outcome = match told.outcome {
            Outcome::InKernel => Some(applied_event(vcpu, domain, demand)),
            Outcome::Unchanged => Some(Event::Unchanged {
                vcpu,
                domain,
                demand,
            }),
            Outcome::Limited => Some(Event::Limited { vcpu, domain }),
            // The worker says what becomes of it.
            Outcome::LeftToWorker => None,
            Outcome::Refused => Some(refused(vcpu, domain, demand, refusal(domain, None))),
            Outcome::NotApplicable => Some(not_applicable(
                vcpu,
                domain,
                "clamps mean nothing to SCHED_DEADLINE",
            )),
        };
        let events = [Some(request), outcome];
        let events: Vec<_> = events.into_iter().flatten().collect();
        let tid = known.tid.load(Relaxed);
        self.observer.told(&events, told.at_ns, tid);
    }
}

/// Says so when the worker panics.
struct LastWords<'a>(&'a Shared);

impl Drop for LastWords<'_> {
    fn drop(&mut self) {
        self.0.lose("the thread that carries out requests has died");
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

fn applied_event(vcpu: VcpuId, domain: DomainId, demand: Demand) -> Event {
    Event::Applied {
        vcpu,
        domain,
        demand,
    }
}

fn not_applicable(vcpu: VcpuId, domain: DomainId, reason: &'static str) -> Event {
    Event::NotApplicable {
        vcpu,
        domain,
        reason,
    }
}

fn refused(vcpu: VcpuId, domain: DomainId, demand: Demand, error: ActuateError) -> Event {
    Event::Refused {
        vcpu,
        domain,
        demand,
        error,
    }
}

fn refusal(domain: DomainId, errno: Option<i32>) -> ActuateError {
    ActuateError::Refused {
        domain,
        call: "the clamp of the module vcpufreq_host",
        errno: errno.unwrap_or(0),
    }
}

/// The module, bound to all domains; `None` when it isn't loaded, or can't act
/// for these.
fn open_module(device: &BridgeDevice, domains: &[DomainId]) -> anyhow::Result<Option<HostModule>> {
    if !HostModule::is_loaded() {
        return Ok(None);
    }
    let specs = &device.config().vcpus;
    let module = HostModule::open(u16::try_from(specs.len())?, u16::try_from(domains.len())?)?;
    for (index, domain) in (0..).zip(domains) {
        match device.actuator() {
            HostActuator::Cgroup(groups) => {
                let group = groups.record().domain(*domain);
                let open = |name| OpenOptions::new().write(true).open(group.join(name));
                let (min, max) = (open("cpu.uclamp.min")?, open("cpu.uclamp.max")?);
                let (min, max) = (min.as_fd(), max.as_fd());
                module.bind(index, Target::Group { min, max })?;
            }
            // By the one that asks: of several vCPUs, the others stay as they are.
            HostActuator::Thread(_) => {
                if specs.iter().filter(|spec| spec.domain == *domain).count() > 1 {
                    return Ok(None);
                }
                module.bind(index, Target::Thread)?;
            }
        }
    }
    Ok(Some(module))
}

fn policies(
    device: &BridgeDevice,
    domains: &[DomainId],
    module: bool,
    tell: bool,
) -> Vec<VcpuPolicy> {
    let config = device.config();
    let policy = |spec: &vcpufreq_device::VcpuSpec| VcpuPolicy {
        spec: spec.clone(),
        domain: u32::try_from(domains.partition_point(|id| *id < spec.domain)).unwrap_or(u32::MAX),
        clamp: config.mode,
        headroom: config.headroom,
        report: config.report,
        actuate: match module {
            true => ActuateBy::Kfunc,
            false => ActuateBy::Worker,
        },
        limit: config.rate_limit,
        tell,
    };
    config.vcpus.iter().map(policy).collect()
}

/// The pCPUs whose frequency the host tells.
fn pcpus(host: &HostTree) -> Vec<Pcpu> {
    let cpus = HostCpus::read(host);
    let known = cpus.cpus.iter().filter_map(|cpu| {
        Some(Pcpu {
            number: cpu.id,
            capacity: Util::saturating(cpu.capacity_or_full().into()),
            khz_max: Khz(cpus.policy_of(cpu.id)?.top_khz()?),
        })
    });
    known.collect()
}

fn khz_of(host: &HostTree, pcpu: u32) -> Option<Khz> {
    let file = format!("sys/devices/system/cpu/cpu{pcpu}/cpufreq/scaling_cur_freq");
    host.number(file).map(Khz)
}

/// Bucket *n* of the kernel's side starts at 2^n ns.
fn histogram(buckets: &[u32]) -> HistogramSnapshot {
    let mut counts = [0; HISTOGRAM_BUCKETS];
    for (to, from) in counts[1..].iter_mut().zip(buckets) {
        *to = u64::from(*from);
    }
    HistogramSnapshot { counts }
}
