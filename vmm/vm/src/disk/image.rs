// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file that a disk's sectors are in.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, anyhow, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// The most that a request may transfer. Linux asks for 4 MiB at most.
const REQUEST_MAX: u64 = 16 << 20;

/// A disk's file, open and locked.
#[derive(Debug)]
pub struct DiskImage {
    file: Flock<File>,
    sectors: u64,
}

impl DiskImage {
    /// Opens a file or a block device, and keeps other programs that lock it off. A device is used past
    /// the host's page cache: the guest has one of its own.
    ///
    /// # Errors
    /// Why it can be no disk, and what to do.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let is_device = fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(if is_device { libc::O_DIRECT } else { 0 })
            .open(path);
        let file = file.map_err(|why| {
            anyhow!("can't open disk {name}: {why}; check the path and its permissions")
        })?;
        let mut file =
            Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, why)| match why {
                Errno::EWOULDBLOCK => {
                    anyhow!("disk {name} is in use; end the program that uses it")
                }
                why => anyhow!("can't lock disk {name} ({why}); give a file or a block device"),
            })?;
        let bytes = file.seek(SeekFrom::End(0));
        let bytes = bytes
            .with_context(|| format!("disk {name} has no size; give a file or a block device"))?;
        if bytes < SECTOR {
            bail!("disk {name} has no sector of {SECTOR} bytes; make it larger (truncate -s 1G)");
        }
        Ok(Self {
            file,
            sectors: bytes / SECTOR,
        })
    }

    /// How many there are.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Bytes of all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sectors.saturating_mul(SECTOR)
    }

    /// The file, and where `len` bytes begin in it at a sector; `None` if it has not all of these, or
    /// they are no sectors or too many.
    pub fn at(&self, sector: u64, len: u64) -> Option<(BorrowedFd<'_>, libc::off_t)> {
        let start = sector.checked_mul(SECTOR)?;
        let end = start.checked_add(len)?;
        if len % SECTOR != 0 || len > REQUEST_MAX || end > self.bytes() {
            return None;
        }
        Some((self.file.as_fd(), start.try_into().ok()?))
    }

    /// Waits until what was written is on the medium.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a disk ends where its file does; a second user of it is refused; each refusal is one
    //! line with what to do.
    use super::*;

    #[test]
    fn a_request_stays_within_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(3 * SECTOR + 100).unwrap();
        let image = DiskImage::open(file.path()).unwrap();
        assert_eq!((image.sectors(), image.bytes()), (3, 3 * SECTOR));
        for (sector, len, fits) in [
            (0, 3 * SECTOR, true),
            (2, SECTOR, true),
            (3, 0, true),
            (0, 0, true),
            (2, 2 * SECTOR, false),
            (0, 100, false),
            (4, 0, false),
            (u64::MAX, SECTOR, false),
            (u64::MAX / SECTOR, u64::MAX, false),
        ] {
            assert_eq!(image.at(sector, len).is_some(), fits, "{sector} {len}");
        }
    }

    #[test]
    fn what_can_be_no_disk_has_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let used = folder.path().join("used");
        std::fs::write(&used, [0; 512]).unwrap();
        let _user = DiskImage::open(&used).unwrap();
        let empty = folder.path().join("empty");
        std::fs::write(&empty, []).unwrap();
        for (path, wanted) in [
            (folder.path().join("none"), "check the path"),
            (folder.path().to_owned(), "check the path"),
            (used.clone(), "is in use"),
            (empty, "make it larger"),
            ("/dev/null".into(), "make it larger"),
        ] {
            let line = format!("{:#}", DiskImage::open(&path).unwrap_err());
            assert!(line.contains(wanted) && line.contains("; "), "{line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }
}
