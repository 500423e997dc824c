// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A block device, read past the page cache: each read waits for the device,
//! which is what the scheduler takes for I/O.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use anyhow::{Context, Result};
use nix::fcntl::OFlag;

/// What I/O is done on: the kernel's null_blk, with its completion by timer.
pub const IO_DEVICE: &str = "/dev/nullb0";
/// Its options: a read takes 2 ms, and ends in a timer's interrupt.
pub const NULL_BLK: &str = "irqmode=2 completion_nsec=2000000 nr_devices=1 queue_mode=2";
const BLOCK: usize = 4096;

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
