// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RAM of a VMM's guest, among the VMM's files.
//!
//! A file counts only if the VMM has mapped all of it as shared memory: a disk of the same size is
//! never written to.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, RawFd},
        unix::fs::MetadataExt,
    },
};

use anyhow::{Context, anyhow};

use super::takeover::{fdinfo, has_inode};
use crate::sys;

/// The file of `size` bytes that process `pid` maps whole as shared memory; none as long as there is
/// no such mapping.
///
/// # Errors
/// When this process may not look at that one, or not take its files.
pub fn shared_ram(pid: u32, size: u64) -> anyhow::Result<Option<File>> {
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
    let Some(inode) = maps.lines().find_map(|line| mapped_whole(line, size)) else {
        return Ok(None);
    };
    let process = sys::pidfd_open(pid).context("it can't be watched")?;
    let open = fs::read_dir(format!("/proc/{pid}/fd")).map_err(refused)?;
    // Without a look at each file itself, which another file system may answer late or never.
    for file in open.flatten() {
        let number = file.file_name();
        let number = number.to_str().and_then(|name| name.parse::<RawFd>().ok());
        let Some(number) = number.filter(|number| has_inode(&fdinfo(pid, *number), inode)) else {
            continue;
        };
        let file = File::from(sys::pidfd_getfd(process.as_fd(), number).map_err(refused)?);
        // What a number stands for may have changed meanwhile.
        let found = file.metadata().map_err(refused)?;
        if (found.ino(), found.len()) == (inode, size) && found.is_file() {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// The inode that a line of `maps` has for a shared, writable mapping of `size` bytes from a file's
/// start.
fn mapped_whole(line: &str, size: u64) -> Option<u64> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).ok());
    let (rights, offset) = (words.next()?, words.next()?);
    let inode = words.nth(1)?.parse().ok()?;
    let whole = end?.checked_sub(start?)? == size && u64::from_str_radix(offset, 16) == Ok(0);
    (whole && rights == "rw-s" && inode != 0).then_some(inode)
}

#[cfg(test)]
mod tests {
    //! The RAM is found in a process that shares it, and nothing else.
    use super::*;

    #[test]
    fn a_whole_shared_mapping_is_the_ram() {
        let line = |rights: &str, offset: &str| {
            format!("ffff8000-ffff9000 {rights} {offset} 00:01 77   /memfd:ram (deleted)")
        };
        assert_eq!(mapped_whole(&line("rw-s", "00000000"), 0x1000), Some(77));
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
}
