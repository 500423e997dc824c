// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls of `vcpufreq rt report` that have no safe wrapper.
#![allow(unsafe_code)]

use std::{io, os::unix::process::CommandExt as _, process::Command};

/// Has a process that is started get SIGTERM when this thread ends, however that comes about.
pub fn end_with_this_thread(command: &mut Command) {
    let mine = std::process::id();
    let ask = move || {
        // SAFETY: takes numbers only.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) }.into())?;
        // SAFETY: takes nothing.
        match u32::try_from(unsafe { libc::getppid() }) {
            Ok(parent) if parent == mine => Ok(()),
            // It has ended in between.
            _ => Err(io::ErrorKind::Interrupted.into()),
        }
    };
    // SAFETY: both calls are async-signal-safe, and nothing of this allocates.
    unsafe { command.pre_exec(ask) };
}

/// Sends a signal to a process, or with a minus to a group; one that has ended hears nothing.
pub fn kill(target: i32, signal: i32) {
    // SAFETY: takes numbers only.
    unsafe { libc::kill(target, signal) };
}

fn check(ret: libc::c_long) -> io::Result<()> {
    match ret {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
