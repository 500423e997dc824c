// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's measuring programs for host and guest: cyclictest, hackbench and stress-ng. 25 MB, so
//! only where a scenario runs them, or a person may.

use std::path::PathBuf;

use anyhow::Result;

use crate::arch::Arch;
use crate::cache::Cache;
use crate::initramfs::Initramfs;
use crate::packages;
use crate::root::Root;

/// Instead of a scenario: a person at the console.
pub const SHELL: &str = "shell";

/// Its own packages': it is linked with the libraries of each kind of storage.
pub const FIO: &str = "bin/fio";
/// The package of a program that each host for arm64 has in the tests.
pub const RT_APP: &str = "rt-app:arm64";
/// Of the kernel's own, for a disk of `vcpufreq run`.
pub const DISK_MODULES: [&str; 2] = ["drivers/virtio/virtio_mmio", "drivers/block/virtio_blk"];

pub const PROGRAMS: [&str; 3] = ["bin/cyclictest", "bin/hackbench", "bin/stress-ng"];
/// Of the kernel's own, for a guest's virtio disk and network card, and the host's end of that.
pub const MODULES: [&str; 9] = [
    "drivers/block/virtio_blk",
    "drivers/net/net_failover",
    "drivers/net/tap",
    "drivers/net/tun",
    "drivers/net/virtio_net",
    "drivers/vhost/vhost",
    "drivers/vhost/vhost_iotlb",
    "drivers/vhost/vhost_net",
    "net/core/failover",
];
/// Of busybox, by the names that scripts call them by.
const APPLETS: [&str; 4] = ["head", "setsid", "sleep", "taskset"];

/// Adds the applets that host and guest have beside them.
pub fn add_applets(archive: &mut Initramfs) -> Result<()> {
    let mut applets = APPLETS.into_iter();
    applets.try_for_each(|name| archive.link(&format!("bin/{name}"), "busybox"))
}

/// fio's `/usr`, with its libraries.
pub fn fio(cache: &Cache, root: &Root) -> Result<PathBuf> {
    let tree = packages::unpacked(cache, root, (Arch::Arm64, "fio"), &["fio"])?;
    Ok(tree.join("usr"))
}
