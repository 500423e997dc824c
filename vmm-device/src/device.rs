// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device: registers and rules. It knows no bus, no KVM and no host.
//!
//! ```text
//! set_perf ─▶ Domain (last write counts) ─▶ policy ─▶ Actuator
//! cur_perf ◀─ policy ◀─ Source
//! ```
//! All methods take `&self` and may be called from any number of threads. Nothing that a guest
//! does allocates, panics, or keeps more than the newest value.

#![forbid(unsafe_code)]

mod shown;

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use crate::config::{ConfigError, CurPerfVisibility, DeviceConfig, VcpuSpec};
use crate::counters::{Accesses, Counter, CounterSnapshot, Counters};
use crate::domain::{Domain, Request};
use crate::limit::{Bucket, Clock, Limit, Monotonic};
use crate::pages::RegisterPages;
use crate::policy::{self, Clamp};
use crate::ports::{ActuateError, Actuator, Event, Events, Source, SourceError};
use crate::regs::{FEATURE_ANY_CPU, ReadReg, WriteReg};
use crate::units::{DomainId, Khz, VcpuId};

/// A virtual cpufreq device of 1 to 512 vCPUs.
#[derive(Debug)]
pub struct Device<A, S, E> {
    pub(crate) config: DeviceConfig,
    pub(crate) vcpus: Box<[Vcpu]>,
    pub(crate) domains: Box<[Domain]>,
    /// Accesses to the padding behind the last page.
    outside: Counter,
    actuator: A,
    source: S,
    events: E,
    /// What a guest reads without an exit, once there is such memory.
    pub(crate) pages: OnceLock<RegisterPages>,
    clock: Time,
    limit: Option<Limit>,
}

/// The clock, which has no debug text.
struct Time(Box<dyn Clock>);

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ns", self.0.now_ns())
    }
}

/// Where a vCPU's domain stands at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainStatus {
    /// What the domain's newest request asks for; `None` when there is none.
    pub asked: Option<Khz>,
    /// What that request is to the host's scheduler.
    pub clamp: Clamp,
    /// What the vCPU was last told that it gets.
    pub cur_perf: Khz,
}

/// What a vCPU's page remembers. A cache line of its own, for vCPUs write it all the time.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Vcpu {
    /// perftbl_sel as written, in range or not.
    pub selected: AtomicU32,
    /// cur_perf as last learned, kHz; never 0.
    pub cur_perf: AtomicU32,
    domain: usize,
    /// Pays for the requests that this vCPU writes.
    bucket: Bucket,
    counters: Counters,
}

impl<A: Actuator, S: Source, E: Events> Device<A, S, E> {
    /// A device in its reset state: selection 0, cur_perf at the maximum until it is first
    /// learned, and no clamp on the host.
    ///
    /// # Errors
    /// The rule that `config` breaks.
    pub fn new(
        config: DeviceConfig,
        actuator: A,
        source: S,
        events: E,
    ) -> Result<Self, ConfigError> {
        config.check()?;
        let numbers = config.domains();
        let vcpus = config.vcpus.iter().map(|spec| Vcpu::new(spec, &numbers));
        Ok(Self {
            vcpus: vcpus.collect(),
            domains: numbers.iter().copied().map(Domain::new).collect(),
            limit: config
                .rate_limit
                .map(|limit| Limit::new(limit, numbers.len())),
            config,
            outside: Counter::default(),
            actuator,
            source,
            events,
            pages: OnceLock::new(),
            clock: Time(Box::new(Monotonic::default())),
        })
    }

    /// The same device with another clock for its limit.
    #[must_use]
    pub fn with_clock(self, clock: impl Clock + 'static) -> Self {
        let clock = Time(Box::new(clock));
        Self { clock, ..self }
    }

    /// What the device was made of.
    #[must_use]
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Where its clamps go.
    #[must_use]
    pub fn actuator(&self) -> &A {
        &self.actuator
    }

    /// What it has beyond the registers of the binding.
    pub(crate) fn features(&self) -> u32 {
        match self.actuator.serves_any_vcpu() {
            true => FEATURE_ANY_CPU,
            false => 0,
        }
    }

