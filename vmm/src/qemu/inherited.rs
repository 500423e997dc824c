// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Open files that QEMU inherits.

use std::os::{
    fd::{AsFd, AsRawFd},
    unix::net::UnixStream,
};

use anyhow::Context;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// The options that carry the bridge by a device.
pub fn device(socket: &UnixStream, vcpus: usize) -> anyhow::Result<Vec<String>> {
    let number = inherited(socket)?;
    let options = [
        // The names of threads tell the vCPUs.
        "-name".to_owned(),
        "debug-threads=on".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=vcpufreq,fd={number}"),
        "-device".to_owned(),
        // Without master=on QEMU refuses snapshots and migration.
        format!("ivshmem-doorbell,master=on,chardev=vcpufreq,vectors={vcpus}"),
    ];
    Ok(options.into())
}

/// Leaves `file` open in the programs that this one starts; its number there.
pub fn inherited(file: impl AsFd) -> anyhow::Result<i32> {
    let file = file.as_fd();
    fcntl(file, FcntlArg::F_SETFD(FdFlag::empty())).context("can't hand a file to QEMU")?;
    Ok(file.as_raw_fd())
}
