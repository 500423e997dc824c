// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's QEMU for the host, which starts guests by KVM there. Of its files a kernel that is
//! booted directly needs the program alone. EDK2 is for the scenario that boots guests by it.

use anyhow::Result;

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::initramfs::Initramfs;
use crate::packages;
use crate::root::Root;

const PACKAGE: &str = "qemu-efi-aarch64";
const FIRMWARE: &str = "tree/usr/share/qemu-efi-aarch64/QEMU_EFI.fd";
/// The same six times, each with as much room as a flash device has.
const SLIM: &str = "rm -r $1/usr/share/AAVMF";

/// What a PC's QEMU reads to start a kernel that it is given.
const ROMS: [&str; 3] = [
    "seabios/bios-256k.bin",
    "qemu/kvmvapic.bin",
    "qemu/linuxboot_dma.bin",
];

/// A VMM for the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum GuestVmm {
    /// `vcpufreq run`.
    Vcpufreq,
    /// Debian's QEMU.
    Qemu,
}

impl GuestVmm {
    /// In the plan.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vcpufreq => "vcpufreq",
            Self::Qemu => "qemu",
        }
    }
}

/// It, and what writes device trees for an Arm host's guests.
pub fn programs(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::Arm64 => &["bin/qemu-system-aarch64", "bin/dtc"],
        Arch::X86_64 => &["bin/qemu-system-x86_64"],
    }
}

/// Adds what the programs read; the toolchain root has it for the driver's tests.
pub fn add_roms(archive: &mut Initramfs, root: &Root, arch: Arch) -> Result<()> {
    if arch == Arch::Arm64 {
        return Ok(());
    }
    ROMS.into_iter().try_for_each(|name| {
        let path = format!("share/{name}");
        let file = root.dir().join("usr").join(&path);
        archive.file(&path, &std::fs::read(&file)?)
    })
}

/// Adds EDK2 to a host's initial file system.
pub fn add_firmware(archive: &mut Initramfs, cache: &Cache, root: &Root) -> Result<()> {
    let id = root.id();
    let parts = [&*id, PACKAGE, SLIM].map(str::as_bytes);
    let dir = cache.entry("edk2", &key(parts), |to| {
        packages::unpack(root, to, (Arch::Arm64, "EDK2"), &[PACKAGE], &[SLIM])
    })?;
    packages::note(&dir, &[PACKAGE])?;
    archive.file("lab/firmware", &std::fs::read(dir.join(FIRMWARE))?)
}
