// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory that a server shares with a guest, through its VMM.
//!
//! It is a sealed memfd: neither a guest nor its VMM can shrink it under the server, which would
//! end that by SIGBUS. The server keeps its own copy of each value and stores it again: a guest, a
//! snapshot or a migration can overwrite the memory. The server loads nothing but set_perf from it.

#![expect(
    unsafe_code,
    reason = "seals are system calls, and the mapping is atomics"
)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_memory::{FileOffset, MmapRegion};

use super::layout;
use crate::host::memory_file;
use crate::kvm::offload::SlotMemory;
use crate::regs::{REG_WIDTH, region_size};
use crate::{DeviceConfig, PageMemory, PerfTable, REG_CUR_PERF, REG_PERF_CAP, Util, VcpuId};

/// Seals that keep the size of a file.
const SIZE_SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Header and pages.
#[derive(Debug)]
pub struct SharedMemory {
    region: MmapRegion,
    file: File,
    vcpus: u16,
    /// What describes vCPUs: index and value of each word.
    described: Mutex<BTreeMap<usize, u32>>,
}

impl SharedMemory {
    /// New memory for so many vCPUs; its header is written, its pages are 0.
    ///
    /// # Errors
    /// As [`memory_file`]; an error of kind `Other` when mmap(2) refuses the mapping.
    pub fn new(vcpus: u16) -> io::Result<Self> {
        let size = layout::size(vcpus);
        let file = memory_file(c"vcpufreq")?;
        file.set_len(size)?;
        let seals = SIZE_SEALS | libc::F_SEAL_SEAL;
        // SAFETY: takes an open file and a number.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let memory = Self::map(file, vcpus)?;
        memory.write_header();
        Ok(memory)
    }

    /// The memory of a server before this one; its header is written anew, its pages stay.
    ///
    /// # Errors
    /// `InvalidData` when the file hasn't the size for so many vCPUs, or that isn't sealed; an
    /// error of kind `Other` when mmap(2) refuses the mapping.
    pub fn adopt(file: File, vcpus: u16) -> io::Result<Self> {
        // SAFETY: takes an open file.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        let all = SIZE_SEALS | libc::F_SEAL_SEAL;
        let sealed = seals >= 0 && seals & all == all;
        if !sealed || file.metadata()?.len() != layout::size(vcpus) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let memory = Self::map(file, vcpus)?;
        memory.write_header();
        Ok(memory)
    }

    /// New memory that describes the vCPUs of `config`; what they draw is unknown.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of(config: &DeviceConfig) -> io::Result<Self> {
        let vcpus = u16::try_from(config.vcpus.len()).map_err(io::Error::other)?;
        let memory = Self::new(vcpus)?;
        memory.start_anew(config);
        Ok(memory)
    }

    /// Forgets what a guest wrote, for one that starts anew. The registers are the device's to show
    /// again.
    pub(super) fn start_anew(&self, config: &DeviceConfig) {
        for word in self.words_of_all() {
            word.store(0, Relaxed);
        }
        let capacities = config.guest_capacities();
        let specs = config.vcpus.iter().zip(capacities);
        for (vcpu, (spec, capacity)) in (0..self.vcpus).map(VcpuId).zip(specs) {
            self.describe(vcpu, &spec.table, capacity, &[]);
        }
        self.write_header();
    }

    fn map(file: File, vcpus: u16) -> io::Result<Self> {
        let size = usize::try_from(layout::size(vcpus)).map_err(io::Error::other)?;
        let whole = FileOffset::new(file.try_clone()?, 0);
        let region = MmapRegion::from_file(whole, size).map_err(io::Error::other)?;
        Ok(Self {
            region,
            file,
            vcpus,
            described: Mutex::default(),
        })
    }

    fn write_header(&self) {
        let used = u32::try_from(layout::used(self.vcpus)).unwrap_or(u32::MAX);
        for (offset, value) in [
            (layout::VERSION, layout::VERSION_VALUE),
            (layout::FEATURES, 0),
            (layout::VCPUS, self.vcpus.into()),
            (layout::SIZE, used),
            (layout::PEER, layout::SERVER.into()),
            (layout::MAGIC, layout::MAGIC_VALUE),
        ] {
            self.store(offset / REG_WIDTH, value);
        }
    }

    /// Writes a vCPU's table, capacity and power for the guest.
    pub fn describe(&self, vcpu: VcpuId, table: &PerfTable, capacity: Util, microwatts: &[u32]) {
        let capacity = (layout::word(vcpu, layout::CAPACITY), capacity.get().into());
        let entries = table.entries();
        let first = layout::word(vcpu, layout::PERFTBL);
        let table = (first..).zip(entries.iter().map(|khz| khz.0));
        let first = layout::word(vcpu, layout::POWER);
        let power = (first..).zip(microwatts.iter().copied().take(entries.len()));
        let words = [capacity].into_iter().chain(table).chain(power);
        for (index, value) in words {
            self.described().insert(index, value);
            self.store(index, value);
        }
    }

    /// Writes all of that again, and the header.
    pub fn tell_again(&self) {
        self.write_header();
        for (index, value) in &*self.described() {
            self.store(*index, *value);
        }
    }

    fn described(&self) -> MutexGuard<'_, BTreeMap<usize, u32>> {
        self.described
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest's request for `vcpu`, kHz: any value.
    pub fn requested(&self, vcpu: VcpuId) -> u32 {
        let word = self.words_of_all().get(layout::request_word(vcpu));
        word.map_or(0, |word| u32::from_le(word.load(Relaxed)))
    }

    /// Marks cur_perf and perf_cap of all vCPUs: the server ends.
    pub fn say_gone(&self) {
        for vcpu in (0..self.vcpus).map(VcpuId) {
            for register in [REG_CUR_PERF, REG_PERF_CAP] {
                self.store(layout::word(vcpu, register), layout::GONE);
            }
        }
    }

    /// The file that a VMM maps.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The same, borrowed.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// How many vCPUs it has pages for.
    pub fn vcpus(&self) -> u16 {
        self.vcpus
    }

    /// The word at byte `offset` of the memory, whatever a guest made of it; 0 outside.
    pub(super) fn load(&self, offset: u64) -> u32 {
        let index = usize::try_from(offset).unwrap_or(usize::MAX) / REG_WIDTH;
        let word = self.words_of_all().get(index);
        word.map_or(0, |word| u32::from_le(word.load(Relaxed)))
    }

    /// Takes the request back of a vCPU that was unplugged.
    pub fn withdraw(&self, vcpu: VcpuId) {
        self.store_request(vcpu, 0);
    }

    /// A guest's request, if its store has exited.
    pub(super) fn store_request(&self, vcpu: VcpuId, khz: u32) {
        if vcpu.0 < self.vcpus {
            self.store(layout::request_word(vcpu), khz);
        }
    }

    fn store(&self, index: usize, value: u32) {
        if let Some(word) = self.words_of_all().get(index) {
            word.store(value.to_le(), Relaxed);
        }
    }

    fn words_of_all(&self) -> &[AtomicU32] {
        let len = self.region.size() / REG_WIDTH;
        // SAFETY: the mapping is readable and writable, starts on a page, has `len` words, and lives
        // as long as `self`; the file's seals keep it backed. A guest changes words at any time:
        // they are only used as atomics.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr().cast(), len) }
    }
}

