// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory and the KVM memory slots that show it to the guest.
//!
//! A [`Region`] is host memory with a place in the guest's address space. A
//! slot number is its index, given out in the order of insertion. A guest may
//! load from and store to all of it.

use anyhow::{Context, anyhow};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
    mmap::MmapRegionError,
};

use super::sys;

/// Size of the pages that guest memory is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageSize {
    /// The host's.
    #[default]
    Base,
    /// 2 MiB.
    Mib2,
    /// 1 GiB.
    Gib1,
}

impl PageSize {
    /// Bytes; 0 for the host's own pages.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Base => 0,
            Self::Mib2 => 2 << 20,
            Self::Gib1 => 1 << 30,
        }
    }
}

/// A piece of guest memory to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First guest-physical address, a multiple of the host's page size.
    pub base: u64,
    /// Bytes, a multiple of the host's page size.
    pub size: u64,
}

/// All memory of one guest.
#[derive(Default)]
pub struct Memory {
    pages: PageSize,
    map: GuestMemoryMmap,
    slots: u32,
}

impl Memory {
    /// No memory yet; what is a multiple of `pages` will be made of these.
    pub fn of_pages(pages: PageSize) -> Self {
        Self {
            pages,
            ..Self::default()
        }
    }

    /// Maps zeroed host memory for `region` and makes it a slot of `vm`.
    ///
    /// The slot lives as long as `vm`, so `self` has to outlive the last run of
    /// its vCPUs.
    ///
    /// # Errors
    /// When mmap(2) refuses the host's memory (`ENOMEM`), KVM the slot, or the region overlaps
    /// another. There is no such region then.
    pub fn add(&mut self, vm: &VmFd, region: Region) -> anyhow::Result<()> {
        let Region { base, size } = region;
        let place = || {
            format!(
                "guest memory at {base:#x} with {size:#x} bytes doesn't fit beside the other regions"
            )
        };
        let mapping = self.mapping(base, size).map_err(|why| anyhow!(why))?;
        let mapping = GuestRegionMmap::new(mapping, GuestAddress(base)).with_context(place)?;
        let mapping = std::sync::Arc::new(mapping);
        let map = self.map.insert_region(mapping.clone());
        let map = map.map_err(|_| anyhow!(place()))?;
        let slot = kvm_userspace_memory_region {
            slot: self.slots,
            flags: 0,
            guest_phys_addr: base,
            memory_size: mapping.len(),
            userspace_addr: sys::address_of(&mapping),
        };
        let number = self.slots;
        sys::set_slot(vm, slot).with_context(|| {
            format!("KVM refused memory slot {number} at {base:#x} with {size:#x} bytes")
        })?;
        self.map = map;
        self.slots += 1;
        Ok(())
    }

    /// Host memory for a region, or why there is none.
    fn mapping(&self, base: u64, size: u64) -> Result<MmapRegion, String> {
        let len = usize::try_from(size).map_err(|_| format!("{size:#x} bytes are too many"))?;
        let page = self.pages.bytes();
        if page == 0 || size % page != 0 {
            let mapped = MmapRegion::new(len).map_err(os_error);
            return mapped.map_err(|error| {
                format!("can't map {size:#x} bytes for the guest's memory at {base:#x}: {error}")
            });
        }
        self.map_huge(len).map_err(os_error).map_err(|error| {
            let (count, kib) = (size / page, page / 1024);
            format!(
                "the host has no {count} free huge pages of {kib} kB for the guest's memory: {error}; write \
                 more to /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages, or leave --hugepages out"
            )
        })
    }

    /// The number of the first slot that isn't taken.
    pub fn next_slot(&self) -> u32 {
        self.slots
    }

    /// Huge pages are set aside at once, so that there is no shortage later.
    fn map_huge(&self, len: usize) -> Result<MmapRegion, MmapRegionError> {
        let size = match self.pages {
            PageSize::Gib1 => libc::MAP_HUGE_1GB,
            PageSize::Mib2 | PageSize::Base => libc::MAP_HUGE_2MB,
        };
        let flags = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_HUGETLB | size;
        MmapRegion::build(None, len, libc::PROT_READ | libc::PROT_WRITE, flags)
    }

    /// The memory by guest-physical address.
    pub fn map(&self) -> &GuestMemoryMmap {
        &self.map
    }

    /// Bytes in all regions.
    pub fn size(&self) -> u64 {
        self.map.iter().map(GuestMemoryRegion::len).sum()
    }
}

fn os_error(error: MmapRegionError) -> std::io::Error {
    match error {
        MmapRegionError::Mmap(error) => error,
        other => std::io::Error::other(other),
    }
}
