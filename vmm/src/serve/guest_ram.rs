// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RAM of a VMM's guest, among the VMM's files, and the registers in it.
//!
//! A file counts only if the VMM has mapped all of it as shared memory: a disk of the same size is
//! never written to.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{BorrowedFd, RawFd},
        unix::fs::MetadataExt,
    },
    time::Duration,
};

use anyhow::{Context, anyhow, bail, ensure};
use vcpufreq_bridge::shm::{SharedMemory, vcpu_threads};
use vcpufreq_host::HostRoot;
use vcpufreq_vm::probe::PathFacts;

use super::{
    Served, SharedWithVmm,
    takeover::{fdinfo, has_inode},
};
use crate::{
    config::ram_place::RamPlace,
    options::KVM_DEVICE,
    patience::{patience, patiently},
    sys,
};

/// How often a VMM's files are looked at for its guest's RAM.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// And how long it may take to make that.
const WITHIN: Duration = patience(60);

/// Which registers are looked for in a VMM's RAM.
#[derive(Clone, Copy)]
pub struct WantedRam {
    /// Where they are.
    pub place: RamPlace,
    /// How the hint for a VMM without such RAM goes on.
    pub or: &'static str,
}

/// The RAM with them of a VMM that is starting or runs: its number, and what watches it. None if it
/// `has_ended`. Nothing is written to it.
///
/// # Errors
/// When the VMM shares its RAM with no other process, makes none in time, or this process may not take
/// its files.
pub fn ram_of(
    (pid, process): (u32, BorrowedFd<'_>),
    WantedRam { place, or }: WantedRam,
    has_ended: &mut dyn FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<Option<File>> {
    let host = HostRoot::default();
    let file = patiently(WITHIN, "for QEMU to make its guest's RAM", |part| {
        // It has its memory before it has its vCPUs.
        let threads = vcpu_threads(&host, pid, 1);
        let ram = shared_ram((pid, process), place.size);
        // What is looked at of one that ends, or has ended, fails in many ways.
        if has_ended()? {
            return Ok(Some(None));
        }
        let ram = ram?;
        if ram.is_none() && threads.iter().any(Option::is_some) {
            bail!(
                "QEMU shares no RAM of {} MiB, its guest's, with other processes; give its memory \
                 object share=on (libvirt: <access mode='shared'/>), {or}",
                place.size >> 20
            );
        }
        if ram.is_none() {
            part.is_ready(&[], LOOK_EVERY)?;
        }
        Ok(ram.map(Some))
    });
    let Some(file) = file? else {
        bail!(
            "QEMU has made neither RAM nor vCPUs within {} s; leave out -preconfig, or end what it \
             waits for",
            WITHIN.as_secs()
        );
    };
    Ok(file)
}

/// The registers at `place` in `file`, a guest's RAM.
///
/// # Errors
/// When it can't be mapped; what of the vCPUs' options no device can have.
pub fn registers_in(file: File, place: RamPlace, served: &Served) -> anyhow::Result<SharedWithVmm> {
    let memory = SharedMemory::in_guest_ram(file, place.offset, served.count()?);
    let memory = memory.context("can't map the guest's RAM")?;
    let shared = SharedWithVmm::in_guest_ram(memory);
    shared.describe(served)?;
    Ok(shared)
}

/// The file of `size` bytes that process `pid` maps whole as shared memory; none as long as there is
/// no such mapping.
///
/// # Errors
/// When this process may not look at that one, or not take its files; when there are several such
/// files.
fn shared_ram((pid, process): (u32, BorrowedFd<'_>), size: u64) -> anyhow::Result<Option<File>> {
    let refused = |error: io::Error| {
        anyhow!(
            "the RAM of process {pid} can't be taken ({error}); run this as its user, or with \
             CAP_SYS_PTRACE"
        )
    };
    let maps = match fs::read_to_string(format!("/proc/{pid}/maps")) {
        // Of a process that has ended.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        maps => maps.map_err(refused)?,
    };
    let Some((device, inode)) = the_only_one(&maps, size)? else {
        return Ok(None);
    };
    let open = fs::read_dir(format!("/proc/{pid}/fd")).map_err(refused)?;
    // Without a look at each file itself, which another file system may answer late or never.
    for file in open.flatten() {
        let number = file.file_name();
        let number = number.to_str().and_then(|name| name.parse::<RawFd>().ok());
        let Some(number) = number.filter(|number| has_inode(&fdinfo(pid, *number), inode)) else {
            continue;
        };
        let file = match sys::pidfd_getfd(process, number) {
            // It was closed meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => continue,
            file => File::from(file.map_err(refused)?),
        };
        // What a number stands for may have changed meanwhile.
        let found = file.metadata().map_err(refused)?;
        let is_it = (found.dev(), found.ino(), found.len()) == (device, inode, size);
        if is_it && found.is_file() {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Checks that a guest's loads and stores there see the host's cache, and the host theirs: a line of
/// it has a register of each side, so that cleaning it could undo a request.
///
/// # Errors
/// When KVM doesn't run its guests so, or there is no KVM.
pub fn check_coherent() -> anyhow::Result<()> {
    check_facts(PathFacts::ask(KVM_DEVICE.as_ref(), false))
}

fn check_facts(facts: Result<PathFacts, String>) -> anyhow::Result<()> {
    let facts = facts.map_err(anyhow::Error::msg)?;
    ensure!(
        facts.coherent,
        "registers in a guest's RAM need a CPU with FEAT_S2FWB: its accesses go past this host's \
         caches; leave --path ram out, or --dtb of serve"
    );
    Ok(())
}

/// Device and inode of the file of `size` bytes that is mapped whole by `maps`.
///
/// # Errors
/// When several are.
fn the_only_one(maps: &str, size: u64) -> anyhow::Result<Option<(u64, u64)>> {
    let mut files = maps.lines().filter_map(|line| mapped_whole(line, size));
    let first = files.next();
    ensure!(
        files.all(|file| Some(file) == first),
        "QEMU shares several files of {} MiB; give its guest's RAM a size that no other has",
        size >> 20
    );
    Ok(first)
}

/// Device and inode of the file that a line of `maps` has a shared, writable mapping of, `size` bytes
/// from the file's start.
fn mapped_whole(line: &str, size: u64) -> Option<(u64, u64)> {
    let hex = |number| u64::from_str_radix(number, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (rights, offset) = (words.next()?, words.next()?);
    let (major, minor) = words.next()?.split_once(':')?;
    let device = libc::makedev(
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    );
    let inode = words.next()?.parse().ok()?;
    let whole = hex(end)?.checked_sub(hex(start)?)? == size && hex(offset) == Some(0);
    (whole && rights == "rw-s" && inode != 0).then_some((device, inode))
}

#[cfg(test)]
mod tests {
    //! The RAM is found in a process that shares it, and nothing else. A host whose CPUs can't share
    //! it is refused.
    use super::*;

    #[test]
    fn a_whole_shared_mapping_is_the_ram() {
        let line = |rights: &str, offset: &str| {
            format!("ffff8000-ffff9000 {rights} {offset} 00:1b 77   /memfd:ram (deleted)")
        };
        let file = (libc::makedev(0, 0x1b), 77);
        assert_eq!(mapped_whole(&line("rw-s", "00000000"), 0x1000), Some(file));
        for (rights, offset, size) in [
            ("rw-p", "00000000", 0x1000),
            ("r--s", "00000000", 0x1000),
            ("rw-s", "00001000", 0x1000),
            ("rw-s", "00000000", 0x2000),
        ] {
            assert_eq!(mapped_whole(&line(rights, offset), size), None, "{rights}");
        }
        assert_eq!(
            mapped_whole("ffff8000-ffff9000 rw-s 00000000 00:00 0", 0x1000),
            None
        );
        assert_eq!(mapped_whole("", 0x1000), None);
    }

    #[test]
    fn two_files_of_the_rams_size_are_refused() {
        let maps = |files: &[&str]| -> String {
            let line = |file| format!("ffff8000-ffff9000 rw-s 00000000 {file} /memfd:ram\n");
            files.iter().map(line).collect()
        };
        let file = Some((libc::makedev(0, 1), 77));
        let found = |files: &[&str]| the_only_one(&maps(files), 0x1000);
        assert_eq!(found(&[]).unwrap(), None);
        assert_eq!(found(&["00:01 77"]).unwrap(), file);
        // The same file, which QEMU has mapped twice.
        assert_eq!(found(&["00:01 77", "00:01 77"]).unwrap(), file);
        for other in ["00:01 78", "00:02 77"] {
            let error = found(&["00:01 77", other]).unwrap_err().to_string();
            assert!(error.contains("several files"), "{error}");
        }
    }

    #[test]
    fn caches_that_a_guest_goes_past_are_refused() {
        let facts = |coherent| PathFacts {
            protected: false,
            readonly_slots: Ok(()),
            ioeventfds: Ok(()),
            coherent,
        };
        assert!(check_facts(Ok(facts(true))).is_ok());
        let error = check_facts(Ok(facts(false))).unwrap_err().to_string();
        assert!(error.contains("FEAT_S2FWB"), "{error}");
        assert!(check_facts(Err("no KVM".to_owned())).is_err());
    }
}
