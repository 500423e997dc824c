// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The files a guest boots from, opened and checked before there is any KVM
//! state, and their places in RAM.
//!
//! They stay open: after a reset the guest boots the files that were checked, even if other files
//! have these paths now. A packed kernel's file is one in memory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use linux_loader::cmdline::Cmdline;
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::banner;
use super::image_header::{BLOCK, ImageHeader, PROBE_LEN};
use super::layout::RAM_BASE;
use super::packed::Payload;

/// Linux refuses larger device trees.
pub const FDT_MAX: u64 = 2 << 20;
/// Linux has room for this many bytes of command line, its end included
/// (arm64 `COMMAND_LINE_SIZE`).
const CMDLINE_MAX: usize = 2048;
const MIB: u64 = 1 << 20;

/// A kernel that was found good.
#[derive(Debug)]
pub struct KernelImage {
    /// Its file, to load.
    pub file: BootFile,
    /// Its own description.
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
    fn open(what: &'static str, path: &Path) -> anyhow::Result<Self> {
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

    fn head(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut head = Vec::new();
        self.rewound()
            .and_then(|file| file.take(PROBE_LEN).read_to_end(&mut head))
            .map_err(|source| unreadable("kernel", &self.path, source))?;
        Ok(head)
    }

    /// Takes what `payload` unpacks to in the file's place.
    fn unpack(&mut self, payload: Payload) -> anyhow::Result<()> {
        let memory = memfd_create(c"vcpufreq.kernel", MFdFlags::MFD_CLOEXEC);
        let mut memory =
            File::from(memory.context("is packed, and no file can be made in memory")?);
        self.len = payload.unpack(&mut self.file, &mut memory)?;
        self.file = memory;
        Ok(())
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn unreadable(what: &str, path: &Path, source: io::Error) -> anyhow::Error {
    let path = path.display();
    anyhow!("{what} {path} can't be read: {source}; check the path and its permissions")
}

impl KernelImage {
    /// Opens `path` and checks that it is a whole arm64 Image, which it unpacks
    /// into memory where it is packed.
    ///
    /// # Errors
    /// When it can't be read, or which rule it breaks.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let mut file = BootFile::open("kernel", path)?;
        let refused = |why: anyhow::Error| anyhow!("kernel {} {why}", path.display());
        let mut head = file.head()?;
        if let Some(payload) = Payload::find(&head, file.len).map_err(refused)? {
            file.unpack(payload).map_err(refused)?;
            head = file.head()?;
        }
        let header = ImageHeader::parse(&head, file.len).map_err(refused)?;
        Ok(Self { file, header })
    }

    /// Whether it is a `PREEMPT_RT` kernel; `None` where that is unknown.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn preempt_rt(&mut self) -> anyhow::Result<Option<bool>> {
        let said = self.file.rewound().and_then(banner::preempt_rt);
        said.map_err(|source| unreadable("kernel", self.file.path(), source))
    }
}

impl Initrd {
    /// Opens `path` and checks that there is something in it.
    ///
    /// # Errors
    /// When it can't be read, or is empty.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let file = BootFile::open("initrd", path)?;
        if file.len == 0 {
            bail!(
                "initrd {} is empty; give an initramfs or leave --initrd out",
                path.display()
            );
        }
        Ok(Self { file })
    }
}

/// Guest-physical places of what a guest boots from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootPlacement {
    /// Bytes of RAM, from [`RAM_BASE`] on.
    pub ram_size: u64,
    /// The 2 MiB boundary that the kernel's offset counts from.
    pub kernel_block: u64,
    /// Device tree, with room for [`FDT_MAX`] bytes.
    pub fdt: u64,
    /// Start and length of the initrd.
    pub initrd: Option<(u64, u64)>,
}

