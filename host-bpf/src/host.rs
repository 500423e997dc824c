// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's programs and maps, from start to end.

#![forbid(unsafe_code)]

mod clamps;
mod decided;
mod gone;
mod pcpus;

use gone::Gone;
pub use gone::{WarningSink, sweep};

use std::io;
use std::num::NonZeroU32;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use libbpf_rs::MapCore as _;
use vcpufreq_device::{Clamp, Khz, PageMemory, SET_PERF_KHZ, Util, VcpuId};
use vcpufreq_host::Tid;

use crate::dispatch::Ids;
use crate::error::BpfError;
use crate::event;
use crate::layout::{
    BpfCounters, CpuEntry, DispatchCpuEntry, DomainEntry, NO_CLAMP, PageEntry, VcpuEntry, VmEntry,
};
use crate::libbpf_log::refused;
use crate::mapped::{Mapped, policy_bytes};
use crate::object::{Loaded, Sizes};
use crate::policy::{ActuateBy, VcpuPolicy};
use crate::probe::probe;
use crate::sync::unpoisoned;
use crate::worker::WorkerEvents;

/// Pages of 4 KiB in 64 KiB, the largest page of an arm64 host: slots are in host pages.
const PAGES_IN_SLOT: u32 = 16;

/// How often a thread that can't be registered is tried again.
const RETRIES: u32 = 10;

/// A pCPU of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcpuFacts {
    /// Its number.
    pub number: u32,
    /// Its `cpu_capacity`.
    pub capacity: Util,
    /// The frequency that it refers to.
    pub reference: Khz,
}

/// What a VM's programs start with.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Guest address of the first register page.
    pub base: u64,
    /// The vCPUs, 1..=512; the index is the vCPU's number.
    pub vcpus: Vec<VcpuPolicy>,
    /// The pCPUs that are online and have a frequency; [`HostBpf::set_pcpus`] adds others.
    pub pcpus: Vec<PcpuFacts>,
    /// Gets a line when the kernel keeps programs or maps seconds after the end.
    pub warn: WarningSink,
}

/// A VM's register pages: what a read-only memory slot shows its guest. Valid as long as the
/// [`HostBpf`] that they are of.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// Where they are in this process, on a page boundary; readable and writable.
    pub address: NonNull<u8>,
    /// Their length, a multiple of 64 KiB.
    pub len: usize,
}

/// The last request of a vCPU's register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatestRequest {
    /// The value written, unchecked.
    pub khz: Khz,
    /// How many there have been, modulo 2^32.
    pub count: u32,
    /// When, in ns of CLOCK_MONOTONIC.
    pub at_ns: u64,
}

/// The outcome of applying a domain's clamp: one, even if the guest has changed its request
/// meanwhile. `E` is the host's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApplyOutcome<E> {
    /// This is in force.
    InForce(Clamp),
    /// This could not be put into force: the next request tries again.
    Failed(Clamp, E),
    /// There was nothing to apply: the domain's clamp has been tried already.
    Nothing,
    /// This is in force, but the guest changes its request too fast to follow: apply again, after
    /// other domains had their turn.
    Changing(Clamp),
}

/// The pages as the device stores to them. cur_perf is the programs': what the device stores there
/// is overwritten with the next event.
#[derive(Clone, Debug)]
pub struct BpfPages(pub Arc<HostBpf>);

impl PageMemory for BpfPages {
    fn words(&self) -> &[AtomicU32] {
        self.0.pages.words()
    }

    fn stored(&self, _index: usize) {}
}

/// A VM's programs and maps. Dropping it detaches and frees all of them, as the end of the process
/// does, and waits until the kernel lists none of them.
#[derive(Debug)]
pub struct HostBpf {
    pages: Mapped<PageEntry>,
    vcpus: Mapped<VcpuEntry>,
    domains: Mapped<DomainEntry>,
    cpus: Mapped<CpuEntry>,
    /// Of all VMs.
    now: Mapped<DispatchCpuEntry>,
    vm: Mapped<VmEntry>,
    policies: RwLock<Vec<VcpuPolicy>>,
    /// When a request was last made in a guest's place, for each domain.
    assumed_ns: Box<[AtomicU64]>,
    sizes: Sizes,
    programs: Mutex<Loaded>,
    // Last: dropped when all of the above is closed.
    gone: Gone,
}

