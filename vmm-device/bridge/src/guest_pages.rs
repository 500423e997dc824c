// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Register pages in memory that a protected guest shares with its VMM. KVM has no read-only slots
//! for such a guest, and all of its memory is its own until it shares a page.
//!
//! ```text
//! guest: shares pages, writes their number to REG_SHARED_PAGES ─▶ exit ─▶ GuestPagesRegion
//! device ─▶ PageMemory (a file of this process) ─▶ pread into the guest's pages ─▶ guest: a load
//! ```
//! The guest chooses the pages, may name any, and may take them back at any time. A store of this
//! process to a page that isn't shared would be a SIGSEGV; pread(2) fails with `EFAULT` there. Then
//! the pages are forgotten and each read exits, as it does before the guest shares any. This process
//! reads nothing from them.

#![expect(
    unsafe_code,
    reason = "pread(2) to an address that the guest chooses within its memory"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use vcpufreq_device::{
    Actuator, CUR_PERF_UNKNOWN, Device, Events, FEATURE_SHARED_PAGES, PageMemory, REG_FEATURES,
    REG_PERF_CAP, REG_SHARED_PAGES, REG_WIDTH, REGION_STRIDE, SHARED_PAGE_SHIFT, Source, VcpuId,
    page_of, region_size,
};
use vcpufreq_host::memory_file;
use vm_memory::{FileOffset, GuestAddress, GuestMemory, GuestMemoryMmap, MmapRegion};

use super::mmio_device::MmioDevice;
use super::page_mapping::words_of;
use crate::embedder::Embedder;
use crate::sync::unpoisoned;

/// Bytes of a word.
const WORD: u64 = REG_WIDTH as u64;
/// Bytes of a vCPU's page that registers have.
const USED: u64 = REG_PERF_CAP + WORD;

/// What the guest reads of its registers, and where it shares memory for them.
#[derive(Debug)]
pub struct GuestPages {
    /// What `words` maps: the pages, then a word of [`CUR_PERF_UNKNOWN`].
    file: File,
    words: MmapRegion,
    vcpus: u16,
    shared: Mutex<SharedPages>,
}

#[derive(Debug, Default)]
struct SharedPages {
    /// The guest's memory, while a guest runs.
    memory: Option<GuestMemoryMmap>,
    /// Where it shares pages of it, if it does.
    at: Option<GuestAddress>,
}

impl GuestPages {
    /// For a guest of `vcpus` vCPUs, which shares nothing yet.
    ///
    /// # Errors
    /// As [`memory_file`]; an error of kind `Other` when mmap(2) refuses the mapping.
    pub fn new(vcpus: u16) -> io::Result<Self> {
        let size = region_size(vcpus) + REGION_STRIDE;
        let file = memory_file(c"vcpufreq-pages")?;
        file.set_len(size)?;
        let whole = FileOffset::new(file.try_clone()?, 0);
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let words = MmapRegion::from_file(whole, size).map_err(io::Error::other)?;
        let pages = Self {
            file,
            words,
            vcpus,
            shared: Mutex::default(),
        };
        if let Some(word) = words_of(&pages.words).get(pages.words().len()) {
            word.store(CUR_PERF_UNKNOWN.to_le(), Relaxed);
        }
        Ok(pages)
    }

    /// A guest starts with this memory, which stays mapped until [`Self::forget`].
    pub fn attach(&self, memory: GuestMemoryMmap) {
        *self.shared() = SharedPages {
            memory: Some(memory),
            at: None,
        };
    }

    /// The guest has ended: its memory isn't used any more.
    pub fn forget(&self) {
        *self.shared() = SharedPages::default();
    }

    /// Stores CUR_PERF_UNKNOWN in the shared pages: the guest reads the registers again.
    pub fn withdraw(&self) {
        self.take_back(&mut self.shared());
    }

    /// The guest shares pages from number `page` on, one for each vCPU; 0: it takes them back. From
    /// pages of before it reads that it has to read the registers.
    ///
    /// # Errors
    /// `EFAULT` when it doesn't share one of them, an error of kind `Other` when one isn't in its
    /// memory: none is used.
    pub fn share(&self, page: u32) -> io::Result<()> {
        let mut shared = self.shared();
        self.take_back(&mut shared);
        shared.at = (page != 0).then(|| GuestAddress(u64::from(page) << SHARED_PAGE_SHIFT));
        if shared.at.is_none() {
            return Ok(());
        }
        let shown = self
            .pages()
            .try_for_each(|page| self.copy(&shared, page, page, USED));
        if shown.is_err() {
            self.take_back(&mut shared);
        }
        shown
    }

