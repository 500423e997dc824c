// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory and the KVM memory slots that show it to the guest.
//!
//! A [`Region`] is host memory with a place in the guest's address space. A
//! slot number is its index, given out in the order of insertion. What a guest
//! may do with a region is its [`Access`].

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use thiserror::Error;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion, mmap::MmapRegionError,
};

use super::sys;
use crate::rt_options::PageSize;

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

/// What a guest may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads and stores, without an exit.
    ReadWrite,
}

impl Access {
    fn slot_flags(self) -> u32 {
        match self {
            Self::ReadWrite => 0,
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
    /// What the guest may do with it.
    pub access: Access,
}

/// All memory of one guest.
#[derive(Default)]
pub struct Memory {
    pages: PageSize,
    map: GuestMemoryMmap,
    slots: u32,
}

impl Memory {
    /// No memory yet.
    pub fn new() -> Self {
        Self::default()
    }

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
        let Region { base, size, access } = region;
        let place = || MemoryError::Place { base, size };
        let len = usize::try_from(size).map_err(|_| place())?;
        let mapping = self.map_host(len).map_err(|error| MemoryError::Map {
            base,
            size,
            source: std::io::Error::other(error),
        })?;
        let mapping = GuestRegionMmap::new(mapping, GuestAddress(base)).ok_or_else(place)?;
        let mapping = std::sync::Arc::new(mapping);
        let map = self
            .map
            .insert_region(mapping.clone())
            .map_err(|_| place())?;
        let slot = kvm_userspace_memory_region {
            slot: self.slots,
            flags: access.slot_flags(),
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

    /// Host memory; of huge pages, they are set aside at once, so that there is
    /// no shortage later.
    fn map_host(&self, len: usize) -> Result<MmapRegion, MmapRegionError> {
        let page = self.pages.bytes();
        let whole = u64::try_from(len).is_ok_and(|len| page > 0 && len.is_multiple_of(page));
        if !whole {
            return MmapRegion::new(len);
        }
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
