// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls that have no safe wrapper, and nothing else.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};

/// `struct sched_attr` of `include/uapi/linux/sched/types.h`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub struct SchedAttr {
    size: u32,
    /// SCHED_*.
    pub policy: u32,
    /// SCHED_FLAG_*.
    pub flags: u64,
    nice: i32,
    /// 1 to 99 for FIFO and RR.
    pub priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
    /// The thread's own uclamp.min, 0 to 1024.
    pub util_min: u32,
    /// The thread's own uclamp.max, 0 to 1024.
    pub util_max: u32,
}

/// sched_getattr(2) of a thread; 0 is the caller.
pub fn sched_getattr(tid: i32) -> Result<SchedAttr> {
    let mut attr = SchedAttr::default();
    let size = size_of::<SchedAttr>();
    // SAFETY: `attr` is of the size that is passed, and lives over the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, tid, &raw mut attr, size, 0) };
    ensure!(
        result == 0,
        "sched_getattr({tid}): {}",
        std::io::Error::last_os_error()
    );
    Ok(attr)
}

/// A page of device registers, through /dev/mem.
#[derive(Debug)]
pub struct Registers {
    page: NonNull<u32>,
}

// SAFETY: the mapping is the process's, and accesses are single volatile
// 32-bit loads and stores.
unsafe impl Send for Registers {}

const PAGE: usize = 4096;

impl Registers {
    /// Maps the page at a physical address.
    pub fn map(address: u64) -> Result<Self> {
        let mem = File::options()
            .read(true)
            .write(true)
            .open("/dev/mem")
            .context("/dev/mem")?;
        let offset = libc::off_t::try_from(address)?;
        let flags = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                flags,
                libc::MAP_SHARED,
                mem.as_raw_fd(),
                offset,
            )
        };
        ensure!(
            page != libc::MAP_FAILED,
            "mmap {address:#x}: {}",
            std::io::Error::last_os_error()
        );
        Ok(Self {
            page: NonNull::new(page.cast()).context("mmap gave null")?,
        })
    }

    /// Reads the register at a byte offset.
    pub fn read(&self, offset: usize) -> u32 {
        assert!(offset < PAGE && offset.is_multiple_of(4));
        // SAFETY: within the page, as asserted.
        let register = unsafe { self.page.add(offset / 4) };
        // SAFETY: mapped and aligned.
        unsafe { register.read_volatile() }
    }

    /// Writes the register at a byte offset.
    pub fn write(&self, offset: usize, value: u32) {
        assert!(offset < PAGE && offset.is_multiple_of(4));
        // SAFETY: within the page, as asserted.
        let register = unsafe { self.page.add(offset / 4) };
        // SAFETY: mapped and aligned.
        unsafe { register.write_volatile(value) };
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, unmapped once.
        unsafe { libc::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}
