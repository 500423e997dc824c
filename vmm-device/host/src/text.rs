// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bounded reads of one small number, and the kernel's error numbers.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What a sysfs attribute with one number holds at most: 20 digits of a u64 and a line end.
const NUMBER_LEN: usize = 24;

/// The number that `file` holds, in one `pread`.
pub(super) fn read_u32(file: &File) -> io::Result<u32> {
    let mut buffer = [0; NUMBER_LEN];
    let len = file.read_at(&mut buffer, 0)?;
    let text = std::str::from_utf8(&buffer[..len]).ok();
    let number = text.and_then(|t| t.trim_ascii_end().parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The error number of `error`; 0 for one that the kernel didn't give.
pub(super) fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}
