// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The files a guest boots from, opened and checked before there is any KVM
//! state, and their places in RAM.
//!
//! They stay open, so that a guest that resets boots again from what was
//! checked, whatever has become of the paths.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::banner;
use super::image_header::{BLOCK, HeaderError, ImageHeader, PROBE_LEN};
use super::layout::RAM_BASE;

/// Linux refuses larger device trees.
pub const FDT_MAX: u64 = 2 << 20;
/// Linux has room for this many bytes of command line, its end included
/// (arm64 `COMMAND_LINE_SIZE`).
const CMDLINE_MAX: usize = 2048;
const MIB: u64 = 1 << 20;

/// What is wrong with the files a guest shall boot from, or with its memory.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The file can't be opened or read.
    #[error("{what} {} can't be read: {source}; check the path and its permissions", path.display())]
    Unreadable {
        /// `ioeventfd` or `initrd`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the host said.
        source: io::Error,
    },
    /// The kernel is not one that can be booted.
    #[error("kernel {} {why}", path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// Which rule it breaks, and what to do.
        why: HeaderError,
    },
    /// The initrd has no bytes.
    #[error("initrd {} is empty; give an initramfs or leave --initrd out", path.display())]
    EmptyInitrd {
        /// The file.
        path: PathBuf,
    },
    /// The initrd alone is larger than the guest's memory.
    #[error(
        "initrd {} with {len} bytes is larger than the guest's {mem_mib} MiB of memory; give at least --mem {need_mib}",
        path.display()
    )]
    InitrdTooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes that it has.
        len: u64,
        /// The guest's memory in MiB.
        mem_mib: u64,
        /// Memory in MiB in which everything has a place.
        need_mib: u64,
    },
    /// Kernel, device tree and initrd together don't fit.
    #[error(
        "{mem_mib} MiB of memory is too little for this kernel, its device tree and initrd; give at least --mem {need_mib}"
    )]
    MemTooSmall {
        /// The guest's memory in MiB.
        mem_mib: u64,
        /// Memory in MiB in which everything has a place.
        need_mib: u64,
    },
    /// The memory would end beyond the last address there is.
    #[error(
        "{mem_mib} MiB of memory is more than any address space has room for; give less with --mem"
    )]
    MemTooLarge {
        /// The guest's memory in MiB.
        mem_mib: u64,
    },
    /// Linux wouldn't take the command line as it is.
    #[error("kernel command line of {len} bytes: {why}; correct or shorten --cmdline")]
    Cmdline {
        /// Bytes that it has.
        len: usize,
        /// What is wrong.
        why: String,
    },
}

/// A kernel that was found good.
#[derive(Debug)]
pub struct Kernel {
    /// Its file, to load.
    pub file: BootFile,
    /// What it says about itself.
    pub header: ImageHeader,
}

/// An initrd that was found good.
#[derive(Debug)]
pub struct Initrd {
    /// Its file, to load.
    pub file: BootFile,
}

/// An open file to load.
#[derive(Debug)]
pub struct BootFile {
    file: File,
    path: PathBuf,
    len: u64,
}

impl BootFile {
    fn open(what: &'static str, path: &Path) -> Result<Self, ImageError> {
        let opened = || -> io::Result<(File, u64)> {
            // Before it is opened: opening a pipe waits for its other end.
            if !std::fs::metadata(path)?.is_file() {
                return Err(io::Error::other("not a regular file"));
            }
            let file = File::open(path)?;
            let len = file.metadata()?.len();
            Ok((file, len))
        };
        let (file, len) = opened().map_err(|source| unreadable(what, path, source))?;
        let path = path.to_owned();
        Ok(Self { file, path, len })
    }

