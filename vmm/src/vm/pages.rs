// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host memory for the register pages of a guest.
//!
//! The guest maps it as device memory. On a CPU without FEAT_S2FWB such loads
//! go past the cache that the host's stores are in: each store is followed by
//! a clean of its line to the point of coherency.

use std::io;
use std::sync::atomic::AtomicU32;

use vcpufreq_device::PageMemory;
use vm_memory::MmapRegion;

use super::in_kernel::SlotMemory;
use super::sys;

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
    /// What the host said.
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
}

impl PageMemory for PageMapping {
    fn words(&self) -> &[AtomicU32] {
        sys::words_of(&self.region)
    }

    fn stored(&self, index: usize) {
        if self.clean
            && let Some(word) = self.words().get(index)
        {
            sys::clean_line(word);
        }
    }
}
