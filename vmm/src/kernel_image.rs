// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Recognises a bootable arm64 `Image` from its header, before anything is
//! created for the guest.
//!
//! The header is that of Linux `Documentation/arch/arm64/booting.rst`; whether
//! a file was cut short is told by the PE section table that EFI-bootable
//! kernels carry. Pure: from bytes and a length to a verdict.

use thiserror::Error;

/// Bytes of the arm64 boot header.
pub const HEADER_LEN: usize = 64;
/// Bytes to read of a kernel to be able to judge it: boot and PE headers.
pub const PROBE_LEN: usize = 4096;

const MAGIC: &[u8] = b"ARM\x64";
const MAGIC_AT: usize = 56;
const IMAGE_SIZE_AT: usize = 16;
const PE_OFFSET_AT: usize = 60;
/// Bytes of the PE signature and the COFF header behind it.
const COFF_LEN: usize = 24;
const SECTION_LEN: usize = 40;

/// Why a file is no kernel that can be booted: the cause, then what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ImageError {
    /// Shorter than its own header or sections say.
    #[error("is truncated: it has {have} bytes of at least {need}; copy it again")]
    Truncated {
        /// Bytes that are there.
        have: u64,
        /// Bytes that its headers speak of.
        need: u64,
    },
    /// A gzip file.
    #[error("is compressed with gzip; unpack it with gunzip first")]
    Gzip,
    /// An EFI zboot file.
    #[error("is an EFI zboot image; take arch/arm64/boot/Image of the same build instead")]
    Zboot,
    /// Something else.
    #[error("isn't an arm64 Image (no ARM\\x64 at byte 56); give an uncompressed arm64 kernel")]
    NotArm64,
    /// A kernel from before Linux 3.17, which doesn't say how much it needs.
    #[error("doesn't say its size in memory (older than Linux 3.17); give a newer kernel")]
    NoSize,
}

/// Judges the first [`PROBE_LEN`] bytes (fewer if the file is shorter) of a
/// file of `file_len` bytes; returns the bytes that the kernel takes in memory.
pub fn size_in_memory(head: &[u8], file_len: u64) -> Result<u64, ImageError> {
    let truncated = |need| ImageError::Truncated {
        have: file_len,
        need,
    };
    if head.starts_with(&[0x1f, 0x8b]) {
        return Err(ImageError::Gzip);
    }
    if head.get(4..8) == Some(b"zimg") {
        return Err(ImageError::Zboot);
    }
    if head.len() < HEADER_LEN {
        return Err(truncated(HEADER_LEN as u64));
    }
    if &head[MAGIC_AT..MAGIC_AT + MAGIC.len()] != MAGIC {
        return Err(ImageError::NotArm64);
    }
    let need = pe_file_len(head).unwrap_or(HEADER_LEN as u64);
    if file_len < need {
        return Err(truncated(need));
    }
    match le64(head, IMAGE_SIZE_AT) {
        Some(0) | None => Err(ImageError::NoSize),
        // A kernel never takes less memory than its file does.
        Some(size) => Ok(size.max(file_len)),
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

    /// An Image whose one PE section ends at byte 8192.
    fn image() -> Vec<u8> {
        let mut head = vec![0; 512];
        head[..2].copy_from_slice(b"MZ");
        head[IMAGE_SIZE_AT..IMAGE_SIZE_AT + 8].copy_from_slice(&0x10000_u64.to_le_bytes());
        head[MAGIC_AT..MAGIC_AT + 4].copy_from_slice(MAGIC);
        head[PE_OFFSET_AT..PE_OFFSET_AT + 4].copy_from_slice(&64_u32.to_le_bytes());
        head[64..68].copy_from_slice(b"PE\0\0");
        head[70..72].copy_from_slice(&1_u16.to_le_bytes());
        let section = 64 + COFF_LEN;
        head[section + 16..section + 20].copy_from_slice(&4096_u32.to_le_bytes());
        head[section + 20..section + 24].copy_from_slice(&4096_u32.to_le_bytes());
        head
    }

    #[test]
    fn a_whole_image_says_its_size() {
        assert_eq!(size_in_memory(&image(), 8192), Ok(0x10000));
    }

    #[test]
    fn a_cut_image_is_truncated() {
        let cut = |have, need| Err(ImageError::Truncated { have, need });
        assert_eq!(size_in_memory(&image(), 8191), cut(8191, 8192));
        assert_eq!(size_in_memory(&image()[..40], 40), cut(40, 64));
        assert_eq!(size_in_memory(&[], 0), cut(0, 64));
    }

    #[test]
    fn a_section_table_beyond_the_probe_is_not_read_past_it() {
        let mut head = image();
        head[70..72].copy_from_slice(&u16::MAX.to_le_bytes());
        assert_eq!(size_in_memory(&head, 8192), Ok(0x10000));
        head[PE_OFFSET_AT..PE_OFFSET_AT + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(size_in_memory(&head, 8192), Ok(0x10000));
    }

    #[test]
    fn other_files_are_named() {
        let mut gzip = image();
        gzip[..2].copy_from_slice(&[0x1f, 0x8b]);
        let mut zboot = image();
        zboot[4..8].copy_from_slice(b"zimg");
        let mut old = image();
        old[IMAGE_SIZE_AT..IMAGE_SIZE_AT + 8].fill(0);
        assert_eq!(size_in_memory(&gzip, 8192), Err(ImageError::Gzip));
        assert_eq!(size_in_memory(&zboot, 8192), Err(ImageError::Zboot));
        assert_eq!(size_in_memory(&old, 8192), Err(ImageError::NoSize));
        assert_eq!(size_in_memory(&[0x7f; 512], 512), Err(ImageError::NotArm64));
    }
}
