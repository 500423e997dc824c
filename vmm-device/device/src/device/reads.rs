// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest reads, by an exit or without one: from the register pages, in which the device shows
//! it too.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;

use super::{Device, NO_CAP, Vcpu};
use crate::config::{CurPerfVisibility, VcpuSpec};
use crate::domain::{Domain, Request};
use crate::pages::{PagesError, RegisterPages};
use crate::policy;
use crate::ports::{Actuator, Event, Events, Source, SourceError};
use crate::regs::ReadReg;
use crate::units::{DomainId, Khz, VcpuId};

impl<A: Actuator, S: Source, E: Events> Device<A, S, E> {
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
            ReadReg::PerfCap => self.perf_cap(spec, page),
        }
    }

    /// The most that the vCPU's domain can get now, as far as the guest is to know.
    fn perf_cap(&self, spec: &VcpuSpec, page: &Vcpu) -> u32 {
        let cap = self.caps.get(page.domain);
        let cap = cap.map_or(NO_CAP, |cap| cap.load(Relaxed));
        let cap = Khz(cap).min(spec.table.max());
        match self.config.visibility {
            CurPerfVisibility::Exact => cap.0,
            CurPerfVisibility::Table => policy::entry_within(spec, cap).0,
            CurPerfVisibility::Request => 0,
        }
    }

    /// From now on, the host lets the vCPUs of a domain have `cap` at most, on the scale of their
    /// table; `None`: as much as their maximum. Does nothing when there is no such domain.
    pub fn set_cap(&self, domain: DomainId, cap: Option<Khz>) {
        let Ok(index) = self.domains.binary_search_by_key(&domain, Domain::id) else {
            return;
        };
        // A guest takes 0 for unknown.
        let khz = cap.map_or(NO_CAP, |cap| cap.0.max(1));
        self.caps[index].store(khz, Relaxed);
        for (vcpu, page) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            if page.domain == index {
                self.show(vcpu, ReadReg::PerfCap, self.read(vcpu, ReadReg::PerfCap));
            }
        }
    }

    fn cur_perf(&self, vcpu: VcpuId, spec: &VcpuSpec, page: &Vcpu) -> Khz {
        let sample = page.samples.begin();
        let shown = match self.config.visibility {
            CurPerfVisibility::Exact => self.learn(vcpu, spec),
            CurPerfVisibility::Table => self
                .learn(vcpu, spec)
                .map(|khz| policy::nearest_entry(spec, khz)),
            CurPerfVisibility::Request => Ok(self.asked(spec, page)),
        };
        match shown {
            Ok(khz) => {
                let mut before = khz.0;
                page.samples.end(sample, || {
                    before = page.cur_perf.swap(khz.0, Relaxed);
                    self.show(vcpu, ReadReg::CurPerf, khz.0);
                });
                if before != khz.0 {
                    self.events.record(&Event::Moved { vcpu, khz });
                }
                khz
            }
            Err(error) => {
                page.counters.outcomes.source_failures.bump();
                self.events.record(&Event::SourceFailed { vcpu, error });
                Khz(page.cur_perf.load(Relaxed))
            }
        }
    }

    /// The frequency that the vCPU's domain requests; without a request, the vCPU's maximum.
    fn asked(&self, spec: &VcpuSpec, page: &Vcpu) -> Khz {
        let newest = self.domains[page.domain]
            .newest()
            .filter(Request::wants_frequency);
        newest.map_or(spec.table.max(), |request| {
            request.khz.min(spec.table.max())
        })
    }

    fn learn(&self, vcpu: VcpuId, spec: &VcpuSpec) -> Result<Khz, SourceError> {
        let pcpu = self.source.sample(vcpu)?;
        policy::performance(spec, &pcpu).ok_or(SourceError::Implausible {
            pcpu: pcpu.pcpu,
            khz: pcpu.khz,
            reference: pcpu.reference,
        })
    }

    /// From now on, what a guest would read is in `pages` too. cur_perf there is what
    /// [`Device::refresh`] found last.
    ///
    /// # Errors
    /// [`PagesError::Twice`] when the device has pages already; it keeps those.
    pub fn attach_pages(&self, pages: RegisterPages) -> Result<(), PagesError> {
        self.pages.set(pages).map_err(|_| PagesError::Twice)?;
        self.show_all();
        Ok(())
    }

    /// Shows everything that a guest can read.
    #[doc(hidden)]
    pub fn show_all(&self) {
        for (vcpu, _) in (0..=u16::MAX).map(VcpuId).zip(&self.config.vcpus) {
            self.show_given(vcpu);
            self.show_memory(vcpu);
        }
    }

    /// Shows what no access changes in the page of `vcpu`.
    #[doc(hidden)]
    pub fn show_given(&self, vcpu: VcpuId) {
        for reg in [
            ReadReg::PerftblLen,
            ReadReg::PerfDomain,
            ReadReg::Features,
            ReadReg::PerfCap,
        ] {
            self.show(vcpu, reg, self.read(vcpu, reg));
        }
    }

    /// Learns cur_perf of `vcpu` and shows it in its page. Does nothing when there is no such
    /// vCPU.
    pub fn refresh(&self, vcpu: VcpuId) {
        self.read(vcpu, ReadReg::CurPerf);
    }

    pub(crate) fn show(&self, vcpu: VcpuId, reg: ReadReg, value: u32) {
        if let Some(pages) = self.pages.get() {
            pages.store(vcpu, reg, value);
        }
    }

    /// Shows what a vCPU's page remembers.
    pub(crate) fn show_memory(&self, vcpu: VcpuId) {
        if let (Some(_), Some(page)) = (self.pages.get(), self.vcpus.get(vcpu.index())) {
            let cur_perf = page.cur_perf.load(Relaxed);
            self.show(vcpu, ReadReg::CurPerf, cur_perf);
            self.show_selected(vcpu);
        }
    }

    /// Shows the table entry that is selected. Not cur_perf: another thread may be about to
    /// show a newer one.
    pub(crate) fn show_selected(&self, vcpu: VcpuId) {
        if self.pages.get().is_some() {
            let entry = self.read(vcpu, ReadReg::PerftblRd);
            self.show(vcpu, ReadReg::PerftblRd, entry);
        }
    }
}
