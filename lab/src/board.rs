// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host as a board has it, for the programs that look for their guest's parts themselves: the
//! image and the packed modules of Debian's kernel, a guest driver where DKMS puts it, and depmod's
//! lists.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::initramfs::Initramfs;
use crate::kernel::Kernel;

const GOVERNOR: &str = "drivers/cpufreq/cpufreq_userspace.ko.xz";

/// Adds them to the initial file system of a host that runs this kernel; `driver` is the guest
/// driver's file for it.
pub fn add(archive: &mut Initramfs, kernel: &Kernel, driver: &Path) -> Result<()> {
    let release = &kernel.release;
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    archive.file(&format!("boot/vmlinuz-{release}"), &read(&kernel.image)?)?;
    let modules = format!("lib/modules/{release}");
    let packed = read(&kernel.packed.join(GOVERNOR))?;
    archive.file(&format!("{modules}/kernel/{GOVERNOR}"), &packed)?;
    let name = driver.file_name().context("a module's name")?;
    let own = format!("updates/dkms/{}", Path::new(name).display());
    archive.file(&format!("{modules}/{own}"), &read(driver)?)?;
    let list = format!("kernel/{GOVERNOR}:\n{own}:\n");
    archive.file(&format!("{modules}/modules.dep"), list.as_bytes())
}
