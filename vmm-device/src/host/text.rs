// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's text formats: bounded reads of one small number, and percentages.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::units::Util;

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

/// `util` as `cpu.uclamp.min` and `.max` take it: percent with two decimals, such as `32.13`.
///
/// The kernel reads `p` hundredths of a percent as `DIV_ROUND_CLOSEST(p * 1024, 10000)`. Rounding
/// to the nearest here is off by half a hundredth at most, that is by 0.0512 of a utilization
/// step, so the kernel's own rounding lands on `util` again: 329 is written as 32.13, which is
/// 329.01.
#[must_use]
pub fn util_percent(util: Util) -> String {
    let hundredths = hundredths(util);
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// [`util_percent`] at a fixed width (`032.13`), without an allocation on a guest's path. The
/// kernel reads decimal numbers, leading zeros or not.
pub(super) fn percent_bytes(util: Util) -> [u8; 6] {
    let hundredths = hundredths(util);
    let digit = |scale: u16| b'0' + (hundredths / scale % 10).to_le_bytes()[0];
    [
        digit(10_000),
        digit(1_000),
        digit(100),
        b'.',
        digit(10),
        digit(1),
    ]
}

/// 0..=10000.
fn hundredths(util: Util) -> u16 {
    let nearest = (u32::from(util.get()) * 10_000 + 512) / 1024;
    u16::try_from(nearest).unwrap_or(10_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel makes of a text (`capacity_from_percent` with `cgroup_parse_float`).
    fn kernel_reads(text: &str) -> u64 {
        let (whole, frac) = text.split_once('.').unwrap();
        assert_eq!(frac.len(), 2);
        let hundredths = whole.parse::<u64>().unwrap() * 100 + frac.parse::<u64>().unwrap();
        assert!(hundredths <= 10_000, "ERANGE for {text}");
        (hundredths * 1024 + 5_000) / 10_000
    }

    #[test]
    fn every_utilization_comes_back_from_the_kernel_exactly() {
        for util in (0..=1024).filter_map(Util::new) {
            let fixed = percent_bytes(util);
            let fixed = std::str::from_utf8(&fixed).unwrap();
            let plain = util_percent(util);
            assert_eq!(kernel_reads(&plain), u64::from(util.get()));
            assert_eq!(kernel_reads(fixed), u64::from(util.get()));
            assert_eq!(fixed, format!("{plain:0>6}"));
        }
    }
}
