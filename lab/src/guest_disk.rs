// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A disk with Debian's own userland for the guest: systemd, udev, networkd and a shell, unpacked;
//! the modules that udev finds, this project's driver among them; and the agent as a service. The
//! host has it as a disk of its own, which QEMU hands on.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::arch::Arch;
use crate::artifacts::Artifacts;
use crate::cache::key;
use crate::initramfs::Initramfs;
use crate::kernel::{Flavor, Kernel, files_below};
use crate::packages;

const PACKAGES: [&str; 12] = [
    "base-files",
    "base-passwd",
    "bash",
    "coreutils",
    "dash",
    "iproute2",
    "kmod",
    "libc-bin",
    "mount",
    "systemd-sysv",
    "udev",
    "util-linux",
];
/// Of the kernel's own, for the disk: those for devices, and those for a root file system.
const MODULES: [&str; 9] = [
    "drivers/cpufreq/cpufreq_userspace",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
    "net/core/failover",
    DISK,
    "fs/ext4/ext4",
    "fs/jbd2/jbd2",
    "fs/mbcache",
    "lib/crc/crc16",
];
/// Of the disk itself, which the host needs too.
const DISK: &str = "drivers/block/virtio_blk";
/// This checkout's part.
const FOLDER: &str = "lab/guest";

impl Artifacts {
    /// The image, for a guest with this kernel.
    pub fn guest_disk(&self, flavor: Flavor) -> Result<PathBuf> {
        let kernel = Kernel::find(&self.root, flavor)?;
        let packages = packages::unpacked(
            &self.cache,
            &self.root,
            (Arch::Arm64, "guest-userland"),
            &PACKAGES,
        )?;
        let (driver, folder) = (self.guest_driver(&kernel)?, self.repo().join(FOLDER));
        let agent = self.agent(Arch::Arm64)?;
        let mut parts = vec![self.root.id(), kernel.release.clone()];
        parts.extend([&packages, &driver].map(|path| path.display().to_string()));
        let mut parts: Vec<_> = parts.into_iter().map(String::into_bytes).collect();
        for file in files_below(&folder)?.iter().chain([&agent]) {
            parts.push(fs::read(file)?);
        }
        let key = key(parts.iter().map(Vec::as_slice));
        let dir = self.cache.entry("guest-disk", &key, |to| {
            let put = |from: &Path, path: &str| copy(from, &to.join("tree").join(path));
            put(&agent, "usr/sbin/lab-agent")?;
            put(
                &folder.join("lab.service"),
                "etc/systemd/system/lab.service",
            )?;
            for file in files_below(&driver)? {
                let name = file.file_name().and_then(|name| name.to_str());
                if let Some(name) = name.filter(|name| name.ends_with(".ko")) {
                    let release = &kernel.release;
                    put(&file, &format!("usr/lib/modules/{release}/updates/{name}"))?;
                }
            }
            let inside = |path: &Path| self.root.inside(path);
            let (packages, to) = (inside(&packages)?, inside(to)?);
            let script = format!("/src/{FOLDER}/make");
            let mut args = vec![script.as_str(), &packages, &to, &kernel.release];
            args.extend(MODULES);
            self.root.run("making the guest's disk", "sh", &args)?;
            Ok(())
        })?;
        Ok(dir.join("disk"))
    }

    /// Adds the guest's initial file system, which mounts that, and the host's module for it.
    pub fn add_disk_initramfs(
        &self,
        archive: &mut Initramfs,
        host: &Kernel,
        guest: &Kernel,
    ) -> Result<()> {
        let mut initrd = Initramfs::new()?;
        initrd.program("init", &self.repo().join(FOLDER).join("init"))?;
        self.add_shell(&mut initrd, Arch::Arm64)?;
        for path in MODULES {
            self.add_own_module(&mut initrd, guest, path)?;
        }
        archive.file("lab/disk-initramfs", &initrd.finish()?)?;
        self.add_own_module(archive, host, DISK)
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("no folder")?)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}