    /// Offsets of the vCPUs' pages.
    fn pages(&self) -> impl Iterator<Item = u64> + use<> {
        (0..self.vcpus).map(|vcpu| u64::from(vcpu) * REGION_STRIDE)
    }

    fn take_back(&self, shared: &mut SharedPages) {
        for page in self.pages() {
            // A page that isn't shared has no reader.
            let _ = self.copy(shared, page, region_size(self.vcpus), WORD);
        }
        shared.at = None;
    }

    /// Copies bytes of the file to the guest's pages. Aligned words: the kernel copies each at once,
    /// or a guest reads a mixture of two values until the next copy.
    fn copy(&self, shared: &SharedPages, to: u64, from: u64, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let no_memory = || io::Error::from_raw_os_error(libc::EFAULT);
        let (memory, at) = shared
            .memory
            .as_ref()
            .zip(shared.at)
            .ok_or_else(no_memory)?;
        let to = GuestAddress(at.0.checked_add(to).ok_or_else(no_memory)?);
        let slice = memory.get_slice(to, len).map_err(io::Error::other)?;
        let from = libc::off_t::try_from(from).map_err(io::Error::other)?;
        let guard = slice.ptr_guard_mut();
        // SAFETY: `len` bytes of the guest's memory are mapped there, as long as `memory` is. The
        // kernel writes them; this process has no reference to them.
        let copied =
            unsafe { libc::pread(self.file.as_raw_fd(), guard.as_ptr().cast(), len, from) };
        match usize::try_from(copied) {
            Ok(copied) if copied == len => Ok(()),
            Ok(_) => Err(no_memory()),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }

    fn shared(&self) -> MutexGuard<'_, SharedPages> {
        // Each state that a panic can leave is one of these.
        unpoisoned(self.shared.lock())
    }
}

impl PageMemory for GuestPages {
    fn words(&self) -> &[AtomicU32] {
        let words = words_of(&self.words);
        let of_pages =
            usize::try_from(region_size(self.vcpus)).map_or(0, |bytes| bytes / REG_WIDTH);
        words.get(..of_pages).unwrap_or_default()
    }

    fn stored(&self, index: usize) {
        let mut shared = self.shared();
        let offset = index as u64 * WORD;
        if shared.at.is_some() && self.copy(&shared, offset, offset, WORD).is_err() {
            self.take_back(&mut shared);
        }
    }
}

/// The registers of a guest that may share pages.
pub struct GuestPagesRegion<A, S, E> {
    region: Arc<dyn MmioDevice>,
    device: Arc<Device<A, S, E>>,
    pages: Arc<GuestPages>,
    embedder: Arc<dyn Embedder>,
    warned: AtomicBool,
}

impl<A, S, E> GuestPagesRegion<A, S, E> {
    /// `region` of `device`, with [`REG_SHARED_PAGES`].
    pub fn new(
        region: Arc<dyn MmioDevice>,
        device: Arc<Device<A, S, E>>,
        pages: Arc<GuestPages>,
        embedder: Arc<dyn Embedder>,
    ) -> Self {
        Self {
            region,
            device,
            pages,
            embedder,
            warned: AtomicBool::new(false),
        }
    }

    /// The vCPU whose page has `offset`, if a word of four bytes at `register` is accessed there.
    fn vcpu(&self, offset: u64, len: usize, register: u64) -> Option<VcpuId> {
        let (vcpu, accessed) = page_of(offset)?;
        let is_it = accessed == register && len == REG_WIDTH;
        (is_it && vcpu.0 < self.pages.vcpus).then_some(vcpu)
    }
}

impl<A: Actuator, S: Source, E: Events> MmioDevice for GuestPagesRegion<A, S, E> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.region.read(offset, data);
        if self.vcpu(offset, data.len(), REG_FEATURES).is_some() {
            let bytes = FEATURE_SHARED_PAGES.to_le_bytes();
            data.iter_mut().zip(bytes).for_each(|(to, bit)| *to |= bit);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let vcpu = self.vcpu(offset, data.len(), REG_SHARED_PAGES);
        let (Some(vcpu), Ok(bytes)) = (vcpu, data.try_into()) else {
            return self.region.write(offset, data);
        };
        self.device.count_exit(Some(vcpu), true);
        let shared = self.pages.share(u32::from_le_bytes(bytes));
        if shared.is_err() && !self.warned.swap(true, Relaxed) {
            self.embedder.warn(
                "the guest names pages that it doesn't share: each of its reads exits to the VMM; \
                 build its kernel with CONFIG_ARM_PKVM_GUEST",
            );
        }
    }
}

#[cfg(test)]
#[path = "guest_pages_tests.rs"]
mod tests;