impl HostBpf {
    /// Loads and attaches the programs. `khz` gives what a pCPU runs at now, where that is known.
    ///
    /// # Errors
    /// As [`probe`]; [`BpfError::VcpuCount`], [`BpfError::TooManyVms`]; [`BpfError::Layout`] or
    /// [`BpfError::Hook`] for an object of another build; [`BpfError::Refused`] when kernel or
    /// libbpf refuses a map or program. Nothing is left behind then.
    pub fn start(config: VmConfig, khz: impl Fn(u32) -> Option<Khz>) -> Result<Self, BpfError> {
        probe(Path::new("/"))?;
        let sizes = sizes(&config)?;
        let loaded = Loaded::load(sizes)?;
        let gone = Gone::new(config.warn);
        let host = Self::new(loaded, (sizes, gone), config.vcpus)?;
        host.fill(config.base, &config.pcpus)?;
        host.programs().attach()?;
        // The others have had an event: another VM is there.
        let unknown = |pcpu: &PcpuFacts| host.frequency(pcpu.number) == Some(0);
        let pcpus: Vec<PcpuFacts> = config.pcpus.into_iter().filter(unknown).collect();
        host.look_up(&pcpus, khz);
        Ok(host)
    }

    fn new(
        loaded: Loaded,
        (sizes, gone): (Sizes, Gone),
        vcpus: Vec<VcpuPolicy>,
    ) -> Result<Self, BpfError> {
        Ok(Self {
            pages: mapped(&loaded, "pages", sizes.pages)?,
            vcpus: mapped(&loaded, "vcpus", sizes.vcpus)?,
            domains: mapped(&loaded, "domains", sizes.domains)?,
            cpus: mapped(&loaded, "cpus", sizes.cpus)?,
            now: mapped(&loaded, "dispatch_cpus", sizes.cpus)?,
            vm: mapped(&loaded, "vm", 1)?,
            policies: RwLock::new(vcpus),
            assumed_ns: (0..sizes.domains).map(|_| AtomicU64::new(0)).collect(),
            sizes,
            gone,
            programs: Mutex::new(loaded),
        })
    }

    /// What the programs need before they are attached.
    fn fill(&self, base: u64, pcpus: &[PcpuFacts]) -> Result<(), BpfError> {
        for vm in self.vm.all() {
            vm.base.store(base, Relaxed);
            let slot = self.programs().dispatcher().slot();
            vm.slot.store(slot.into(), Relaxed);
            vm.vcpus.store(self.sizes.vcpus, SeqCst);
        }
        for domain in self.domains.all() {
            domain.clamp.store(NO_CLAMP, SeqCst);
            domain.bounds.store(Clamp::NONE.bits(), SeqCst);
        }
        self.fill_pcpus(pcpus);
        let policies = unpoisoned(self.policies.read());
        for (id, policy) in (0..).zip(policies.iter()) {
            self.store_policy(id, policy)?;
            // As the contract has it: the maximum, until the frequency is known.
            if let Some(page) = self.pages.get(usize::from(id)) {
                page.registers[0].store(policy.spec.table.max().0, SeqCst);
            }
        }
        Ok(())
    }

    /// The register pages.
    #[must_use]
    pub fn pages(&self) -> Pages {
        Pages {
            address: self.pages.address(),
            len: self.pages.len(),
        }
    }

    /// The value of cur_perf of a vCPU; `None` when there is no such vCPU.
    #[must_use]
    pub fn cur_perf(&self, vcpu: VcpuId) -> Option<Khz> {
        let page = self.pages.get(vcpu.index())?;
        Some(Khz(page.registers[0].load(SeqCst)))
    }

    /// Registers the calling thread as that of `vcpu`. On return its page is true. Call it before
    /// the thread runs the guest.
    ///
    /// # Errors
    /// [`BpfError::NoVcpu`]; [`BpfError::Refused`] when the kernel has no storage for the thread
    /// (`ENOMEM`) in 11 tries, 1 ms apart. The vCPU's former thread is forgotten by then.
    pub fn register_thread(&self, vcpu: VcpuId) -> Result<(), BpfError> {
        self.register(vcpu, |programs| programs.call("vcpufreq_register", vcpu.0))?;
        // The programs learn at its next switch where it is.
        std::thread::sleep(Duration::from_nanos(1));
        Ok(())
    }

