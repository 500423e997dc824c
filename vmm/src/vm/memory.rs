// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory and the KVM memory slots that show it to the guest.
//!
//! A [`Region`] is host memory with a place in the guest's address space. A
//! slot number is its index, given out in the order of insertion. A guest may
//! load from and store to all of it.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use thiserror::Error;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion, mmap::MmapRegionError,
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

/// Why memory can't be given to the guest.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The host has no room, or a limit on address space is in force.
    #[error("can't map {size:#x} bytes for the guest's memory at {base:#x}: {source}")]
    Map {
        /// First guest-physical address.
        base: u64,
        /// Bytes.
        size: u64,
        /// What the host said.
        source: std::io::Error,
    },
    /// The host's pool of huge pages has too few of that size left.
    #[error(
        "the host has no {count} free huge pages of {page_kib} kB for the guest's memory: {source}; write \
         more to /sys/kernel/mm/hugepages/hugepages-{page_kib}kB/nr_hugepages, or leave --hugepages out"
    )]
    HugePages {
        /// Pages that are missing, at most.
        count: u64,
        /// Size of each in KiB.
        page_kib: u64,
        /// What the host said.
        source: std::io::Error,
    },
    /// The region overlaps one that is there already, or wraps around.
    #[error("guest memory at {base:#x} with {size:#x} bytes doesn't fit beside the other regions")]
    Place {
        /// First guest-physical address.
        base: u64,
        /// Bytes.
        size: u64,
    },
    /// KVM refused the slot.
    #[error("KVM refused memory slot {slot} at {base:#x} with {size:#x} bytes: {source}")]
    Slot {
        /// Slot number.
        slot: u32,
        /// First guest-physical address.
        base: u64,
        /// Bytes.
        size: u64,
        /// What KVM said.
        source: kvm_ioctls::Error,
    },
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
    pub fn add(&mut self, vm: &VmFd, region: Region) -> Result<(), MemoryError> {
        let Region { base, size } = region;
        let place = || MemoryError::Place { base, size };
        let len = usize::try_from(size).map_err(|_| place())?;
        let mapping = match self.huge_pages_of(size) {
            Some(count) => self.map_huge(len).map_err(|error| MemoryError::HugePages {
                count,
                page_kib: self.pages.bytes() / 1024,
                source: os_error(error),
            }),
            None => MmapRegion::new(len).map_err(|error| MemoryError::Map {
                base,
                size,
                source: os_error(error),
            }),
        }?;
        let mapping = GuestRegionMmap::new(mapping, GuestAddress(base)).ok_or_else(place)?;
        let mapping = std::sync::Arc::new(mapping);
        let map = self
            .map
            .insert_region(mapping.clone())
            .map_err(|_| place())?;
        let slot = kvm_userspace_memory_region {
            slot: self.slots,
            flags: 0,
            guest_phys_addr: base,
            memory_size: mapping.len(),
            userspace_addr: sys::address_of(&mapping),
        };
        sys::set_slot(vm, slot).map_err(|source| MemoryError::Slot {
            slot: slot.slot,
            base,
            size,
            source,
        })?;
        self.map = map;
        self.slots += 1;
        Ok(())
    }

    /// The number of the first slot that isn't taken.
    pub fn next_slot(&self) -> u32 {
        self.slots
    }

    /// How many huge pages a region of `size` bytes is made of, if it is.
    fn huge_pages_of(&self, size: u64) -> Option<u64> {
        let page = self.pages.bytes();
        (page > 0 && size.is_multiple_of(page)).then(|| size / page)
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
