// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A register of a device, by its physical address.
#![expect(unsafe_code, reason = "a mapping of /dev/mem has no safe wrapper")]

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context, Result, ensure};
use nix::fcntl::OFlag;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::{SysconfVar, sysconf};

/// Reads the 32 bits at a physical address. Where a driver has the device, the kernel needs
/// `iomem=relaxed`.
pub fn read(address: u64) -> Result<u32> {
    ensure!(address % 4 == 0, "{address:#x} is no register");
    let memory = File::options()
        .read(true)
        .custom_flags(OFlag::O_SYNC.bits())
        .open("/dev/mem")
        .context("opening /dev/mem; the kernel needs CONFIG_DEVMEM")?;
    let page = sysconf(SysconfVar::PAGE_SIZE)?.context("no page size")?;
    let page = u64::try_from(page)?;
    let length = NonZeroUsize::new(usize::try_from(page)?).context("no page size")?;
    let at = file_offset(address - address % page)?;
    let (flags, prot) = (MapFlags::MAP_SHARED, ProtFlags::PROT_READ);
    // SAFETY: the kernel chooses where the mapping goes, so it replaces none.
    let mapping = unsafe { mmap(None, length, prot, flags, &memory, at) }
        .with_context(|| format!("mapping {address:#x}"))?;
    let offset = usize::try_from(address % page)?;
    // SAFETY: the offset is within the page that was mapped.
    let register = unsafe { mapping.cast::<u32>().byte_add(offset) };
    // SAFETY: mapped, and aligned as the address is.
    let value = unsafe { register.read_volatile() };
    // SAFETY: nothing refers to the mapping any more.
    unsafe { munmap(mapping, length.get()) }?;
    Ok(value)
}

fn file_offset(address: u64) -> Result<nix::libc::off_t> {
    nix::libc::off_t::try_from(address).with_context(|| format!("{address:#x} is no address"))
}
