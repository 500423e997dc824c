// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the programs know of pCPUs: at the start, and of those that come online later.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::SeqCst;

use vcpufreq_device::{Khz, VcpuId};

use super::{HostBpf, PcpuFacts};
use crate::error::BpfError;

impl HostBpf {
    /// The pCPU that a vCPU's thread is or was on last, and its frequency.
    pub(crate) fn pcpu(&self, vcpu: VcpuId) -> Option<(u32, Khz)> {
        let number = self.vcpus.get(vcpu.index())?.cpu.load(SeqCst);
        let number = number.checked_sub(1)?;
        Some((number, Khz(self.frequency(number).filter(|khz| *khz > 0)?)))
    }

    /// Sets the facts of these pCPUs. Some were not online before: their frequency may differ from
    /// that of the last change event. On return all pages are true.
    ///
    /// # Errors
    /// [`BpfError::Refused`] when a program can't be run (`ENOMEM`). The programs know the pCPUs by
    /// then; the pages of the vCPUs from that one on wait for the next event.
    pub fn set_pcpus(
        &self,
        pcpus: &[PcpuFacts],
        khz: impl Fn(u32) -> Option<Khz>,
    ) -> Result<(), BpfError> {
        self.fill_pcpus(pcpus);
        self.look_up(pcpus, khz);
        let programs = self.programs();
        let mut vcpus = (0..=u16::MAX).zip(self.vcpus.all());
        vcpus.try_for_each(|(vcpu, _)| programs.call("vcpufreq_refresh", vcpu))
    }

    /// Looks up the frequencies of pCPUs without a change event; an event that comes meanwhile
    /// counts.
    pub(super) fn look_up(&self, pcpus: &[PcpuFacts], khz: impl Fn(u32) -> Option<Khz>) {
        for pcpu in pcpus {
            let Some(cpu) = self.now.get(super::index(pcpu.number)) else {
                continue;
            };
            let before = cpu.khz.load(SeqCst);
            if let Some(now) = khz(pcpu.number) {
                let _ = cpu.khz.compare_exchange(before, now.0, SeqCst, SeqCst);
            }
        }
    }

    pub(super) fn fill_pcpus(&self, pcpus: &[PcpuFacts]) {
        for pcpu in pcpus {
            if let Some(cpu) = self.cpu(pcpu.number) {
                cpu.capacity.store(pcpu.capacity.get().into(), SeqCst);
                cpu.reference_khz.store(pcpu.reference.0, SeqCst);
            }
        }
    }
}
