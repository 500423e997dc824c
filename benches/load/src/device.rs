// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A block device, read past the page cache: each read waits for the device,
//! which is what the scheduler takes for I/O.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::fcntl::OFlag;

/// What I/O is done on: the kernel's null_blk, with its completion by timer.
pub const IO_DEVICE: &str = "/dev/nullb0";
/// Its options: a read takes 2 ms, and ends in a timer's interrupt.
pub const NULL_BLK: &str = "irqmode=2 completion_nsec=2000000 nr_devices=1 queue_mode=2";
/// How many of them there are makes no difference.
const COUNT: &str = "nr_devices";
const PARAMETERS: &str = "sys/module/null_blk/parameters";
const BLOCK: usize = 4096;

/// Whether this program runs in a guest, whose first process it is.
pub fn in_guest() -> bool {
    std::process::id() == 1
}

/// Why reads of the device below `root` don't take what they have to, with what to do; `None` where
/// they do. Without a device there is nothing to say.
#[must_use]
pub fn other_null_blk(root: &Path) -> Option<String> {
    let differs = |option: &&str| {
        let Some((name, value)) = option.split_once('=') else {
            return true;
        };
        let is = fs::read_to_string(root.join(PARAMETERS).join(name));
        name != COUNT && is.map_or(true, |is| is.trim() != value)
    };
    let option = NULL_BLK.split_whitespace().find(differs)?;
    Some(format!(
        "null_blk is loaded without {option}; modprobe -r null_blk, then modprobe null_blk {NULL_BLK}"
    ))
}

/// The device, open, and room for a block.
#[derive(Debug)]
pub struct BlockDevice {
    file: File,
    buffer: Vec<u8>,
}

impl BlockDevice {
    /// Opens it.
    pub fn open() -> Result<Self> {
        let file = File::options()
            .read(true)
            .custom_flags(OFlag::O_DIRECT.bits())
            .open(IO_DEVICE)
            .with_context(|| format!("opening {IO_DEVICE}; modprobe null_blk {NULL_BLK}"))?;
        let other = other_null_blk(Path::new("/"));
        ensure!(other.is_none(), "{}", other.unwrap_or_default());
        Ok(Self {
            file,
            buffer: vec![0; 2 * BLOCK],
        })
    }

    /// Reads a block, and waits for it.
    pub fn read(&mut self) -> Result<()> {
        // Direct reads go to memory that is aligned as the device's blocks.
        let from = self.buffer.as_ptr().align_offset(BLOCK);
        let aligned = self
            .buffer
            .get_mut(from..from + BLOCK)
            .context("no aligned block")?;
        self.file.read_exact_at(aligned, 0).context(IO_DEVICE)
    }
}

#[cfg(test)]
mod tests {
    //! Promise: a null_blk that was loaded with other options is a line, whatever else it has.
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_null_blk_with_other_options_is_named() {
        let root = tempfile::tempdir().unwrap();
        let unknown = other_null_blk(root.path()).unwrap();
        assert!(unknown.contains("without irqmode=2; "), "{unknown}");
        let write = |name: &str, value: &str| {
            let folder = root.path().join(PARAMETERS);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(name), value).unwrap();
        };
        for option in NULL_BLK.split_whitespace() {
            let (name, value) = option.split_once('=').unwrap();
            write(name, &format!("{value}\n"));
        }
        write("nr_devices", "4\n");
        assert_eq!(other_null_blk(root.path()), None);
        // The kernel's own.
        for (name, own, value) in [
            ("irqmode", "1", "2"),
            ("completion_nsec", "10000", "2000000"),
            ("queue_mode", "0", "2"),
        ] {
            write(name, own);
            let line = other_null_blk(root.path()).unwrap();
            let option = format!("without {name}={value}; modprobe -r");
            assert!(line.contains(&option), "{line}");
            write(name, value);
        }
    }
}
