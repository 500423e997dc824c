// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory that a server shares with a guest, through its VMM: its own, with a header, or pages in
//! the guest's RAM, in the layout of the registers.
//!
//! Its own is a sealed memfd: neither a guest nor its VMM can shrink it under the server, which would
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
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use vcpufreq_device::{
    DeviceConfig, PageMemory, REG_CUR_PERF, REG_PERF_CAP, REG_SET_PERF, REG_WIDTH, REGION_ALIGN,
    ReadReg, Util, VcpuId, VcpuSpec, region_size,
};
use vcpufreq_host::memory_file;
use vm_memory::{FileOffset, MmapRegion};

use super::layout;
use crate::offload::SlotMemory;
use crate::sync::unpoisoned;

/// Seals that keep the size of a file.
const SIZE_SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// `size` bytes of new memory, which no process that has them can take away.
///
/// # Errors
/// As [`memory_file`]; `EINVAL` when it is too large.
pub fn sealed_memory(size: u64) -> io::Result<File> {
    let file = memory_file(c"vcpufreq")?;
    file.set_len(size)?;
    let seals = SIZE_SEALS | libc::F_SEAL_SEAL;
    // SAFETY: takes an open file and a number.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Header and pages, or pages alone.
#[derive(Debug)]
pub struct SharedMemory {
    region: MmapRegion,
    file: File,
    vcpus: u16,
    /// Where vCPU 0's page is in the region, bytes.
    first: usize,
    /// The pages have the layout of the registers: where they are in the file, bytes. It is that of
    /// the guest's RAM, or this memory's own.
    in_ram: Option<u64>,
    /// What describes vCPUs: index and value of each word.
    described: Mutex<BTreeMap<usize, u32>>,
}

impl SharedMemory {
    /// New memory for so many vCPUs; its header is written, its pages are 0.
    ///
    /// # Errors
    /// As [`memory_file`]; an error of kind `Other` when mmap(2) refuses the mapping.
    pub fn new(vcpus: u16) -> io::Result<Self> {
        let file = sealed_memory(layout::size(vcpus))?;
        let memory = Self::map(file, vcpus)?;
        memory.write_header();
        Ok(memory)
    }

    /// The pages of so many vCPUs at byte `offset` of `file`, which is RAM of the guest. They stay as
    /// they are. A VMM that shortens a file of its own that isn't sealed ends the process that maps it
    /// (SIGBUS); a guest can't.
    ///
    /// # Errors
    /// `InvalidData` when the file ends before the pages do, or `offset` isn't a multiple of 64 KiB; an
    /// error of kind `Other` when mmap(2) refuses the mapping.
    pub fn in_guest_ram(file: File, offset: u64, vcpus: u16) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let end = offset.checked_add(region_size(vcpus));
        if offset % REGION_ALIGN != 0 || end.is_none_or(|end| end > metadata.len()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Of hugetlbfs only whole huge pages can be mapped.
        let page = metadata.blksize().max(REGION_ALIGN);
        let start = offset - offset % page;
        let first = usize::try_from(offset - start).map_err(io::Error::other)?;
        let size = (offset - start + region_size(vcpus)).next_multiple_of(page);
        let size = size.min(metadata.len() - start);
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let part = FileOffset::new(file.try_clone()?, start);
        let region = MmapRegion::from_file(part, size).map_err(io::Error::other)?;
        Ok(Self {
            region,
            file,
            vcpus,
            first,
            in_ram: Some(offset),
            described: Mutex::default(),
        })
    }

    /// New pages alone, which describe the vCPUs of `config` as pages in a guest's RAM do: for a guest
    /// of this process, which finds them in the place of the registers.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn in_place_of_registers(config: &DeviceConfig) -> io::Result<Self> {
        let vcpus = u16::try_from(config.vcpus.len()).map_err(io::Error::other)?;
        let file = sealed_memory(region_size(vcpus))?;
        let memory = Self::in_guest_ram(file, 0, vcpus)?;
        memory.start_anew(config);
        Ok(memory)
    }

    /// Where the pages are in their file, if they have the layout of the registers; `None` for those
    /// behind a header.
    #[must_use]
    pub fn offset_in_ram(&self) -> Option<u64> {
        self.in_ram
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
    pub fn create(config: &DeviceConfig) -> io::Result<Self> {
        let vcpus = u16::try_from(config.vcpus.len()).map_err(io::Error::other)?;
        let memory = Self::new(vcpus)?;
        memory.start_anew(config);
        Ok(memory)
    }

    /// Forgets what a guest wrote, for one that starts anew. The registers are the device's to show
    /// again.
    pub(super) fn start_anew(&self, config: &DeviceConfig) {
        let words = match self.in_ram {
            Some(_) => self.words(),
            None => self.words_of_all(),
        };
        for word in words {
            word.store(0, Relaxed);
        }
        let capacities = config.guest_capacities();
        let specs = config.vcpus.iter().zip(capacities);
        for (vcpu, (spec, capacity)) in (0..self.vcpus).map(VcpuId).zip(specs) {
            self.describe(vcpu, spec, capacity, &[]);
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
            first: layout::PAGES,
            in_ram: None,
            described: Mutex::default(),
        })
    }

    /// In a guest's RAM there is none.
    fn write_header(&self) {
        if self.in_ram.is_some() {
            return;
        }
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

    /// Writes a vCPU's table, capacity and power for the guest; in its RAM what a driver of the
    /// registers reads of a vCPU with this maximum and no table, and the maximum as cur_perf.
    pub fn describe(&self, vcpu: VcpuId, spec: &VcpuSpec, capacity: Util, microwatts: &[u32]) {
        let mut described = self.described();
        let mut describe = |offset, value| {
            let index = self.word(vcpu, offset);
            described.insert(index, value);
            self.store(index, value);
        };
        if self.in_ram.is_some() {
            self.store(self.word(vcpu, REG_CUR_PERF), spec.table.max().0);
            describe(ReadReg::PerftblLen.offset(), 1);
            describe(ReadReg::PerftblRd.offset(), spec.table.max().0);
            return describe(ReadReg::PerfDomain.offset(), spec.domain.0);
        }
        let entries = spec.table.entries();
        describe(layout::CAPACITY, capacity.get().into());
        let table = (layout::PERFTBL..).step_by(REG_WIDTH).zip(entries);
        table.for_each(|(offset, khz)| describe(offset, khz.0));
        let power = (layout::POWER..).step_by(REG_WIDTH).zip(microwatts);
        let power = power.take(entries.len());
        power.for_each(|(offset, microwatts)| describe(offset, *microwatts));
    }

    /// Writes all of that again, and the header. Returns whether other values were there: a snapshot or a
    /// migration has brought another host's, or the guest has written them.
    pub fn tell_again(&self) -> bool {
        self.write_header();
        let mut differs = false;
        for (index, value) in &*self.described() {
            let word = self.words_of_all().get(*index);
            let found = word.map_or(0, |word| u32::from_le(word.load(Relaxed)));
            differs |= found != *value && found != 0;
            self.store(*index, *value);
        }
        differs
    }

    fn described(&self) -> MutexGuard<'_, BTreeMap<usize, u32>> {
        unpoisoned(self.described.lock())
    }

    /// The guest's request for `vcpu`, kHz: any value.
    pub fn requested(&self, vcpu: VcpuId) -> u32 {
        let word = self.words_of_all().get(self.request_word(vcpu));
        word.map_or(0, |word| u32::from_le(word.load(Relaxed)))
    }

    /// The index of a word at `offset` in the page of `vcpu`, of all words.
    fn word(&self, vcpu: VcpuId, offset: u64) -> usize {
        self.first / REG_WIDTH + layout::word(vcpu, offset)
    }

    fn request_word(&self, vcpu: VcpuId) -> usize {
        self.word(vcpu, REG_SET_PERF)
    }

    /// Marks cur_perf and perf_cap of all vCPUs: the server ends. In a guest's RAM both become the
    /// vCPU's maximum, since a driver of the registers knows no mark.
    pub fn say_gone(&self) {
        for vcpu in (0..self.vcpus).map(VcpuId) {
            for register in [REG_CUR_PERF, REG_PERF_CAP] {
                let maximum = self.word(vcpu, ReadReg::PerftblRd.offset());
                let gone = match self.in_ram {
                    Some(_) => self.described().get(&maximum).copied().unwrap_or(0),
                    None => layout::GONE,
                };
                self.store(self.word(vcpu, register), gone);
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
            self.store(self.request_word(vcpu), khz);
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
        let first = self.first / REG_WIDTH;
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
    use vcpufreq_device::{DomainId, Khz, PerfTable};

    fn spec(table: &[u32], domain: u32) -> VcpuSpec {
        VcpuSpec {
            table: PerfTable::try_from(table.iter().copied().map(Khz).collect::<Vec<_>>()).unwrap(),
            capacity: Util::MAX,
            domain: DomainId(domain),
        }
    }

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
        let spec = spec(&[500, 1000], 0);
        memory.describe(VcpuId(1), &spec, Util::new(329).unwrap(), &[7, 9, 11]);
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
        memory.store(memory.word(VcpuId(1), 0x200), 9);
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

    /// The RAM of a guest, whose last MiB has the pages.
    fn ram() -> (File, u64) {
        let file = memory_file(c"ram").unwrap();
        file.set_len(4 << 20).unwrap();
        (file, 3 << 20)
    }

    #[test]
    fn pages_in_ram_are_a_drivers_of_the_registers() {
        let (file, offset) = ram();
        let memory = SharedMemory::in_guest_ram(file.try_clone().unwrap(), offset, 2).unwrap();
        memory.describe(VcpuId(1), &spec(&[500, 1000], 7), Util::MAX, &[7, 9]);
        let all = SharedMemory::in_guest_ram(file, 2 << 20, 2).unwrap();
        let words = || {
            let page = &memory.words()[0x400..];
            [0, 1, 2, 4, 5, 0x41, 0x80].map(|word| page[word].load(Relaxed))
        };
        assert_eq!(words(), [1000, 0, 1, 1000, 7, 0, 0]);
        // A guest writes to all of it; nothing of that is taken for true.
        memory
            .words()
            .iter()
            .for_each(|word| word.store(9, Relaxed));
        memory.tell_again();
        assert_eq!(words(), [9, 9, 1, 1000, 7, 9, 9]);
        assert_eq!(memory.requested(VcpuId(1)), 9);
        memory.say_gone();
        assert_eq!(words()[0], 1000);
        // The RAM around is as it was.
        assert!(all.words().iter().all(|word| word.load(Relaxed) == 0));
    }

    #[test]
    fn pages_past_the_end_of_ram_are_refused() {
        let (file, offset) = ram();
        let pages = |offset, vcpus| {
            SharedMemory::in_guest_ram(file.try_clone().unwrap(), offset, vcpus).map(drop)
        };
        assert!(pages(offset, 256).is_ok());
        assert!(pages(offset, 257).is_err());
        assert!(pages(offset + 0x1000, 1).is_err(), "not a multiple");
        assert!(pages(u64::MAX - 0xffff, 1).is_err());
    }

    #[test]
    fn the_memory_cannot_be_shrunk() {
        let memory = SharedMemory::new(1).unwrap();
        assert!(memory.file.set_len(0).is_err());
        assert!(memory.file.set_len(1 << 30).is_err());
    }
}
