// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The register pages as memory that a guest reads by plain loads, without an exit.
//!
//! The readable registers lie at their offsets, everything else is 0. The memory is the caller's: a
//! VMM's anonymous mapping, or a BPF map's. A VMM maps it into the guest read-only, so that writes
//! still reach the device. An access that the register interface doesn't have (another width, a
//! write-only register) reads the bytes of the page; the device doesn't see it.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::regs::{REG_WIDTH, REGION_STRIDE, ReadReg, region_size};
use crate::units::VcpuId;

/// Memory that stands for register pages: [`region_size`] bytes, zeroed. No method has a default:
/// memory that wraps another one would lose what it doesn't forward.
pub trait PageMemory: Send + Sync {
    /// All of it, in words of the host.
    fn words(&self) -> &[AtomicU32];

    /// Word `index` has been stored to. Where a guest's loads don't see the host's cache, this
    /// makes them see it.
    fn stored(&self, index: usize);
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
    /// [`PagesError::Size`] when `memory` hasn't the size of the region.
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

/// Memory of a program that maps it nowhere.
impl PageMemory for Box<[AtomicU32]> {
    fn words(&self) -> &[AtomicU32] {
        self
    }

    fn stored(&self, _index: usize) {}
}

impl<T: PageMemory + ?Sized> PageMemory for Arc<T> {
    fn words(&self) -> &[AtomicU32] {
        (**self).words()
    }

    fn stored(&self, index: usize) {
        (**self).stored(index);
    }
}
