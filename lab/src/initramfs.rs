// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Initial file systems, as `newc` archives with nothing in them that
//! differs from run to run (owner, times and inode numbers are fixed).

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cpio::newc::{Builder, ModeFileType, trailer};

/// An archive being made.
#[derive(Debug)]
pub struct Initramfs {
    bytes: Vec<u8>,
    inode: u32,
    folders: BTreeSet<PathBuf>,
}

impl Initramfs {
    /// With the folders that every one has, and a console.
    pub fn new() -> Result<Self> {
        let mut archive = Self {
            bytes: Vec::new(),
            inode: 0,
            folders: BTreeSet::new(),
        };
        // As on a Debian system, the other way round.
        archive.link("usr", ".")?;
        for folder in [
            "dev",
            "proc",
            "sys",
            "run",
            "tmp",
            "bin",
            "lib",
            "lab",
            "lab/modules",
            "lab/bpf",
        ] {
            archive.folder(Path::new(folder))?;
        }
        // The kernel opens it for /init before anything is mounted.
        let console = Builder::new("dev/console").rdev_major(5).rdev_minor(1);
        archive.write(console, ModeFileType::Char, 0o600, &[])?;
        Ok(archive)
    }

    /// Adds a program.
    pub fn program(&mut self, name: &str, path: &Path) -> Result<()> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        self.add(name, ModeFileType::Regular, 0o755, &bytes)
    }

    /// Adds a file.
    pub fn file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.add(name, ModeFileType::Regular, 0o644, bytes)
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, name: &str, target: &str) -> Result<()> {
        self.add(name, ModeFileType::Symlink, 0o777, target.as_bytes())
    }

    /// The archive.
    pub fn finish(self) -> Result<Vec<u8>> {
        Ok(trailer(self.bytes)?)
    }

    /// Adds a folder and those that it is in, which aren't there yet.
    fn folder(&mut self, path: &Path) -> Result<()> {
        let root = path.as_os_str().is_empty();
        if root || !self.folders.insert(path.to_owned()) {
            return Ok(());
        }
        self.folder(path.parent().unwrap_or(Path::new("")))?;
        let name = Builder::new(path.to_str().context("a folder's name")?);
        self.write(name, ModeFileType::Directory, 0o755, &[])
    }

    fn add(&mut self, name: &str, kind: ModeFileType, mode: u32, bytes: &[u8]) -> Result<()> {
        self.folder(Path::new(name).parent().unwrap_or(Path::new("")))?;
        self.write(Builder::new(name), kind, mode, bytes)
    }

    fn write(&mut self, entry: Builder, kind: ModeFileType, mode: u32, bytes: &[u8]) -> Result<()> {
        self.inode += 1;
        let size = u32::try_from(bytes.len()).context("a file of over 4 GiB")?;
        let mut writer = entry
            .ino(self.inode)
            .mode(mode)
            .set_mode_file_type(kind)
            .write(&mut self.bytes, size);
        writer.write_all(bytes)?;
        writer.finish()?;
        Ok(())
    }
}
