// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What follows from the version of the host's kernel.

use vcpufreq_device::Headroom;

/// The headroom rule of a kernel release.
pub fn headroom_of(release: &str) -> Option<Headroom> {
    let (major, minor) = version_of(release)?;
    Some(Headroom::for_kernel(major, minor))
}

/// Major and minor number of a kernel release.
pub fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some((major, minor))
}
