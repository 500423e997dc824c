// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's libvirt for the host: its daemon with the driver for QEMU, `virsh`, what the hook runs, and
//! the users and files that the driver wants.

use anyhow::{Context, Result};

use crate::arch::Arch;
use crate::cache::Cache;
use crate::initramfs::Initramfs;
use crate::root::Root;
use crate::{debian, packages};

const PACKAGES: [&str; 4] = [
    "libvirt-clients",
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "util-linux",
];
const PROGRAMS: [&str; 5] = [
    // The hook's.
    "bin/flock",
    "sbin/libvirtd",
    "bin/virsh",
    "lib/libvirt/libvirt_iohelper",
    "lib/aarch64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so",
];
/// CPU models, which the driver reads whatever the domain has.
const CPU_MAP: &str = "share/libvirt/cpu_map";
/// As Debian's packages make them.
const PASSWD: &str = "root:x:0:0::/root:/bin/sh
libvirt-qemu:x:64055:105::/var/lib/libvirt:/bin/false
";
const GROUP: &str = "root:x:0:
kvm:x:104:libvirt-qemu
libvirt-qemu:x:105:
";

/// Adds it to a host's initial file system.
pub fn add(archive: &mut Initramfs, cache: &Cache, root: &Root) -> Result<()> {
    let usr = packages::unpacked(cache, root, (Arch::Arm64, "libvirt"), &PACKAGES)?.join("usr");
    debian::add(archive, root, (Arch::Arm64, Some(&usr)), &PROGRAMS)?;
    for file in crate::kernel::files_below(&usr.join(CPU_MAP))? {
        let path = file.strip_prefix(&usr)?;
        let path = path.to_str().context("a file's name")?;
        archive.file(path, &std::fs::read(&file)?)?;
    }
    for (name, text) in [("passwd", PASSWD), ("group", GROUP)] {
        archive.file(&format!("etc/{name}"), text.as_bytes())?;
    }
    Ok(())
}
