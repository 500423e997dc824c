// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What host and guest need of their kernel, as its first process.

use std::io::{Write as _, stdout};
use std::path::Path;

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

use crate::harness::{kernel_log, sysfs, uclamp};

/// The file systems that every kernel offers.
pub fn mount_kernel_files() -> Result<()> {
    mount_at("proc", "/proc")?;
    mount_at("sysfs", "/sys")?;
    mount_at("devtmpfs", "/dev")?;
    mount_traces()
}

/// Those that systemd mounts by units that aren't here.
pub fn mount_traces() -> Result<()> {
    mount_at("debugfs", "/sys/kernel/debug")?;
    mount_at("tracefs", "/sys/kernel/tracing")
}

/// Turns off what the kernel does of its own accord that would be measured,
/// on host and guest.
pub fn calm_kernel() -> Result<()> {
    // On an RT kernel interrupts are real-time threads, which run at the maximum by default. A pCPU
    // would never run at its guest's request, and a guest would never request less.
    if is_rt()? {
        uclamp::first_use(Some(0))?;
    }
    // It samples memory 200 times a second.
    let damon = "/sys/module/damon_stat/parameters/enabled";
    if Path::new(damon).exists() {
        sysfs::write(damon, "N")?;
    }
    kernel_log::calm()
}

/// Whether the kernel is a real-time one.
pub fn is_rt() -> Result<bool> {
    // /sys/kernel/realtime was in the RT patches; mainline has none.
    Ok(sysfs::text("/proc/version")?.contains("PREEMPT_RT"))
}

pub fn mount_at(kind: &str, path: &str) -> Result<()> {
    std::fs::create_dir_all(path)?;
    // debugfs may have mounted tracefs below itself; that doesn't hinder.
    mount(Some(kind), path, Some(kind), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("mounting {kind} at {path}"))
}

/// Mounts what systemd mounts on a host that has it.
pub fn mount_bpffs() -> Result<()> {
    if std::fs::read_to_string("/proc/mounts")?.contains(" /sys/fs/bpf bpf") {
        return Ok(());
    }
    mount_at("bpf", "/sys/fs/bpf")
}

/// Ends the machine; as the first process there is nothing left to do when
/// that fails.
pub fn power_off(mode: RebootMode) {
    let _ = stdout().flush();
    nix::unistd::sync();
    let Err(error) = reboot(mode);
    println!("cannot power off: {error}");
    loop {
        std::thread::park();
    }
}