/// The pages alone: the device's register pages.
impl PageMemory for SharedMemory {
    fn words(&self) -> &[AtomicU32] {
        let first = layout::PAGES / REG_WIDTH;
        let pages = usize::try_from(region_size(self.vcpus)).unwrap_or(0) / REG_WIDTH;
        &self.words_of_all()[first..first + pages]
    }

    fn stored(&self, _index: usize) {}
}

/// All of it.
impl SlotMemory for SharedMemory {
    fn address(&self) -> u64 {
        self.region.as_ptr().expose_provenance() as u64
    }

    fn size(&self) -> u64 {
        self.region.size() as u64
    }

    fn guest_writes(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    //! What the guest reads is at its place, and the memory cannot be taken away.
    use super::*;
    use crate::Khz;

    fn word(memory: &SharedMemory, byte: usize) -> u32 {
        memory.words_of_all()[byte / REG_WIDTH].load(Relaxed)
    }

    #[test]
    fn the_header_says_what_follows() {
        let memory = SharedMemory::new(3).unwrap();
        assert_eq!(word(&memory, layout::MAGIC), layout::MAGIC_VALUE);
        assert_eq!(word(&memory, layout::VERSION), 1);
        assert_eq!(word(&memory, layout::VCPUS), 3);
        assert_eq!(word(&memory, layout::SIZE), 0x1000 + 0x10000);
        assert_eq!(word(&memory, layout::PEER), 1);
    }

    #[test]
    fn a_vcpus_page_has_its_table() {
        let memory = SharedMemory::new(2).unwrap();
        let table = PerfTable::try_from(vec![Khz(500), Khz(1000)]).unwrap();
        memory.describe(VcpuId(1), &table, Util::new(329).unwrap(), &[7, 9, 11]);
        let page = layout::PAGES + 0x1000;
        assert_eq!(word(&memory, page + 0x104), 329);
        assert_eq!(
            [0x200, 0x204].map(|at| word(&memory, page + at)),
            [500, 1000]
        );
        assert_eq!(
            [0x300, 0x304, 0x308].map(|at| word(&memory, page + at)),
            [7, 9, 0]
        );
        memory.store(layout::word(VcpuId(1), 0x200), 9);
        memory.store(layout::MAGIC / REG_WIDTH, 9);
        memory.tell_again();
        assert_eq!(word(&memory, page + 0x200), 500);
        assert_eq!(word(&memory, layout::MAGIC), layout::MAGIC_VALUE);
        assert_eq!(memory.requested(VcpuId(1)), 0);
        memory.words()[(0x1000 + 4) / 4].store(700, Relaxed);
        assert_eq!(memory.requested(VcpuId(1)), 700);
        memory.say_gone();
        assert_eq!([0, 0x108].map(|at| word(&memory, page + at)), [u32::MAX; 2]);
    }

    #[test]
    fn a_later_server_finds_what_the_guest_requested() {
        let first = SharedMemory::new(2).unwrap();
        first.words()[(0x1000 + 4) / 4].store(700, Relaxed);
        first.store(layout::VERSION / REG_WIDTH, 9);
        let file = || first.file.try_clone().unwrap();
        let next = SharedMemory::adopt(file(), 2).unwrap();
        assert_eq!(next.requested(VcpuId(1)), 700);
        assert_eq!(word(&next, layout::VERSION), 1, "not what a guest wrote");
        assert!(SharedMemory::adopt(file(), 20).is_err(), "another size");
        let unsealed = tempfile::tempfile().unwrap();
        unsealed.set_len(layout::size(2)).unwrap();
        assert!(SharedMemory::adopt(unsealed, 2).is_err());
    }

    #[test]
    fn the_memory_cannot_be_shrunk() {
        let memory = SharedMemory::new(1).unwrap();
        assert!(memory.file.set_len(0).is_err());
        assert!(memory.file.set_len(1 << 30).is_err());
    }
}
