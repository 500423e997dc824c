// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Maps of the programs as memory of this process, and ioctls: the only place with unsafe code.

#![expect(unsafe_code, reason = "maps are mapped memory, and libbpf is C")]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use crate::layout::{
    ControlEntry, CpuEntry, DispatchCpuEntry, DomainEntry, PageEntry, PolicyEntry, SlotsEntry,
    VcpuEntry, VmEntry,
};

/// What an array map holds.
///
/// # Safety
/// Every bit pattern is a value, and whatever the programs write is atomic.
pub(crate) unsafe trait MapEntry {}

// SAFETY: atomic integers.
unsafe impl MapEntry for CpuEntry {}
// SAFETY: atomic integers, and padding that is never written.
unsafe impl MapEntry for DispatchCpuEntry {}
// SAFETY: atomic integers.
unsafe impl MapEntry for SlotsEntry {}
// SAFETY: atomic integers.
unsafe impl MapEntry for VcpuEntry {}
// SAFETY: atomic integers, and padding that is never written.
unsafe impl MapEntry for DomainEntry {}
// SAFETY: atomic integers.
unsafe impl MapEntry for VmEntry {}
// SAFETY: atomic integers.
unsafe impl MapEntry for PageEntry {}
// SAFETY: atomic integers.
unsafe impl MapEntry for ControlEntry {}

/// An array map with the flag BPF_F_MMAPABLE.
#[derive(Debug)]
pub(crate) struct Mapped<T> {
    start: NonNull<T>,
    entries: usize,
    of: PhantomData<T>,
}

// SAFETY: entries are shared with the kernel all the time, as `MapEntry` promises.
unsafe impl<T: MapEntry> Send for Mapped<T> {}
// SAFETY: the same.
unsafe impl<T: MapEntry> Sync for Mapped<T> {}

impl<T: MapEntry> Mapped<T> {
    /// Maps an array map of that many entries, each of the size of `T` and a multiple of 8.
    pub(crate) fn new(map: BorrowedFd<'_>, entries: usize) -> io::Result<Self> {
        const { assert!(size_of::<T>() % 8 == 0) };
        assert!(entries > 0);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping where the kernel chooses; it refuses more than the map has.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                entries * size_of::<T>(),
                access,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self {
            start,
            entries,
            of: PhantomData,
        })
    }

    /// Its entries.
    pub(crate) fn all(&self) -> &[T] {
        // SAFETY: mapped as long as this lives, page-aligned, `entries` long; `MapEntry` allows it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.entries) }
    }

    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.all().get(index)
    }

    /// All of them as words; `T` is made of nothing else.
    pub(crate) fn words(&self) -> &[AtomicU32] {
        // SAFETY: mapped as long as this lives, page-aligned, `len` bytes of integers.
        unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len() / size_of::<u32>())
        }
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.start.cast()
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.entries * size_of::<T>()
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, unmapped once.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.entries * size_of::<T>()) };
    }
}

/// A policy as bytes, which is how a map takes it.
pub(crate) fn policy_bytes(entry: &PolicyEntry) -> &[u8] {
    // SAFETY: integers without padding between or behind them, as its size shows.
    unsafe {
        std::slice::from_raw_parts(
            std::ptr::from_ref(entry).cast::<u8>(),
            size_of::<PolicyEntry>(),
        )
    }
}

/// How often the kernel did not run a program that it had preempted on the same CPU.
pub(crate) fn recursion_misses(program: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(program_info(program)?.recursion_misses)
}

/// A program's name, as the kernel cuts it.
pub(crate) fn program_name(program: BorrowedFd<'_>) -> io::Result<String> {
    let name = program_info(program)?.name.into_iter();
    let name = name.map(|byte| char::from(byte.to_ne_bytes()[0]));
    Ok(name.take_while(|letter| *letter != '\0').collect())
}

fn program_info(program: BorrowedFd<'_>) -> io::Result<libbpf_rs::libbpf_sys::bpf_prog_info> {
    let mut info = libbpf_rs::libbpf_sys::bpf_prog_info::default();
    let mut len = u32::try_from(size_of_val(&info)).map_err(io::Error::other)?;
    let fd = program.as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes of the structure, and no array that it names.
    let done =
        unsafe { libbpf_rs::libbpf_sys::bpf_prog_get_info_by_fd(fd, &raw mut info, &raw mut len) };
    match done {
        0 => Ok(info),
        error => Err(io::Error::from_raw_os_error(error.saturating_neg())),
    }
}

/// A link by the kernel's number: it stays attached as long as the descriptor is open.
pub(crate) fn link_by_id(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: it takes a number, and returns a descriptor or an error.
    let fd = unsafe { libbpf_rs::libbpf_sys::bpf_link_get_fd_by_id(id) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: a new descriptor that nothing else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the kernel lists a map. It is not opened: of an array of programs that has no user any
/// more, an open and a close that come too soon after another keep it for ever
/// (`prog_array_map_clear` in kernel/bpf/arraymap.c).
pub(crate) fn lists_map(id: u32) -> bool {
    let mut next = 0;
    // SAFETY: the kernel writes one number.
    let found =
        unsafe { libbpf_rs::libbpf_sys::bpf_map_get_next_id(id.saturating_sub(1), &raw mut next) };
    found == 0 && next == id
}

/// An ioctl whose argument is that structure, by its number.
pub(crate) fn ioctl<T>(file: BorrowedFd<'_>, number: u32, argument: &mut T) -> io::Result<()> {
    let size = usize::try_from((number >> 16) & 0x3fff).unwrap_or(0);
    assert!(size == size_of::<T>());
    // SAFETY: the kernel reads and writes that structure, and no more than its size.
    let result = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            libc::Ioctl::from(number),
            std::ptr::from_mut(argument),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