    /// Where its frequencies come from.
    #[must_use]
    pub fn source(&self) -> &S {
        &self.source
    }

    /// What is told of everything that happens.
    #[must_use]
    pub fn events(&self) -> &E {
        &self.events
    }

    /// Reads a register of `vcpu`; 0 when there is no such vCPU. May make one host call, for
    /// cur_perf.
    pub fn read(&self, vcpu: VcpuId, reg: ReadReg) -> u32 {
        let index = vcpu.index();
        let (Some(spec), Some(page)) = (self.config.vcpus.get(index), self.vcpus.get(index)) else {
            return 0;
        };
        match reg {
            ReadReg::CurPerf => self.cur_perf(vcpu, spec, page).0,
            ReadReg::PerftblLen => spec.table.register_len(),
            ReadReg::PerftblRd => spec
                .table
                .entry(page.selected.load(Relaxed))
                .map_or(0, |khz| khz.0),
            ReadReg::PerfDomain => spec.domain.0,
            ReadReg::Features => self.features(),
        }
    }

    /// Writes a register of `vcpu` for a writer that isn't known: [`Self::write_by`], where the
    /// limit charges the domain.
    pub fn write(&self, vcpu: VcpuId, reg: WriteReg, value: u32) {
        self.write_by(None, vcpu, reg, value);
    }

    /// Writes a register of `vcpu`, on behalf of the vCPU `by`, whose requests the limit counts;
    /// dropped when there is no such register. For set_perf, makes one host call when the domain's
    /// clamp changes, and a few more when other vCPUs ask for the same domain meanwhile.
    pub fn write_by(&self, by: Option<VcpuId>, vcpu: VcpuId, reg: WriteReg, value: u32) {
        let Some(page) = self.vcpus.get(vcpu.index()) else {
            return;
        };
        match reg {
            WriteReg::SetPerf => {
                let domain = &self.domains[page.domain];
                self.events.record(&Event::Request {
                    vcpu,
                    domain: domain.id(),
                    khz: Khz(value),
                });
                let khz = Khz(value);
                self.limited_request(domain, Request { vcpu, by, khz });
            }
            WriteReg::PerftblSel => {
                page.selected.store(value, Relaxed);
                self.show_selected(vcpu);
            }
        }
    }

    /// Counts `count` writes to the set_perf of `vcpu` that ended in the kernel. What they ask for
    /// comes by [`Self::write`] and [`Self::count_coalesced`].
    pub fn count_in_kernel(&self, vcpu: VcpuId, count: u64) {
        if let Some(page) = self.vcpus.get(vcpu.index()) {
            page.counters.writes_in_kernel.add(count);
        }
    }

    /// Counts an access of `vcpu` that came over a bus: for a bus that answers it without this
    /// device.
    pub fn count_exit(&self, vcpu: Option<VcpuId>, write: bool) {
        let Some(page) = vcpu.and_then(|vcpu| self.vcpus.get(vcpu.index())) else {
            return;
        };
        match write {
            true => page.counters.writes_exited.bump(),
            false => page.counters.reads_exited.bump(),
        }
    }

    /// Says when the guest wrote what is written here next for `vcpu`: in ns of CLOCK_MONOTONIC.
    pub fn written_at(&self, vcpu: VcpuId, at_ns: u64) {
        self.events.record(&Event::Written { vcpu, at_ns });
    }

    /// Makes `khz` the request of the domain of `vcpu`, unless that has had one: what another way
    /// to the host has carried out, or left undone, before this device got the guest's requests.
    pub fn adopt_request(&self, vcpu: VcpuId, khz: Khz) {
        let Some(page) = self.vcpus.get(vcpu.index()) else {
            return;
        };
        let domain = &self.domains[page.domain];
        let by = None;
        if domain.adopt_request(Request { vcpu, by, khz }) {
            page.counters.requests.bump();
            self.apply_pending(domain);
        }
    }

