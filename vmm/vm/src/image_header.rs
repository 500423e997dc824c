// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Recognises a bootable arm64 `Image` from its first bytes.
//!
//! The header is that of Linux `Documentation/arch/arm64/booting.rst`; the PE
//! section table that EFI-bootable kernels carry shows whether a file was cut
//! short. Pure: from bytes and a length to a verdict.

use anyhow::ensure;

/// Bytes of the arm64 boot header.
const HEADER_LEN: usize = 64;
/// Bytes to read of a kernel to be able to judge it: boot and PE headers.
pub const PROBE_LEN: u64 = 4096;
/// A kernel lies at a fixed distance from such a boundary.
pub const BLOCK: u64 = 2 << 20;

pub(crate) const MAGIC: &[u8] = b"ARM\x64";
pub(crate) const MAGIC_AT: usize = 56;
/// What Android's `boot.img` begins with: a kernel, a ramdisk and their sizes in one file.
const ANDROID: &[u8] = b"ANDROID!";
/// What an x86 `bzImage` has where a boot loader looks for it.
const X86: &[u8] = b"HdrS";
const X86_AT: usize = 0x202;
const TEXT_OFFSET_AT: usize = 8;
pub(crate) const IMAGE_SIZE_AT: usize = 16;
const FLAGS_AT: usize = 24;
const FLAG_BIG_ENDIAN: u64 = 1;
pub(crate) const PE_OFFSET_AT: usize = 60;
/// Bytes of the PE signature and the COFF header behind it.
pub(crate) const COFF_LEN: usize = 24;
const SECTION_LEN: usize = 40;

/// What a loader has to know of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// Distance of the kernel from a 2 MiB boundary, in bytes.
    pub text_offset: u64,
    /// Bytes that it takes in memory from there.
    pub size: u64,
}

impl ImageHeader {
    /// Judges the first [`PROBE_LEN`] bytes (fewer if the file is shorter) of a
    /// file of `file_len` bytes.
    ///
    /// # Errors
    /// Why it is no kernel that can be booted: the cause, then what to do.
    pub fn parse(head: &[u8], file_len: u64) -> anyhow::Result<Self> {
        let check_len = |have: u64, need: u64| {
            ensure!(
                have >= need,
                "is truncated: it has {file_len} bytes of at least {need}; copy it again"
            );
            Ok(())
        };
        ensure!(
            head.get(X86_AT..X86_AT + X86.len()) != Some(X86),
            "is an x86 kernel (bzImage); give one for arm64"
        );
        ensure!(
            !head.starts_with(ANDROID),
            "is an Android boot image; take the kernel out, to out/kernel: \
             unpack_bootimg --boot_img FILE (Debian: mkbootimg)"
        );
        check_len(head.len() as u64, HEADER_LEN as u64)?;
        ensure!(
            &head[MAGIC_AT..MAGIC_AT + MAGIC.len()] == MAGIC,
            "isn't an arm64 Image (no ARM\\x64 at byte 56); give a kernel for arm64"
        );
        check_len(file_len, pe_file_len(head).unwrap_or(HEADER_LEN as u64))?;
        let field = |at| le64(head, at).unwrap_or(0);
        ensure!(
            field(FLAGS_AT) & FLAG_BIG_ENDIAN == 0,
            "is a big-endian kernel; give a little-endian one"
        );
        let (text_offset, size) = (field(TEXT_OFFSET_AT), field(IMAGE_SIZE_AT));
        ensure!(
            size > 0,
            "doesn't state its size in memory (older than Linux 3.17); give a newer kernel"
        );
        ensure!(
            text_offset < BLOCK,
            "is damaged: it asks for an offset of {text_offset:#x} from 2 MiB; copy it again"
        );
        // A kernel never takes less memory than its file does.
        Ok(Self {
            text_offset,
            size: size.max(file_len),
        })
    }
}

/// The length that the PE section table asks of the file; `None` without one.
fn pe_file_len(head: &[u8]) -> Option<u64> {
    if !head.starts_with(b"MZ") {
        return None;
    }
    let pe = usize::try_from(le32(head, PE_OFFSET_AT)?).ok()?;
    if head.get(pe..pe.checked_add(4)?)? != b"PE\0\0" {
        return None;
    }
    let sections = usize::from(le16(head, pe + 6)?);
    let optional = usize::from(le16(head, pe + 20)?);
    (0..sections)
        .map(|n| {
            let section = pe + COFF_LEN + optional + n * SECTION_LEN;
            let size = u64::from(le32(head, section + 16)?);
            Some(size + u64::from(le32(head, section + 20)?))
        })
        .try_fold(0, |longest, end| Some(end?.max(longest)))
}

fn bytes<const N: usize>(head: &[u8], at: usize) -> Option<[u8; N]> {
    head.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn le16(head: &[u8], at: usize) -> Option<u16> {
    bytes(head, at).map(u16::from_le_bytes)
}

fn le32(head: &[u8], at: usize) -> Option<u32> {
    bytes(head, at).map(u32::from_le_bytes)
}

fn le64(head: &[u8], at: usize) -> Option<u64> {
    bytes(head, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    //! An Image is known by its magic; a shorter file than its sections is
    //! truncated; what else people pass is named.

    use super::*;
    use crate::fakes::{FILE_LEN, image, put};

    fn size(head: &[u8], file_len: u64) -> Result<u64, String> {
        let header = ImageHeader::parse(head, file_len);
        header
            .map(|header| header.size)
            .map_err(|why| why.to_string())
    }

    #[test]
    fn a_whole_image_says_its_size() {
        assert_eq!(size(&image(0x10000), FILE_LEN), Ok(0x10000));
        assert_eq!(size(&image(0x10000), 0x20000), Ok(0x20000));
    }

    #[test]
    fn a_cut_image_is_truncated() {
        let cut = |have: u64, need: u64| {
            Err(format!(
                "is truncated: it has {have} bytes of at least {need}; copy it again"
            ))
        };
        assert_eq!(size(&image(1), 8191), cut(8191, FILE_LEN));
        assert_eq!(size(&image(1)[..40], 40), cut(40, 64));
        assert_eq!(size(&[], 0), cut(0, 64));
    }

    #[test]
    fn a_section_table_beyond_the_probe_is_not_read_past_it() {
        let mut head = image(0x10000);
        put(&mut head, 70, &u16::MAX.to_le_bytes());
        assert_eq!(size(&head, FILE_LEN), Ok(0x10000));
        put(&mut head, PE_OFFSET_AT, &u32::MAX.to_le_bytes());
        assert_eq!(size(&head, FILE_LEN), Ok(0x10000));
    }

    #[test]
    fn other_files_are_named() {
        let with = |at, bytes: &[u8]| {
            let mut head = image(0x10000);
            put(&mut head, at, bytes);
            size(&head, FILE_LEN).unwrap_err()
        };
        let offset = (1u64 << 21).to_le_bytes();
        for (line, name) in [
            (with(FLAGS_AT, &[1]), "big-endian"),
            (with(IMAGE_SIZE_AT, &[0; 8]), "size in memory"),
            (with(TEXT_OFFSET_AT, &offset), "an offset of 0x200000"),
            (with(0, ANDROID), "--boot_img FILE (Debian: mkbootimg)"),
            (size(&[0x7f; 512], 512).unwrap_err(), "isn't an arm64 Image"),
        ] {
            assert!(line.contains(name), "{line}");
        }
    }
}