    /// Registers `tid`, a thread of any process, as that of `vcpu`. The programs learn at its next
    /// switch where it is.
    ///
    /// # Errors
    /// As [`Self::register_thread`]; `ESRCH` when there is no such thread.
    pub fn register_other_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), BpfError> {
        self.register(vcpu, |programs| {
            programs.call_for("vcpufreq_register_other", vcpu.0, tid.get())
        })
    }

    fn register(
        &self,
        vcpu: VcpuId,
        register: impl Fn(&Loaded) -> Result<(), BpfError>,
    ) -> Result<(), BpfError> {
        self.known(vcpu)?;
        let register = || {
            let programs = self.programs();
            match programs.dispatcher().is_joined() {
                true => register(&programs),
                // Its slot may be another VM's.
                false => Ok(()),
            }
        };
        let mut registered = register();
        for _ in 0..RETRIES {
            if registered.is_ok() {
                break;
            }
            // Another process was preempted on this pCPU while it did the same.
            std::thread::sleep(Duration::from_millis(1));
            registered = register();
        }
        registered
    }

    /// Changes how a vCPU's requests are answered from now on; its domain stays. No vCPU runs.
    ///
    /// # Errors
    /// [`BpfError::NoVcpu`]; [`BpfError::Refused`] with `what` "storing a policy", when the old one
    /// stays, or "running a BPF program", when the new one counts and cur_perf waits for the next
    /// event.
    pub fn set_policy(&self, vcpu: VcpuId, policy: VcpuPolicy) -> Result<(), BpfError> {
        self.known(vcpu)?;
        let mut policies = unpoisoned(self.policies.write());
        if let Some(old) = policies.get_mut(vcpu.index()) {
            let policy = VcpuPolicy {
                domain: old.domain,
                ..policy
            };
            self.store_policy(vcpu.0, &policy)?;
            self.forget(policy.domain);
            *old = policy;
        }
        self.programs().call("vcpufreq_refresh", vcpu.0)
    }

    /// Detaches the programs for good. The pages stay, for another path to keep them true, and
    /// so do the counters. Other VMs sweep after each other without this one.
    pub fn detach(&self) {
        self.refuse_policies();
        let mut programs = self.programs();
        programs.detach();
        for (vcpu, _) in (0..=u16::MAX).zip(self.vcpus.all()) {
            // The thread may have ended.
            let _ = programs.call("vcpufreq_leave", vcpu);
        }
        programs.let_go();
    }

    /// Lets go of the memory that has the slots of all VMs, through which one could take another's.
    /// It writes no map from now on: a VMM that gives up its rights has `bpf` refused for that. The
    /// frequencies of pCPUs stay in memory: of one that comes online the programs hear from here. A
    /// VM that was confined doesn't sweep, registers no thread, and leaves its slot to
    /// [`sweep`](crate::sweep).
    pub fn confine(&self) {
        self.programs().confine();
    }

    /// Frees what VMMs that were killed have left of theirs. Each VMM looks at another one's: call
    /// it now and then.
    pub fn sweep(&self) {
        self.programs().dispatcher().sweep();
    }

    /// Receives the events, each of which goes to one receiver: have one at a time.
    ///
    /// # Errors
    /// [`BpfError::Refused`] when the ring can't be opened: `EMFILE` or `ENFILE` (no more open
    /// files), `ENOMEM`.
    pub fn worker(&self) -> Result<WorkerEvents, BpfError> {
        WorkerEvents::new(&self.programs().map("events")?)
    }

    fn domain(&self, number: u32) -> Option<&DomainEntry> {
        self.domains.get(index(number))
    }

    /// The last request of a vCPU's register; `None` when there is no such vCPU.
    #[must_use]
    pub fn latest(&self, vcpu: VcpuId) -> Option<LatestRequest> {
        let entry = self.vcpus.get(vcpu.index())?;
        let latest = entry.latest.load(SeqCst);
        let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        Some(LatestRequest {
            khz: Khz(half(latest) & SET_PERF_KHZ),
            count: half(latest >> 32),
            at_ns: entry.latest_ns.load(SeqCst),
        })
    }

    /// How many writes of a vCPU's register the programs have seen; 0 when there is no
    /// such vCPU.
    #[must_use]
    pub fn seen(&self, vcpu: VcpuId) -> u64 {
        let entry = self.vcpus.get(vcpu.index());
        entry.map_or(0, |entry| entry.counters.requests.load(SeqCst))
    }

    /// What was counted for a vCPU.
    #[must_use]
    pub fn counters(&self, vcpu: VcpuId) -> Option<BpfCounters> {
        let entry = self.vcpus.get(vcpu.index())?;
        Some(entry.counters.snapshot())
    }

    /// Accesses of any VM that this VM's programs never saw: the kernel doesn't run a program that
    /// it has preempted on the same CPU. `None` when the kernel doesn't report it.
    #[must_use]
    pub fn missed(&self) -> Option<u64> {
        self.programs().dispatcher().missed()
    }

    fn known(&self, vcpu: VcpuId) -> Result<(), BpfError> {
        if self.vcpus.get(vcpu.index()).is_some() {
            return Ok(());
        }
        Err(BpfError::NoVcpu {
            vcpu: vcpu.0,
            vcpus: self.vcpus.all().len(),
        })
    }

    fn domain_count(&self) -> NonZeroU32 {
        NonZeroU32::new(self.sizes.domains).unwrap_or(NonZeroU32::MIN)
    }

    fn cpu(&self, number: u32) -> Option<&CpuEntry> {
        self.cpus.get(index(number))
    }

    /// The frequency of the last event of a pCPU, kHz; 0: there was no event.
    fn frequency(&self, number: u32) -> Option<u32> {
        Some(self.now.get(index(number))?.khz.load(SeqCst))
    }

    fn store_policy(&self, vcpu: u16, policy: &VcpuPolicy) -> Result<(), BpfError> {
        let entry = policy.entry(self.domain_count());
        self.programs().store_policy(vcpu, policy_bytes(&entry))
    }

    fn programs(&self) -> std::sync::MutexGuard<'_, Loaded> {
        // A thread that panicked left them as they were.
        unpoisoned(self.programs.lock())
    }
}

