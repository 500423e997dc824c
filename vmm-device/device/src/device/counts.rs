// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is counted and timed of a device, by it and by what serves it, and where its vCPUs stand.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Device;
use super::residency::us;
use crate::counters::{Accesses, Counter, CounterSnapshot};
use crate::domain::Request;
use crate::policy::Clamp;
use crate::ports::{Actuator, Event, Events, Source};
use crate::units::{Khz, VcpuId};

/// Where a vCPU's domain stands at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainStatus {
    /// The frequency of the domain's newest request; `None` when there is none.
    pub requested: Option<Khz>,
    /// The clamp of that request.
    pub clamp: Clamp,
    /// The last value of its cur_perf.
    pub cur_perf: Khz,
}

impl<A: Actuator, S: Source, E: Events> Device<A, S, E> {
    /// Counts `count` writes to the set_perf of `vcpu` that ended in the kernel. Their values come
    /// by [`Self::write`] and [`Self::count_coalesced`].
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

    /// Records when the guest made the next write for `vcpu`: in ns of CLOCK_MONOTONIC.
    pub fn written_at(&self, vcpu: VcpuId, at_ns: u64) {
        self.events.record(&Event::Written { vcpu, at_ns });
    }

    /// Counts and records a request's outcome, also one of a path that carries requests out beside
    /// this device.
    pub fn count(&self, event: &Event) {
        let (vcpu, counter): (_, fn(&CounterSnapshot<Counter>) -> &Counter) = match event {
            Event::Applied { vcpu, .. } => (vcpu, |of| &of.applied),
            Event::Unchanged { vcpu, .. } => (vcpu, |of| &of.unchanged),
            Event::Superseded { vcpu, .. } => (vcpu, |of| &of.superseded),
            Event::Limited { vcpu, .. } => (vcpu, |of| &of.limited),
            Event::Refused { vcpu, .. } => (vcpu, |of| &of.refused),
            Event::NotApplicable { vcpu, .. } => (vcpu, |of| &of.not_applicable),
            _ => return,
        };
        if let Some(page) = self.vcpus.get(vcpu.index()) {
            counter(&page.counters.outcomes).bump();
            self.events.record(event);
        }
    }

    /// Counts `count` requests of `vcpu` that a newer one of its domain has overtaken before they
    /// got here.
    pub fn count_coalesced(&self, vcpu: VcpuId, count: u64) {
        let Some(page) = self.vcpus.get(vcpu.index()).filter(|_| count > 0) else {
            return;
        };
        page.counters.outcomes.requests.add(count);
        page.counters.outcomes.coalesced.add(count);
        self.events.record(&Event::Coalesced {
            vcpu,
            domain: self.domains[page.domain].id(),
            count,
        });
    }

    /// Adds what a path that serves requests beside this device has counted of `vcpu`. No event is
    /// recorded.
    pub fn add_counters(&self, vcpu: VcpuId, more: CounterSnapshot) {
        if let Some(page) = self.vcpus.get(vcpu.index()) {
            page.counters.add(more);
        }
    }

    /// Counts up to `most` requests of `vcpu` that were counted as applied as refused: the host did
    /// so later. Returns how many there were.
    pub fn applied_was_refused(&self, vcpu: VcpuId, most: u64) -> u64 {
        let page = self.vcpus.get(vcpu.index());
        page.map_or(0, |page| page.counters.applied_was_refused(most))
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

    /// The request, clamp and cur_perf of `vcpu`, if there is one. Makes no host call.
    #[must_use]
    pub fn domain_status(&self, vcpu: VcpuId) -> Option<DomainStatus> {
        let page = self.vcpus.get(vcpu.index())?;
        let domain = &self.domains[page.domain];
        let newest = domain.newest().filter(Request::wants_frequency);
        let clamp = newest.map_or(Clamp::NONE, |request| self.clamp(request));
        Some(DomainStatus {
            requested: newest.map(|request| request.khz),
            clamp: clamp.within(domain.bounds()),
            cur_perf: Khz(page.cur_perf.load(Relaxed)),
        })
    }

    /// For each entry of the table of `vcpu`, how long a request of its domain for that entry was in
    /// force since the device was made, and before these for 0 kHz how long none was. The times add
    /// up to the device's age. A value between two entries counts as the higher one. `None` when
    /// there is no such vCPU.
    ///
    /// The time of a change is the clock's when the request arrived, in µs.
    #[must_use]
    pub fn requested_for(&self, vcpu: VcpuId) -> Option<Vec<(Khz, Duration)>> {
        let spec = self.config.vcpus.get(vcpu.index())?;
        let domain = self.vcpus.get(vcpu.index())?.domain;
        let us = self.residency.get(domain)?.at(us(self.clock.0.now_ns()));
        let entries = std::iter::once(&Khz(0)).chain(spec.table.entries());
        let times = us.into_iter().map(Duration::from_micros);
        Some(entries.copied().zip(times).collect())
    }

    /// The request of the domain of `vcpu` has been `khz` for `age`; 0 is none. For a path that
    /// carries requests out beside this device. Does nothing when there is no such vCPU.
    pub fn carried_out(&self, vcpu: VcpuId, khz: Khz, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let since_ns = self.clock.0.now_ns().saturating_sub(age);
        self.in_force_since(vcpu, khz, since_ns);
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
        page.map_or(&self.outside, |page| &page.counters.outcomes.illegal)
            .bump();
        self.events.record(event);
    }
}
