// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel's first bytes, for tests here and of the program.

use crate::image_header::{COFF_LEN, IMAGE_SIZE_AT, MAGIC, MAGIC_AT, PE_OFFSET_AT};

/// Bytes of the file that [`image`]'s one PE section asks for.
pub const FILE_LEN: u64 = 8192;

/// The first bytes of an Image that takes `size` bytes in memory.
pub fn image(size: u64) -> Vec<u8> {
    let mut head = vec![0; 512];
    head[..2].copy_from_slice(b"MZ");
    put(&mut head, IMAGE_SIZE_AT, &size.to_le_bytes());
    put(&mut head, MAGIC_AT, MAGIC);
    put(&mut head, PE_OFFSET_AT, &64_u32.to_le_bytes());
    put(&mut head, 64, b"PE\0\0");
    put(&mut head, 70, &1_u16.to_le_bytes());
    let section = 64 + COFF_LEN;
    put(&mut head, section + 16, &4096_u32.to_le_bytes());
    put(&mut head, section + 20, &4096_u32.to_le_bytes());
    head
}

pub(crate) fn put(head: &mut [u8], at: usize, bytes: &[u8]) {
    head[at..at + bytes.len()].copy_from_slice(bytes);
}