    /// The file, from its start.
    pub fn rewound(&mut self) -> io::Result<&mut File> {
        self.file.seek(SeekFrom::Start(0))?;
        Ok(&mut self.file)
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn unreadable(what: &'static str, path: &Path, source: io::Error) -> ImageError {
    let path = path.to_owned();
    ImageError::Unreadable { what, path, source }
}

impl Kernel {
    /// Opens `path` and checks that it is a whole arm64 Image.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let mut file = BootFile::open("kernel", path)?;
        let mut head = Vec::new();
        let probe = Read::by_ref(&mut file.file).take(PROBE_LEN);
        { probe }
            .read_to_end(&mut head)
            .map_err(|source| unreadable("kernel", path, source))?;
        let header = ImageHeader::parse(&head, file.len).map_err(|why| ImageError::Kernel {
            path: path.to_owned(),
            why,
        })?;
        Ok(Self { file, header })
    }

    /// Whether it is a `PREEMPT_RT` kernel; `None` where it doesn't say so.
    pub fn preempt_rt(&mut self) -> Result<Option<bool>, ImageError> {
        let said = self.file.rewound().and_then(banner::preempt_rt);
        said.map_err(|source| unreadable("kernel", self.file.path(), source))
    }
}

impl Initrd {
    /// Opens `path` and checks that there is something in it.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let file = BootFile::open("initrd", path)?;
        if file.len == 0 {
            let path = path.to_owned();
            return Err(ImageError::EmptyInitrd { path });
        }
        Ok(Self { file })
    }
}

/// Guest-physical places of what a guest boots from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Bytes of RAM, from [`RAM_BASE`] on.
    pub ram_size: u64,
    /// The 2 MiB boundary that the kernel's offset counts from.
    pub kernel_block: u64,
    /// Device tree, with room for [`FDT_MAX`] bytes.
    pub fdt: u64,
    /// Start and length of the initrd.
    pub initrd: Option<(u64, u64)>,
}

impl Placement {
    /// Finds places from the bottom of RAM up: kernel, device tree, initrd.
    ///
    /// That keeps all of them within the 32 GiB window that Linux asks for, and
    /// the device tree in 2 MiB of its own.
    pub fn new(kernel: &Kernel, initrd: Option<&Initrd>, mem_mib: u64) -> Result<Self, ImageError> {
        let ram_size = mem_mib
            .checked_mul(MIB)
            .filter(|size| size.checked_add(RAM_BASE).is_some())
            .ok_or(ImageError::MemTooLarge { mem_mib })?;
        let ImageHeader { text_offset, size } = kernel.header;
        let kernel_end = text_offset.saturating_add(size);
        let fdt = kernel_end
            .checked_next_multiple_of(BLOCK)
            .unwrap_or(u64::MAX);
        let initrd_at = fdt.saturating_add(FDT_MAX);
        let initrd_len = initrd.map_or(0, |initrd| initrd.file.len);
        let need = initrd_at.saturating_add(initrd_len);
        if need > ram_size {
            return Err(no_room(initrd, mem_mib, need.div_ceil(MIB)));
        }
        Ok(Self {
            ram_size,
            kernel_block: RAM_BASE,
            fdt: RAM_BASE + fdt,
            initrd: (initrd_len > 0).then_some((RAM_BASE + initrd_at, initrd_len)),
        })
    }
}

fn no_room(initrd: Option<&Initrd>, mem_mib: u64, need_mib: u64) -> ImageError {
    match initrd {
        Some(Initrd { file }) if file.len / MIB >= mem_mib => ImageError::InitrdTooLarge {
            path: file.path.clone(),
            len: file.len,
            mem_mib,
            need_mib,
        },
        _ => ImageError::MemTooSmall { mem_mib, need_mib },
    }
}

/// Checks that Linux takes `text` as its command line.
pub fn check_cmdline(text: &str) -> Result<(), ImageError> {
    linux_loader::cmdline::Cmdline::new(CMDLINE_MAX)
        .and_then(|mut cmdline| cmdline.insert_str(text))
        .map_err(|error| ImageError::Cmdline {
            len: text.len(),
            why: error.to_string(),
        })
}

