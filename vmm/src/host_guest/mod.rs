// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of what the host has, for `bench` and `demo` without files: the kernel that runs, the
//! modules of that kernel that the guest needs, and this program as the load program. The ramdisk
//! is in memory. On x86-64 QEMU runs it.

mod emulator;
mod image;
mod modules;
mod ramdisk;

use std::env::consts::ARCH;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use vcpufreq_bench::{GuestArgs, IO_DEVICE, NULL_BLK};
use vcpufreq_host::HostRoot;

use crate::message::chain;
use modules::Modules;
use ramdisk::Ramdisk;

const RELEASE: &str = "proc/sys/kernel/osrelease";
/// The kernel's driver (Linux 6.13), then this project's.
const DRIVERS: [&str; 2] = ["virtual-cpufreq", "vcpufreq_guest"];
/// By which `demo` requests a frequency.
const GOVERNOR: &str = "cpufreq_userspace";

/// The guest's ramdisk, which is there as long as this value.
#[derive(Debug)]
pub struct HostGuest {
    _ramdisk: File,
}

impl HostGuest {
    /// Gives a guest without a kernel this host's, and on x86-64 QEMU, which may be `named`, or notes
    /// what the host lacks for that; `None` then, and for a guest that has its own kernel.
    pub fn complete(root: &HostRoot, args: &mut GuestArgs, named: Option<&Path>) -> Option<Self> {
        let guest = Self::choose(root, args, named);
        args.lacks = guest.as_ref().err().map(chain);
        guest.ok().flatten()
    }

    /// Completes `args`; where the host lacks something of the guest's, they are as before.
    fn choose(
        root: &HostRoot,
        args: &mut GuestArgs,
        named: Option<&Path>,
    ) -> anyhow::Result<Option<Self>> {
        if cfg!(not(target_arch = "aarch64")) {
            args.qemu = named.map(Path::to_owned);
            emulator::choose(args, ARCH, std::env::var_os("PATH").as_deref())?;
        }
        if args.kernel.is_some() {
            return Ok(None);
        }
        let release = root
            .text(RELEASE)
            .context("can't read the kernel's release")?;
        let kernel = image::find(root, &release)?;
        let modules = Modules::read(root, &release);
        let mut files = driver(&modules, &release)?;
        // Without it `demo` names what it lacks; `bench` does without.
        files.extend(modules.files(GOVERNOR).into_iter().flatten());
        let mut ramdisk = Ramdisk::new()?;
        ramdisk.load_program()?;
        let mut loaded = ramdisk.modules(root, &files)?;
        // For the scenarios that read it, where the host has it too.
        if Path::new(IO_DEVICE).exists() {
            let files = modules.files("null_blk").unwrap_or_default();
            loaded.extend(ramdisk.modules(root, &files)?);
            if let Some(last) = loaded.last_mut().filter(|_| !files.is_empty()) {
                *last = format!("{last} {NULL_BLK}");
            }
        }
        let ramdisk = ramdisk.finish()?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), ramdisk.as_raw_fd());
        args.kernel = Some(kernel);
        args.initrd = Some(path.into());
        args.guest_module = loaded;
        args.of_host = true;
        Ok(Some(Self { _ramdisk: ramdisk }))
    }
}

/// The files of the guest's driver; none where the kernel has it built in.
fn driver(modules: &Modules, release: &str) -> anyhow::Result<Vec<PathBuf>> {
    let found = DRIVERS.iter().find_map(|name| modules.files(name));
    found.with_context(|| {
        if modules.is_empty(DRIVERS[1]) {
            return format!("Linux {release} has no driver for the guest: DKMS built an empty {0}; `modinfo -F description {0}` has the reason", DRIVERS[1]);
        }
        format!("Linux {release} has no driver for the guest ({}); install vcpufreq-dkms and the kernel's headers, or name --kernel, --initrd and --guest-module", DRIVERS.join(", "))
    })
}

#[cfg(test)]
mod tests {
    //! Promises: the kernel's own driver is preferred, and a host without one, or with an empty one, is
    //! a clear line.
    use vcpufreq_host::fakes::FakeHost;

    use super::*;

    const DIR: &str = "lib/modules/6.1";

    #[test]
    fn the_kernels_own_driver_is_preferred() {
        let host = FakeHost::two_plus_two();
        let error = driver(&Modules::read(&host.root(), "6.1"), "6.1").unwrap_err();
        assert!(
            error.to_string().contains("install vcpufreq-dkms"),
            "{error}"
        );
        let ours = "updates/dkms/vcpufreq_guest.ko.xz:\n";
        host.write(&format!("{DIR}/modules.dep"), ours);
        let files = driver(&Modules::read(&host.root(), "6.1"), "6.1").unwrap();
        assert!(files[0].ends_with("updates/dkms/vcpufreq_guest.ko.xz"));
        let empty = "alias empty:vcpufreq_guest vcpufreq_guest\n";
        host.write(&format!("{DIR}/modules.alias"), empty);
        let error = driver(&Modules::read(&host.root(), "6.1"), "6.1").unwrap_err();
        assert!(error.to_string().contains("modinfo"), "{error}");
        let builtin = "kernel/drivers/cpufreq/virtual-cpufreq.ko\n";
        host.write(&format!("{DIR}/modules.builtin"), builtin);
        let files = driver(&Modules::read(&host.root(), "6.1"), "6.1").unwrap();
        assert!(files.is_empty(), "{files:?}");
    }
}
