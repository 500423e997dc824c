// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's programs and maps, from start to end.

#![forbid(unsafe_code)]

mod clamps;
mod gone;
mod pcpus;

pub use clamps::Settled;
use gone::Gone;

use std::num::NonZeroU32;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use std::{fmt, io};

use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{Link, MapCore as _};
use vcpufreq_device::{Khz, PageMemory, Util, VcpuId};

use crate::error::BpfError;
use crate::event;
use crate::layout::{Counters, CpuEntry, DomainEntry, NO_CLAMP, PageEntry, VcpuEntry, VmEntry};
use crate::mapped::{Mapped, policy_bytes};
use crate::object::{Loaded, Sizes, refused};
use crate::policy::VcpuPolicy;
use crate::probe::probe;
use crate::worker::Worker;

/// Pages of 4 KiB in 64 KiB, the largest page of an arm64 host: slots are in host pages.
const PAGES_IN_SLOT: u32 = 16;

/// A pCPU of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pcpu {
    /// Its number.
    pub number: u32,
    /// Its `cpu_capacity`.
    pub capacity: Util,
    /// Its highest frequency.
    pub khz_max: Khz,
}

/// What a VM's programs start with.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// The object file.
    pub object: PathBuf,
    /// Guest address of the first register page.
    pub base: u64,
    /// The vCPUs, 1..=512; the index is the vCPU's number.
    pub vcpus: Vec<VcpuPolicy>,
    /// The pCPUs that are online and have a frequency; of others, [`HostBpf::set_pcpus`] tells.
    pub pcpus: Vec<Pcpu>,
    /// Gets a line when the kernel keeps programs or maps seconds after the end.
    pub warn: Warn,
}

/// Gets a line for the user.
#[derive(Clone)]
pub struct Warn(Arc<dyn Fn(&str) + Send + Sync>);

impl Warn {
    /// Calls `warn`.
    pub fn new(warn: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(warn))
    }
}

impl fmt::Debug for Warn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Warn")
    }
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
pub struct Latest {
    /// What was asked for, unchecked.
    pub khz: Khz,
    /// How many there have been, modulo 2^32.
    pub count: u32,
    /// When, in ns of CLOCK_MONOTONIC.
    pub at_ns: u64,
}

/// The pages as the device stores to them. cur_perf is the programs': what the device stores there
/// is overwritten with the next event.
#[derive(Clone, Debug)]
pub struct BpfPages(pub Arc<HostBpf>);

impl PageMemory for BpfPages {
    fn words(&self) -> &[AtomicU32] {
        self.0.pages.words()
    }
}

/// A VM's programs and maps. Dropping it detaches and frees all of them, as the end of the process
/// does, and waits until the kernel lists none of them.
#[derive(Debug)]
pub struct HostBpf {
    pages: Mapped<PageEntry>,
    vcpus: Mapped<VcpuEntry>,
    domains: Mapped<DomainEntry>,
    cpus: Mapped<CpuEntry>,
    vm: Mapped<VmEntry>,
    policies: RwLock<Vec<VcpuPolicy>>,
    /// When a request was last made in a guest's place, for each domain.
    assumed_ns: Box<[AtomicU64]>,
    sizes: Sizes,
    programs: Mutex<Programs>,
    // Last: dropped when all of the above is closed.
    gone: Gone,
}

#[derive(Debug)]
struct Programs {
    loaded: Loaded,
    generation: u32,
    /// Of the first object's stub, which calls whatever is in the slot.
    stub: Option<Link>,
    stub_id: Option<u32>,
}