#[cfg(test)]
mod tests {
    //! Bad files and too little memory are told apart, with their values.

    use super::super::image_header::tests::{FILE_LEN, image};
    use super::*;

    /// A sparse file of `len` bytes that starts with `head`.
    fn file(head: &[u8], len: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), head).unwrap();
        file.as_file().set_len(len).unwrap();
        file
    }

    fn kernel(size: u64) -> Kernel {
        Kernel::open(file(&image(size), FILE_LEN).path()).unwrap()
    }

    fn initrd(len: u64) -> Initrd {
        Initrd::open(file(&[], len).path()).unwrap()
    }

    #[test]
    fn files_that_cannot_be_read_are_named() {
        let missing = Path::new("/nonexistent/Image");
        let error = Kernel::open(missing).unwrap_err().to_string();
        assert!(error.starts_with("kernel /nonexistent/Image can't be read: "));
        let error = Initrd::open(Path::new("/")).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        let error = Initrd::open(file(&[], 0).path()).unwrap_err();
        assert!(matches!(error, ImageError::EmptyInitrd { .. }));
    }

    #[test]
    fn a_truncated_kernel_is_refused() {
        let cut = file(&image(0x10000), FILE_LEN - 1);
        let error = Kernel::open(cut.path()).unwrap_err();
        let why = HeaderError::Truncated {
            have: FILE_LEN - 1,
            need: FILE_LEN,
        };
        assert!(matches!(error, ImageError::Kernel { why: w, .. } if w == why));
    }

    #[test]
    fn places_do_not_overlap_and_are_aligned() {
        let place = Placement::new(&kernel(3 << 20), Some(&initrd(5000)), 16).unwrap();
        assert_eq!(
            place,
            Placement {
                ram_size: 16 << 20,
                kernel_block: RAM_BASE,
                fdt: RAM_BASE + (4 << 20),
                initrd: Some((RAM_BASE + (6 << 20), 5000)),
            }
        );
        let place = Placement::new(&kernel(3 << 20), None, 6).unwrap();
        assert_eq!(place.initrd, None);
    }

    #[test]
    fn too_little_memory_says_how_much_is_enough() {
        // 4 MiB for the kernel, 2 for the device tree, 8 and a bit for the initrd.
        let (kernel, initrd) = (kernel(3 << 20), initrd((8 << 20) + 1));
        let place = |mem_mib| Placement::new(&kernel, Some(&initrd), mem_mib);
        let need_mib = 15;
        for mem_mib in [0, 8] {
            assert!(matches!(
                place(mem_mib).unwrap_err(),
                ImageError::InitrdTooLarge { mem_mib: m, need_mib: n, .. } if (m, n) == (mem_mib, need_mib)
            ));
        }
        assert!(matches!(
            place(14).unwrap_err(),
            ImageError::MemTooSmall { mem_mib: 14, need_mib: n } if n == need_mib
        ));
        assert!(place(need_mib).is_ok());
    }

    #[test]
    fn sizes_beyond_the_address_space_are_refused() {
        let place = |size, mem_mib| Placement::new(&kernel(size), None, mem_mib).unwrap_err();
        for mem_mib in [u64::MAX, u64::MAX >> 20] {
            assert!(matches!(place(1, mem_mib), ImageError::MemTooLarge { .. }));
        }
        assert!(matches!(
            place(u64::MAX, 512),
            ImageError::MemTooSmall { .. }
        ));
    }

    #[test]
    fn a_command_line_linux_would_cut_is_refused() {
        check_cmdline("console=ttyS0 init=\"/bin/sh -c x\"").unwrap();
        check_cmdline("").unwrap();
        check_cmdline(&"x".repeat(2047)).unwrap();
        for bad in ["x".repeat(2048), "a\0b".to_owned()] {
            let error = check_cmdline(&bad).unwrap_err();
            assert!(matches!(error, ImageError::Cmdline { len, .. } if len == bad.len()));
        }
    }
}
