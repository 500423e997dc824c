// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What follows from the version of the host's kernel.

use vcpufreq_device::Headroom;
use vcpufreq_host::{HostRoot, version_of};

/// The headroom rule of the running kernel: none where its release makes no sense.
pub fn host_headroom(host: &HostRoot) -> Headroom {
    let release = host.text("proc/sys/kernel/osrelease");
    let rule = release.and_then(|release| headroom_of(&release));
    rule.unwrap_or(Headroom::None)
}

/// The headroom rule of a kernel release.
pub fn headroom_of(release: &str) -> Option<Headroom> {
    let (major, minor) = version_of(release)?;
    Some(Headroom::for_kernel(major, minor))
}
