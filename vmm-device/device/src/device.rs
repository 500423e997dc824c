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

pub(crate) mod counts;
mod reads;
mod residency;

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use crate::config::{ClampMode, ConfigError, CurPerfVisibility, DeviceConfig, VcpuSpec};
use crate::counters::{Counter, CounterSnapshot, Counters};
use crate::domain::{Domain, Request};
use crate::limit::{Bucket, Clock, Limit, Monotonic};
use crate::pages::RegisterPages;
use crate::policy::{self, Clamp};
use crate::ports::{ActuateError, Actuator, Event, Events, Source};
use crate::regs::{FEATURE_ANY_CPU, FEATURE_CEILING, FEATURE_PERF_CAP, WriteReg};
use crate::sample_order::SampleOrder;
use crate::units::{DomainId, Khz, VcpuId};
use residency::{Residency, entry_of, us};

/// A virtual cpufreq device of 1 to 512 vCPUs.
#[derive(Debug)]
pub struct Device<A, S, E> {
    pub(crate) config: DeviceConfig,
    pub(crate) vcpus: Box<[Vcpu]>,
    pub(crate) domains: Box<[Domain]>,
    /// For each of `domains`, how long which request was in force.
    residency: Box<[Residency]>,
    /// For each of `domains`, the most that the host lets it have, kHz; [`NO_CAP`] without a limit.
    caps: Box<[AtomicU32]>,
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

/// Above every table.
const NO_CAP: u32 = u32::MAX;

/// The clock, which has no debug text.
struct Time(Box<dyn Clock>);

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ns", self.0.now_ns())
    }
}

