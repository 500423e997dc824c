// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device shows in its register pages, which a guest reads without an exit.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;

use super::Device;
use crate::pages::{PagesError, RegisterPages};
use crate::ports::{Actuator, Events, Source};
use crate::regs::ReadReg;
use crate::units::VcpuId;

impl<A: Actuator, S: Source, E: Events> Device<A, S, E> {
    /// From now on, what a guest would read is in `pages` too. cur_perf there is what
    /// [`Device::refresh`] found last.
    ///
    /// # Errors
    /// When the device has pages already.
    pub fn attach_pages(&self, pages: RegisterPages) -> Result<(), PagesError> {
        self.pages.set(pages).map_err(|_| PagesError::Twice)?;
        for (vcpu, spec) in (0..=u16::MAX).map(VcpuId).zip(&self.config.vcpus) {
            self.show(vcpu, ReadReg::PerftblLen, spec.table.register_len());
            self.show(vcpu, ReadReg::PerfDomain, spec.domain.0);
            self.show(vcpu, ReadReg::Features, self.features());
            self.show_memory(vcpu);
        }
        Ok(())
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
        if self.pages.get().is_some()
            && let Some(page) = self.vcpus.get(vcpu.index())
        {
            let cur_perf = page.cur_perf.load(Relaxed);
            self.show(vcpu, ReadReg::CurPerf, cur_perf);
            self.show_selected(vcpu);
        }
    }

    /// Shows the table entry that is selected. Not cur_perf: somebody may be about to show a
    /// newer one.
    pub(crate) fn show_selected(&self, vcpu: VcpuId) {
        if self.pages.get().is_some() {
            let entry = self.read(vcpu, ReadReg::PerftblRd);
            self.show(vcpu, ReadReg::PerftblRd, entry);
        }
    }
}