impl Drop for HostBpf {
    fn drop(&mut self) {
        self.detach();
        let programs = self.programs();
        let (ids, hooks) = match self.has_policy() {
            false => (programs.ids(), programs.dispatcher().ids_of_last()),
            // The process that holds an operator's policy lets go of the rest after this one.
            true => (Ids::default(), Ids::default()),
        };
        drop(programs);
        self.gone.ids = ids;
        self.gone.hooks = hooks;
    }
}

fn sizes(config: &VmConfig) -> Result<Sizes, BpfError> {
    let count = config.vcpus.len();
    let wrong = || BpfError::VcpuCount(count);
    if count == 0 || count > vcpufreq_device::MAX_VCPUS {
        return Err(wrong());
    }
    let vcpus = u32::try_from(count).map_err(|_| wrong())?;
    let domains = config.vcpus.iter().map(|vcpu| vcpu.domain + 1).max();
    let domains = domains.unwrap_or(1);
    let possible = libbpf_rs::num_possible_cpus().map_err(refused("counting the pCPUs"))?;
    Ok(Sizes {
        cpus: u32::try_from(possible).unwrap_or(1),
        vcpus,
        pages: vcpus.next_multiple_of(PAGES_IN_SLOT),
        domains,
        events: event::room(&config.vcpus, domains),
        scx: config
            .vcpus
            .iter()
            .any(|vcpu| vcpu.actuate == ActuateBy::Scx),
    })
}

fn mapped<T: crate::mapped::MapEntry>(
    loaded: &Loaded,
    name: &'static str,
    entries: u32,
) -> Result<Mapped<T>, BpfError> {
    let failed = |error: io::Error| BpfError::Refused {
        what: "mapping the memory of the BPF programs",
        why: error.to_string(),
    };
    let map = loaded.map(name)?;
    let same = usize::try_from(map.value_size()).is_ok_and(|size| size == size_of::<T>());
    if !same {
        let error = io::Error::other(format!("{name} has entries of another size"));
        return Err(failed(error));
    }
    let entries = usize::try_from(entries).unwrap_or(usize::MAX);
    Mapped::new(map.as_fd(), entries).map_err(failed)
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
