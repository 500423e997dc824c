// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A Linux guest before it is booted.

use std::path::PathBuf;

use anyhow::anyhow;

use super::disk::DiskImage;
use super::environment::Hooks;
use super::gic::Gic;
use super::image::{BootPlacement, Initrd, KernelImage};
use super::memory::PageSize;

/// What a virtual machine is made of: checked, and nothing of it in KVM.
#[derive(Debug)]
pub struct VmSpec {
    /// The kernel.
    pub kernel: KernelImage,
    /// The initrd, if there is one.
    pub initrd: Option<Initrd>,
    /// The disk, if there is one.
    pub disk: Option<DiskImage>,
    /// Where kernel and initrd go.
    pub place: BootPlacement,
    /// The kernel command line.
    pub cmdline: String,
    /// The pCPUs that each vCPU's thread may run on; all if empty.
    pub pins: Vec<Vec<u32>>,
    /// What its memory is made of.
    pub pages: PageSize,
    /// Whether the host can read only what the guest shares.
    pub protected: bool,
    /// The KVM device.
    pub kvm_device: PathBuf,
    /// Where to write the device tree, as a dtb.
    pub dump_dtb: Option<PathBuf>,
}

/// A Linux guest to boot; how is [`arch`](super::arch)'s.
pub struct LinuxGuest<'a> {
    /// What it is made of.
    pub spec: VmSpec,
    /// Its interrupt controller.
    pub gic: Gic,
    /// The device tree.
    pub fdt: &'a [u8],
    /// Where warnings go.
    pub hooks: &'a dyn Hooks,
    /// Whether the user knows what this host's KVM lacks.
    pub warned: bool,
}

/// Why a Linux guest can't be booted on this architecture.
pub fn not_there_yet() -> anyhow::Error {
    anyhow!(
        "running a Linux guest on {} isn't there yet; use an arm64 host, or the emulated one (make lab-shell)",
        std::env::consts::ARCH
    )
}