impl BootPlacement {
    /// Finds places from the bottom of RAM up: kernel, device tree, initrd.
    ///
    /// That keeps all of them within the 32 GiB window that Linux asks for, and
    /// the device tree in 2 MiB of its own.
    ///
    /// # Errors
    /// When there is too little memory, or more than addresses.
    pub fn new(
        kernel: &KernelImage,
        initrd: Option<&Initrd>,
        mem_mib: u64,
    ) -> anyhow::Result<Self> {
        let ram_size = mem_mib
            .checked_mul(MIB)
            .filter(|size| size.checked_add(RAM_BASE).is_some())
            .with_context(|| format!("{mem_mib} MiB of memory is more than any address space has room for; give less with --mem"))?;
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

fn no_room(initrd: Option<&Initrd>, mem_mib: u64, need_mib: u64) -> anyhow::Error {
    match initrd {
        Some(Initrd { file }) if file.len / MIB >= mem_mib => anyhow!(
            "initrd {} with {} bytes is larger than the guest's {mem_mib} MiB of memory; give at least --mem {need_mib}",
            file.path.display(),
            file.len
        ),
        _ => anyhow!(
            "{mem_mib} MiB of memory is too little for this kernel, its device tree and initrd; give at least --mem {need_mib}"
        ),
    }
}

/// Checks that Linux takes `text` as its command line.
///
/// # Errors
/// Why it doesn't.
pub fn check_cmdline(text: &str) -> anyhow::Result<()> {
    let mut cmdline = Cmdline::new(CMDLINE_MAX)?;
    cmdline.insert_str(text).map_err(|why| {
        let len = text.len();
        anyhow!("kernel command line of {len} bytes: {why}; correct or shorten --cmdline")
    })
}

#[cfg(test)]
mod tests {
    //! Bad files and too little memory are distinct errors, with their values.

    use super::*;
    use crate::fakes::{FILE_LEN, image};

    /// A sparse file of `len` bytes that starts with `head`.
    fn file(head: &[u8], len: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), head).unwrap();
        file.as_file().set_len(len).unwrap();
        file
    }

    fn kernel(size: u64) -> KernelImage {
        KernelImage::open(file(&image(size), FILE_LEN).path()).unwrap()
    }

    fn initrd(len: u64) -> Initrd {
        Initrd::open(file(&[], len).path()).unwrap()
    }

    #[test]
    fn files_that_cannot_be_read_are_named() {
        let missing = Path::new("/nonexistent/Image");
        let error = KernelImage::open(missing).unwrap_err().to_string();
        assert!(error.starts_with("kernel /nonexistent/Image can't be read: "));
        let error = Initrd::open(Path::new("/")).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        let error = Initrd::open(file(&[], 0).path()).unwrap_err().to_string();
        assert!(error.contains("is empty"), "{error}");
    }

    #[test]
    fn a_truncated_kernel_is_refused() {
        let cut = file(&image(0x10000), FILE_LEN - 1);
        let error = KernelImage::open(cut.path()).unwrap_err().to_string();
        let why = format!(
            "truncated: it has {} bytes of at least {FILE_LEN}",
            FILE_LEN - 1
        );
        assert!(error.contains(&why), "{error}");
    }

    #[test]
    fn places_do_not_overlap_and_are_aligned() {
        let place = BootPlacement::new(&kernel(3 << 20), Some(&initrd(5000)), 16).unwrap();
        assert_eq!(
            place,
            BootPlacement {
                ram_size: 16 << 20,
                kernel_block: RAM_BASE,
                fdt: RAM_BASE + (4 << 20),
                initrd: Some((RAM_BASE + (6 << 20), 5000)),
            }
        );
        let place = BootPlacement::new(&kernel(3 << 20), None, 6).unwrap();
        assert_eq!(place.initrd, None);
    }

    #[test]
    fn too_little_memory_says_how_much_is_enough() {
        // 4 MiB for the kernel, 2 for the device tree, 8 and a bit for the initrd.
        let (kernel, initrd) = (kernel(3 << 20), initrd((8 << 20) + 1));
        let place = |mem_mib| BootPlacement::new(&kernel, Some(&initrd), mem_mib);
        for (mem_mib, why) in [
            (0, "larger than the guest's 0 MiB"),
            (8, "larger than the guest's 8 MiB"),
            (14, "14 MiB of memory is too little"),
        ] {
            let error = place(mem_mib).unwrap_err().to_string();
            let enough = error.ends_with("give at least --mem 15");
            assert!(error.contains(why) && enough, "{error}");
        }
        assert!(place(15).is_ok());
    }

    #[test]
    fn sizes_beyond_the_address_space_are_refused() {
        for (size, mem_mib, why) in [
            (1, u64::MAX, "more than any address space"),
            (1, u64::MAX >> 20, "more than any address space"),
            (u64::MAX, 512, "512 MiB of memory is too little"),
        ] {
            let error = BootPlacement::new(&kernel(size), None, mem_mib).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn a_command_line_linux_would_cut_is_refused() {
        check_cmdline("console=ttyS0 init=\"/bin/sh -c x\"").unwrap();
        check_cmdline("").unwrap();
        check_cmdline(&"x".repeat(2047)).unwrap();
        for bad in ["x".repeat(2048), "a\0b".to_owned()] {
            let error = check_cmdline(&bad).unwrap_err().to_string();
            let len = format!("command line of {} bytes", bad.len());
            assert!(error.contains(&len), "{error}");
        }
    }
}
