// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `vcpufreq rt report` does between fork(2) and execve(2).
#![allow(unsafe_code)]

use std::{io, os::unix::process::CommandExt as _, process::Command};

use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{SigSet, Signal},
    },
    unistd::getppid,
};

/// Has a process that is started get SIGTERM when this thread ends, however that comes about. It
/// starts with no signal blocked.
pub(super) fn end_with_this_thread(command: &mut Command) {
    let mine = std::process::id();
    let ask = move || {
        SigSet::empty().thread_set_mask()?;
        set_pdeathsig(Signal::SIGTERM)?;
        match u32::try_from(getppid().as_raw()) {
            Ok(parent) if parent == mine => Ok(()),
            // It has ended in between.
            _ => Err(io::ErrorKind::Interrupted.into()),
        }
    };
    // SAFETY: the three calls are async-signal-safe, and nothing of this allocates.
    unsafe { command.pre_exec(ask) };
}