    /// Counts `count` requests of `vcpu` that a newer one of its domain has overtaken before they
    /// got here.
    pub fn count_coalesced(&self, vcpu: VcpuId, count: u64) {
        let Some(page) = self.vcpus.get(vcpu.index()).filter(|_| count > 0) else {
            return;
        };
        page.counters.requests.add(count);
        page.counters.coalesced.add(count);
        self.events.record(&Event::Coalesced {
            vcpu,
            domain: self.domains[page.domain].id(),
            count,
        });
    }

    /// Puts the requests into force that waited for a token and now have one. Returns how long the
    /// next one has to wait, if there is one. To be called that much later, and after each
    /// [`Event::Limited`].
    pub fn apply_deferred(&self) -> Option<Duration> {
        let now = self.clock.0.now_ns();
        let waits = self.domains.iter().filter_map(|domain| {
            let request = domain.take_deferred()?;
            match self.take_token(domain, request, now) {
                Ok(()) => {
                    self.apply_pending(domain);
                    None
                }
                Err(due) => {
                    domain.defer();
                    Some(Duration::from_nanos(due.saturating_sub(now)))
                }
            }
        });
        waits.min()
    }

    /// Takes all requests back and forgets what the guest has selected, for a guest that starts
    /// anew. Counters go on.
    pub fn reset(&self) {
        for (vcpu, page) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            page.selected.store(0, Relaxed);
            self.show_selected(vcpu);
        }
        for domain in &self.domains {
            if let Some(newest) = domain.newest().filter(Request::asks) {
                let khz = Khz(0);
                self.request(domain, Request { khz, ..newest });
            }
        }
    }

    /// The counters of `vcpu`, if there is one.
    #[must_use]
    pub fn counters(&self, vcpu: VcpuId) -> Option<CounterSnapshot> {
        let page = self.vcpus.get(vcpu.index())?;
        Some(page.counters.snapshot())
    }

    /// How the registers of `vcpu` were reached, if there is one.
    #[must_use]
    pub fn accesses(&self, vcpu: VcpuId) -> Option<Accesses> {
        let page = self.vcpus.get(vcpu.index())?;
        Some(page.counters.accesses())
    }

    /// Where `vcpu` stands, if there is one. Calls nobody.
    #[must_use]
    pub fn domain_status(&self, vcpu: VcpuId) -> Option<DomainStatus> {
        let page = self.vcpus.get(vcpu.index())?;
        let newest = self.domains[page.domain].newest().filter(Request::asks);
        Some(DomainStatus {
            asked: newest.map(|request| request.khz),
            clamp: newest.map_or(Clamp::NONE, |request| self.clamp(request)),
            cur_perf: Khz(page.cur_perf.load(Relaxed)),
        })
    }

    /// Accesses to the padding behind the last vCPU's page.
    #[must_use]
    pub fn accesses_outside(&self) -> u64 {
        self.outside.get()
    }

    /// Counts an access that means nothing.
    pub(crate) fn illegal(&self, event: &Event) {
        let page = match event {
            Event::IllegalAccess {
                vcpu: Some(vcpu), ..
            } => self.vcpus.get(vcpu.index()),
            _ => None,
        };
        page.map_or(&self.outside, |page| &page.counters.illegal)
            .bump();
        self.events.record(event);
    }

    /// A guest's request: into force if there is a token for it, or when there is one.
    fn limited_request(&self, domain: &Domain, request: Request) {
        let now = self.clock.0.now_ns();
        if self.take_token(domain, request, now).is_ok() {
            return self.request(domain, request);
        }
        self.publish(domain, request);
        self.of(request).limited.bump();
        domain.defer();
        self.events.record(&Event::Limited {
            vcpu: request.vcpu,
            domain: domain.id(),
        });
    }

    fn take_token(&self, domain: &Domain, request: Request, now_ns: u64) -> Result<(), u64> {
        let Some(limit) = &self.limit else {
            return Ok(());
        };
        let writer = request.by.and_then(|by| self.vcpus.get(by.index()));
        let payer = writer.map_or(&domain.bucket, |writer| &writer.bucket);
        limit.take(payer, now_ns)
    }

    pub(crate) fn request(&self, domain: &Domain, request: Request) {
        self.publish(domain, request);
        self.apply_pending(domain);
    }

    fn apply_pending(&self, domain: &Domain) {
        domain.apply_pending(|request, in_force| self.enforce(domain.id(), request, in_force));
    }

    fn publish(&self, domain: &Domain, request: Request) {
        self.of(request).requests.bump();
        if let Some(older) = domain.publish(request) {
            self.of(older).superseded.bump();
            self.events.record(&Event::Superseded {
                vcpu: older.vcpu,
                domain: domain.id(),
            });
        }
    }

    /// Puts `request` into force unless it is already; returns what is in force then.
    fn enforce(
        &self,
        domain: DomainId,
        request: Request,
        in_force: Option<Clamp>,
    ) -> Option<Clamp> {
        let vcpu = request.vcpu;
        let clamp = self.clamp(request);
        let counters = self.of(request);
        if in_force == Some(clamp) {
            counters.unchanged.bump();
            self.events.record(&Event::Unchanged {
                vcpu,
                domain,
                clamp,
            });
            return in_force;
        }
        match self.actuator.apply(domain, clamp) {
            Ok(()) => {
                counters.applied.bump();
                self.events.record(&Event::Applied {
                    vcpu,
                    domain,
                    clamp,
                });
                Some(clamp)
            }
            Err(ActuateError::NotApplicable { reason, .. }) => {
                counters.not_applicable.bump();
                self.events.record(&Event::NotApplicable {
                    vcpu,
                    domain,
                    reason,
                });
                None
            }
            Err(error) => {
                counters.refused.bump();
                self.events.record(&Event::Refused {
                    vcpu,
                    domain,
                    clamp,
                    error,
                });
                None
            }
        }
    }

    fn clamp(&self, request: Request) -> Clamp {
        let config = &self.config;
        let spec = config.vcpus.get(request.vcpu.index());
        spec.map_or(Clamp::NONE, |spec| {
            policy::clamp(spec, request.khz, config.mode, config.headroom).clamp
        })
    }

    fn cur_perf(&self, vcpu: VcpuId, spec: &VcpuSpec, page: &Vcpu) -> Khz {
        let told = match self.config.visibility {
            CurPerfVisibility::Exact => self.learn(vcpu, spec),
            CurPerfVisibility::Table => self
                .learn(vcpu, spec)
                .map(|khz| policy::nearest_entry(spec, khz)),
            CurPerfVisibility::Request => Ok(self.asked(spec, page)),
        };
        match told {
            Ok(khz) => {
                let before = page.cur_perf.swap(khz.0, Relaxed);
                self.show(vcpu, ReadReg::CurPerf, khz.0);
                if before != khz.0 {
                    self.events.record(&Event::Moved { vcpu, khz });
                }
                khz
            }
            Err(error) => {
                page.counters.source_failures.bump();
                self.events.record(&Event::SourceFailed { vcpu, error });
                Khz(page.cur_perf.load(Relaxed))
            }
        }
    }

    /// What the vCPU's domain asks for, and its maximum when it asks for nothing.
    fn asked(&self, spec: &VcpuSpec, page: &Vcpu) -> Khz {
        let newest = self.domains[page.domain].newest().filter(Request::asks);
        newest.map_or(spec.table.max(), |request| {
            request.khz.min(spec.table.max())
        })
    }

    fn learn(&self, vcpu: VcpuId, spec: &VcpuSpec) -> Result<Khz, SourceError> {
        let pcpu = self.source.sample(vcpu)?;
        policy::performance(spec, &pcpu).ok_or(SourceError::Implausible {
            pcpu: pcpu.pcpu,
            khz: pcpu.khz,
            khz_max: pcpu.khz_max,
        })
    }

    /// Requests only ever carry a vCPU of this device.
    fn of(&self, request: Request) -> &Counters {
        &self.vcpus[request.vcpu.index()].counters
    }
}

impl Vcpu {
    fn new(spec: &VcpuSpec, domains: &[DomainId]) -> Self {
        Self {
            selected: AtomicU32::new(0),
            cur_perf: AtomicU32::new(spec.table.max().0),
            domain: domains.partition_point(|id| *id < spec.domain),
            bucket: Bucket::default(),
            counters: Counters::default(),
        }
    }
}