/// What a vCPU's page remembers. A cache line of its own, for vCPUs write it all the time.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Vcpu {
    /// perftbl_sel as written, in range or not.
    pub selected: AtomicU32,
    /// cur_perf as last learned, kHz; never 0.
    pub cur_perf: AtomicU32,
    samples: SampleOrder,
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
    /// As [`DeviceConfig::check`].
    pub fn new(
        mut config: DeviceConfig,
        actuator: A,
        source: S,
        events: E,
    ) -> Result<Self, ConfigError> {
        config.check()?;
        // A real-time guest's vCPUs are kept fast, and its driver has no tick to renew ceilings in.
        if config.mode == ClampMode::Ceilings && !actuator.serves_any_vcpu() {
            config.mode = ClampMode::Floor;
        }
        let numbers = config.domains();
        let vcpus = config.vcpus.iter().map(|spec| Vcpu::new(spec, &numbers));
        let clock = Time(Box::new(Monotonic::default()));
        Ok(Self {
            residency: residency::of_domains(&config, clock.0.now_ns()),
            vcpus: vcpus.collect(),
            domains: numbers.iter().copied().map(Domain::new).collect(),
            caps: numbers.iter().map(|_| AtomicU32::new(NO_CAP)).collect(),
            limit: config
                .rate_limit
                .map(|limit| Limit::new(limit, numbers.len())),
            config,
            outside: Counter::default(),
            actuator,
            source,
            events,
            pages: OnceLock::new(),
            clock,
        })
    }

    /// The same device with another clock for its limit and times, from whose now on times count.
    #[must_use]
    pub fn with_clock(self, clock: impl Clock + 'static) -> Self {
        let clock = Time(Box::new(clock));
        let residency = residency::of_domains(&self.config, clock.0.now_ns());
        Self {
            residency,
            clock,
            ..self
        }
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
        let any_cpu = self.actuator.serves_any_vcpu();
        let perf_cap = self.config.visibility != CurPerfVisibility::Request;
        let features = [
            (any_cpu, FEATURE_ANY_CPU),
            (perf_cap, FEATURE_PERF_CAP),
            (self.takes_ceilings(), FEATURE_CEILING),
        ];
        let has = features.into_iter().filter(|(has, _)| *has);
        has.fold(0, |all, (_, feature)| all | feature)
    }

    fn takes_ceilings(&self) -> bool {
        self.config.mode == ClampMode::Ceilings
    }

    /// Where its frequencies come from.
    #[must_use]
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Receives every event.
    #[must_use]
    pub fn events(&self) -> &E {
        &self.events
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
                let request = match self.takes_ceilings() {
                    true => Request::written(vcpu, by, value),
                    false => Request::without_ceiling(vcpu, by, Khz(value)),
                };
                self.events.record(&Event::Request {
                    vcpu,
                    domain: domain.id(),
                    khz: request.khz,
                });
                self.limited_request(domain, request);
            }
            WriteReg::PerftblSel => {
                page.selected.store(value, Relaxed);
                self.show_selected(vcpu);
            }
        }
    }

    /// Makes `khz` the request of the domain of `vcpu`, unless the domain has had one. Takes over a
    /// request that another path received before this device got the guest's writes.
    pub fn adopt_request(&self, vcpu: VcpuId, khz: Khz) {
        let Some(page) = self.vcpus.get(vcpu.index()) else {
            return;
        };
        let domain = &self.domains[page.domain];
        if domain.adopt_request(Request::without_ceiling(vcpu, None, khz)) {
            page.counters.outcomes.requests.bump();
            self.apply_pending(domain, self.clock.0.now_ns());
        }
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
                    self.apply_pending(domain, now);
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

    /// Ends ceilings that the guest has not written again in time. Returns how long the next one
    /// holds, if there is one. To be called that much later, and after each [`Event::Ceiling`].
    pub fn lift_ceilings(&self) -> Option<Duration> {
        let now = self.clock.0.now_ns();
        let left = self.domains.iter().filter_map(|domain| {
            let until = domain.ceiling_until()?;
            if until > now {
                return Some(Duration::from_nanos(until - now));
            }
            match domain.lift_ceiling(until) {
                Ok(lifted) => {
                    if let Some(request) = lifted {
                        self.counters_of(request).requests.bump();
                    }
                    // Also one that waits for a token: the ceiling was that of an older one, which
                    // had a token. So a guest gets two host calls for a token at most.
                    self.apply_pending(domain, now);
                    None
                }
                // The guest has written it again meanwhile.
                Err(until) => Some(Duration::from_nanos(until.saturating_sub(now))),
            }
        });
        left.min()
    }

    /// Takes all requests back and forgets what the guest has selected, for a guest that starts
    /// anew. Counters go on.
    pub fn reset(&self) {
        for (vcpu, page) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            page.selected.store(0, Relaxed);
            self.show_selected(vcpu);
        }
        self.withdraw();
    }

    /// Takes all requests back.
    pub fn withdraw(&self) {
        for domain in &self.domains {
            if let Some(newest) = domain.newest().filter(Request::wants_frequency) {
                let none = Request::without_ceiling(newest.vcpu, newest.by, Khz(0));
                self.request(domain, none);
            }
        }
    }

    /// Puts the newest request of the domain of `vcpu` into force again, also where its clamp is in
    /// force: what it means to the host has changed. It counts as a request.
    pub fn apply_again(&self, vcpu: VcpuId) {
        let Some(page) = self.vcpus.get(vcpu.index()) else {
            return;
        };
        let domain = &self.domains[page.domain];
        if let Some(request) = domain.renew() {
            self.counters_of(request).requests.bump();
            self.apply_pending(domain, self.clock.0.now_ns());
        }
    }

    /// Keeps the clamps of `domain` within `bounds` from the next one that is put into force on,
    /// whatever the guest requests.
    pub fn set_bounds(&self, domain: DomainId, bounds: Clamp) {
        if let Ok(index) = self.domains.binary_search_by_key(&domain, Domain::id) {
            self.domains[index].set_bounds(bounds);
        }
    }

    /// What the clamps of the domain of `vcpu` are kept within.
    #[must_use]
    pub fn bounds(&self, vcpu: VcpuId) -> Clamp {
        let page = self.vcpus.get(vcpu.index());
        page.map_or(Clamp::NONE, |page| self.domains[page.domain].bounds())
    }

    /// Puts the newest request of the domain of `vcpu` into force again, or that there is none: its
    /// bounds have changed. It counts as a request. What came of it; `None` if another thread puts
    /// that domain's requests into force now, or there is no such vCPU.
    ///
    /// # Errors
    /// As [`Actuator::apply`].
    pub fn apply_bounds(&self, vcpu: VcpuId) -> Option<Result<(), ActuateError>> {
        let page = self.vcpus.get(vcpu.index())?;
        let domain = &self.domains[page.domain];
        if let Some(request) = domain.renew_or_none(vcpu) {
            self.counters_of(request).requests.bump();
        }
        self.apply_pending(domain, self.clock.0.now_ns())
    }

    /// A guest's request: into force if there is a token for it, or when there is one.
    fn limited_request(&self, domain: &Domain, request: Request) {
        let now = self.clock.0.now_ns();
        if self.take_token(domain, request, now).is_ok() {
            self.publish(domain, request, now);
            self.apply_pending(domain, now);
            return;
        }
        // It is no ceiling, also when it has one later: the guest has renewed that by then.
        let floor = Request::without_ceiling(request.vcpu, request.by, request.khz);
        self.publish(domain, floor, now);
        domain.defer();
        self.count(&Event::Limited {
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
        let now = self.clock.0.now_ns();
        self.publish(domain, request, now);
        self.apply_pending(domain, now);
    }

    /// Puts requests into force that arrived at `now`, in ns of the clock. What came of the last one;
    /// `None` if another thread does it.
    fn apply_pending(&self, domain: &Domain, now: u64) -> Option<Result<(), ActuateError>> {
        let mut last = None;
        domain.apply_pending(|request, in_force| {
            let applied = self.enforce(domain, request, in_force);
            let khz = applied.map_or(Khz(0), |_| request.khz);
            self.in_force_since(request.vcpu, khz, now);
            last = Some(applied.map(drop));
            applied.ok()
        });
        last
    }

    fn in_force_since(&self, vcpu: VcpuId, khz: Khz, since_ns: u64) {
        let index = vcpu.index();
        let (Some(spec), Some(page)) = (self.config.vcpus.get(index), self.vcpus.get(index)) else {
            return;
        };
        if let Some(residency) = self.residency.get(page.domain) {
            residency.change(entry_of(&spec.table, khz), us(since_ns));
        }
    }

    fn publish(&self, domain: &Domain, request: Request, now: u64) {
        self.counters_of(request).requests.bump();
        let published = domain.publish(request, now);
        let domain = domain.id();
        if let Some(Request { vcpu, .. }) = published.superseded {
            self.count(&Event::Superseded { vcpu, domain });
        }
        if published.first_ceiling {
            self.events.record(&Event::Ceiling { domain });
        }
    }

    /// Puts `request` into force unless it is already; returns what is in force then.
    fn enforce(
        &self,
        domain: &Domain,
        request: Request,
        in_force: Option<Clamp>,
    ) -> Result<Clamp, ActuateError> {
        let vcpu = request.vcpu;
        let clamp = self.clamp(request).within(domain.bounds());
        let domain = domain.id();
        if in_force == Some(clamp) {
            self.count(&Event::Unchanged {
                vcpu,
                domain,
                clamp,
            });
            return Ok(clamp);
        }
        let applied = self.actuator.apply(domain, clamp);
        self.count(&Event::outcome(vcpu, domain, clamp, applied));
        applied.map(|()| clamp)
    }

    fn clamp(&self, request: Request) -> Clamp {
        let config = &self.config;
        let spec = config.vcpus.get(request.vcpu.index());
        let mode = (request.ceiling_ms != 0).then_some(ClampMode::Exact);
        let mode = mode.unwrap_or(config.mode);
        spec.map_or(Clamp::NONE, |spec| {
            policy::clamp(spec, request.khz, mode, config.headroom).clamp
        })
    }

    /// Requests only ever carry a vCPU of this device.
    fn counters_of(&self, request: Request) -> &CounterSnapshot<Counter> {
        &self.vcpus[request.vcpu.index()].counters.outcomes
    }
}

impl Vcpu {
    fn new(spec: &VcpuSpec, domains: &[DomainId]) -> Self {
        Self {
            selected: AtomicU32::new(0),
            cur_perf: AtomicU32::new(spec.table.max().0),
            samples: SampleOrder::default(),
            domain: domains.partition_point(|id| *id < spec.domain),
            bucket: Bucket::default(),
            counters: Counters::default(),
        }
    }
}
