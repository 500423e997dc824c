// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host memory for the register pages of a guest.
//!
//! The guest maps it as device memory. On a CPU without FEAT_S2FWB such loads
//! go past the cache that the host's stores are in: each store is followed by
//! a clean of its line to the point of coherency.

#![expect(
    unsafe_code,
    reason = "mapped pages are atomics, and a clean of a line is an instruction"
)]

use std::io;
use std::sync::atomic::AtomicU32;

use vcpufreq_device::PageMemory;
use vm_memory::MmapRegion;

use super::offload::SlotMemory;

/// Zeroed memory, mapped as long as this lives.
#[derive(Debug)]
pub struct PageMapping {
    region: MmapRegion,
    clean: bool,
}

impl PageMapping {
    /// `size` bytes, a multiple of the host's page size. With `clean`, each
    /// store is made visible to loads that go past the cache.
    ///
    /// # Errors
    /// An error of kind `Other` with mmap(2)'s in it, such as `ENOMEM`.
    pub fn new(size: u64, clean: bool) -> io::Result<Self> {
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let region = MmapRegion::new(size).map_err(io::Error::other)?;
        Ok(Self { region, clean })
    }
}

impl SlotMemory for PageMapping {
    fn address(&self) -> u64 {
        self.region.as_ptr().expose_provenance() as u64
    }

    fn size(&self) -> u64 {
        self.region.size() as u64
    }

    fn guest_writes(&self) -> bool {
        false
    }
}

impl PageMemory for PageMapping {
    fn words(&self) -> &[AtomicU32] {
        words_of(&self.region)
    }

    fn stored(&self, index: usize) {
        if self.clean {
            if let Some(word) = self.words().get(index) {
                clean_line(word);
            }
        }
    }
}

/// The words of a mapping, which are only ever used as such.
pub(super) fn words_of(region: &MmapRegion) -> &[AtomicU32] {
    let len = region.size() / size_of::<AtomicU32>();
    // SAFETY: the mapping is readable and writable, starts on a page, has `len`
    // words and lives as long as `region`. Its other users are this function's
    // callers, and a guest and its kernel, which load only.
    unsafe { std::slice::from_raw_parts(region.as_ptr().cast(), len) }
}

/// Makes the last store to `word` visible to loads that go past the cache.
#[cfg(target_arch = "aarch64")]
fn clean_line(word: &AtomicU32) {
    // SAFETY: `dc cvac` of an address that can be read has no effect but on
    // the cache; Linux allows it at EL0 (SCTLR_EL1.UCI). The barrier before it
    // keeps it behind the store, the one after it ends when it has ended.
    unsafe {
        std::arch::asm!(
            "dmb ish",
            "dc cvac, {word}",
            "dsb ish",
            word = in(reg) std::ptr::from_ref(word),
            options(nostack, preserves_flags)
        );
    }
}

/// Other architectures' guests see the host's cache.
#[cfg(not(target_arch = "aarch64"))]
fn clean_line(_word: &AtomicU32) {}
