// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The register pages as memory that a guest reads by plain loads, without an exit.
//!
//! The readable registers lie at their offsets, everything else is 0. The memory is the caller's:
//! a VMM's anonymous mapping, or a BPF map's. Who maps it into the guest maps it read-only: writes
//! still have to reach the device. Of an access that the register interface doesn't have (another
//! width, a register that is write-only) a guest sees the bytes of the page, and nobody is told.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::device::Device;
use crate::mmio::region_size;
use crate::ports::{Actuator, Events, Source};
use crate::regs::{REG_WIDTH, REGION_STRIDE, ReadReg};
use crate::units::VcpuId;

/// Memory that stands for register pages: [`region_size`] bytes, zeroed.
pub trait PageMemory: Send + Sync {
    /// All of it, in words of the host.
    fn words(&self) -> &[AtomicU32];

    /// Word `index` has been stored to. Where a guest's loads don't see the host's cache, this
    /// makes them see it.
    fn stored(&self, index: usize) {
        let _ = index;
    }
}

/// Memory that has the wrong size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    /// Not [`region_size`] bytes.
    #[error("register pages of {vcpus} vCPUs take {expected} bytes, but there are {bytes}")]
    Size {
        /// vCPUs of the device.
        vcpus: u16,
        /// Bytes that they take.
        expected: u64,
        /// Bytes given.
        bytes: u64,
    },
    /// The device has pages already.
    #[error("the device has register pages already")]
    Twice,
}

/// The pages of all vCPUs of a device.
pub struct RegisterPages {
    memory: Box<dyn PageMemory>,
}

impl fmt::Debug for RegisterPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.memory.words().len();
        f.debug_struct("RegisterPages")
            .field("words", &words)
            .finish()
    }
}

impl RegisterPages {
    /// The pages of `vcpus` vCPUs in `memory`.
    ///
    /// # Errors
    /// When `memory` hasn't the size of the region.
    pub fn new(memory: Box<dyn PageMemory>, vcpus: u16) -> Result<Self, PagesError> {
        let bytes = memory.words().len() * REG_WIDTH;
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let expected = region_size(vcpus);
        if bytes != expected {
            return Err(PagesError::Size {
                vcpus,
                expected,
                bytes,
            });
        }
        Ok(Self { memory })
    }

    /// Shows `value` in a register of `vcpu`; does nothing when there is no such page.
    pub fn store(&self, vcpu: VcpuId, reg: ReadReg, value: u32) {
        let offset = u64::from(vcpu.0) * REGION_STRIDE + reg.offset();
        let Ok(offset) = usize::try_from(offset) else {
            return;
        };
        let index = offset / REG_WIDTH;
        if let Some(word) = self.memory.words().get(index) {
            word.store(value.to_le(), Relaxed);
            self.memory.stored(index);
        }
    }
}

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

/// Memory of a program that maps it nowhere.
impl PageMemory for Box<[AtomicU32]> {
    fn words(&self) -> &[AtomicU32] {
        self
    }
}

impl<T: PageMemory + ?Sized> PageMemory for Arc<T> {
    fn words(&self) -> &[AtomicU32] {
        (**self).words()
    }

    fn stored(&self, index: usize) {
        (**self).stored(index);
    }
}