impl HostBpf {
    /// Loads and attaches the programs. `khz` says what a pCPU runs at now, where that is known.
    ///
    /// # Errors
    /// What is missing, or refused; then nothing is left behind.
    pub fn start(config: VmConfig, khz: impl Fn(u32) -> Option<Khz>) -> Result<Self, BpfError> {
        probe(Path::new("/"))?;
        let sizes = sizes(&config)?;
        let loaded = Loaded::load(&config.object, sizes, 1, None)?;
        let gone = Gone::new(config.warn);
        let host = Self::new(loaded, (sizes, gone), config.vcpus)?;
        host.fill(config.base, &config.pcpus)?;
        {
            let mut programs = host.programs();
            programs.loaded.take_over()?;
            programs.loaded.attach(true)?;
            programs.stub_id = programs.loaded.stub_id();
            programs.stub = programs.loaded.take_stub_link();
        }
        host.look_up(&config.pcpus, khz);
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
            vm: mapped(&loaded, "vm", 1)?,
            policies: RwLock::new(vcpus),
            assumed_ns: (0..sizes.domains).map(|_| AtomicU64::new(0)).collect(),
            sizes,
            gone,
            programs: Mutex::new(Programs {
                stub: None,
                stub_id: None,
                loaded,
                generation: 1,
            }),
        })
    }

    /// What the programs need before they are attached.
    fn fill(&self, base: u64, pcpus: &[Pcpu]) -> Result<(), BpfError> {
        for vm in self.vm.all() {
            vm.base.store(base, Relaxed);
            vm.vcpus.store(self.sizes.vcpus, SeqCst);
        }
        for domain in self.domains.all() {
            domain.clamp.store(NO_CLAMP, SeqCst);
        }
        self.fill_pcpus(pcpus);
        let policies = self.policies.read().unwrap_or_else(PoisonError::into_inner);
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

    /// What cur_perf of a vCPU says; `None` when there is no such vCPU.
    #[must_use]
    pub fn cur_perf(&self, vcpu: VcpuId) -> Option<Khz> {
        let page = self.pages.get(vcpu.index())?;
        Some(Khz(page.registers[0].load(SeqCst)))
    }

    /// Stores the value of a register that isn't the programs', for the guest to read: all but
    /// cur_perf, at a byte offset below 4096.
    pub fn set_register(&self, vcpu: VcpuId, offset: usize, value: u32) {
        let page = self.pages.get(vcpu.index()).filter(|_| offset >= 4);
        if let Some(register) = page.and_then(|page| page.registers.get(offset / 4)) {
            register.store(value, SeqCst);
        }
    }

    /// Says that the calling thread runs `vcpu`. On return its page is true. Call it before the
    /// thread runs the guest.
    ///
    /// # Errors
    /// What the kernel said, or that there is no such vCPU.
    pub fn register_thread(&self, vcpu: VcpuId) -> Result<(), BpfError> {
        self.known(vcpu)?;
        self.programs().loaded.call("vcpufreq_register", vcpu.0)?;
        // The programs learn at its next switch where it is.
        std::thread::sleep(Duration::from_nanos(1));
        Ok(())
    }

    /// Changes how a vCPU's requests are answered from now on; its domain stays.
    ///
    /// # Errors
    /// What the kernel said, or that there is no such vCPU.
    pub fn set_policy(&self, vcpu: VcpuId, policy: VcpuPolicy) -> Result<(), BpfError> {
        self.known(vcpu)?;
        let mut policies = self
            .policies
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = policies.get_mut(vcpu.index()) {
            let policy = VcpuPolicy {
                domain: old.domain,
                ..policy
            };
            self.store_policy(vcpu.0, &policy)?;
            self.forget(policy.domain);
            *old = policy;
        }
        self.programs().loaded.call("vcpufreq_refresh", vcpu.0)
    }

    /// Puts another object's programs in the place of the running ones, on the same maps, while
    /// the guest runs: each write is handled by one of them. Which is told by its generation,
    /// which this returns.
    ///
    /// # Errors
    /// What is wrong with the object, or refused; then the old ones go on.
    pub fn replace(&self, object: &Path) -> Result<u32, BpfError> {
        let mut programs = self.programs();
        let generation = programs.generation + 1;
        let mut new = Loaded::load(object, self.sizes, generation, Some(&programs.loaded))?;
        new.attach(false)?;
        new.take_over()?;
        programs.generation = generation;
        programs.loaded = new;
        Ok(generation)
    }

    /// Detaches the programs for good. The pages stay, for whoever keeps them true from now on, and
    /// so do the counters.
    pub fn detach(&self) {
        let mut programs = self.programs();
        programs.stub = None;
        programs.loaded.detach();
    }

    /// Receives the events, each of which goes to one receiver: have one at a time.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn worker(&self) -> Result<Worker, BpfError> {
        Worker::new(&self.programs().loaded.map("events")?)
    }

    fn domain(&self, number: u32) -> Option<&DomainEntry> {
        self.domains.get(index(number))
    }

    /// The last request of a vCPU's register; `None` when there is no such vCPU.
    #[must_use]
    pub fn latest(&self, vcpu: VcpuId) -> Option<Latest> {
        let entry = self.vcpus.get(vcpu.index())?;
        let latest = entry.latest.load(SeqCst);
        let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        Some(Latest {
            khz: Khz(half(latest)),
            count: half(latest >> 32),
            at_ns: entry.latest_ns.load(SeqCst),
        })
    }

    /// How many writes of a vCPU's register the programs have seen; 0 when there is no
    /// such vCPU.
    #[must_use]
    pub fn seen(&self, vcpu: VcpuId) -> u64 {
        let entry = self.vcpus.get(vcpu.index());
        entry.map_or(0, |entry| entry.requests.load(SeqCst))
    }

    /// What was counted for a vCPU.
    #[must_use]
    pub fn counters(&self, vcpu: VcpuId) -> Option<Counters> {
        self.vcpus.get(vcpu.index()).map(VcpuEntry::counters)
    }

    /// Accesses to the padding behind the last page.
    #[must_use]
    pub fn out_of_range(&self) -> u64 {
        self.vm.get(0).map_or(0, |vm| vm.out_of_range.load(Relaxed))
    }

    /// Accesses of any VM that this VM's programs never saw: the kernel doesn't run a program that
    /// it has preempted on the same CPU. `None` when the kernel doesn't tell.
    #[must_use]
    pub fn missed(&self) -> Option<u64> {
        let programs = self.programs();
        let stub = programs.stub_id?;
        let mut all = ProgInfoIter::default();
        all.find(|program| program.id == stub)
            .map(|program| program.recursion_misses)
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
        self.cpus.get(usize::try_from(number).ok()?)
    }

    fn store_policy(&self, vcpu: u16, policy: &VcpuPolicy) -> Result<(), BpfError> {
        let programs = self.programs();
        let domains = self.domain_count();
        programs
            .loaded
            .store_in_new_map(
                "policies",
                vcpu.into(),
                policy_bytes(&policy.entry(domains)),
            )
            .map_err(refused("storing a policy"))
    }

    fn programs(&self) -> std::sync::MutexGuard<'_, Programs> {
        // Whoever panicked left them as they were.
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
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
    })
}

fn mapped<T: crate::mapped::Entry>(
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
