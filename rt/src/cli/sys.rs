// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls of `vcpufreq rt report` that have no safe wrapper.
#![allow(unsafe_code)]

use std::{io, mem, os::unix::process::CommandExt as _, process::Command, ptr};

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

/// Whether this process ignores `signal`, as under nohup(1).
pub(super) fn is_ignored(signal: Signal) -> bool {
    // SAFETY: `sigaction` is numbers and pointers that may be null; all zeros is a value.
    let mut now: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: without a new action the call only writes the present one to `now`.
    let got = unsafe { libc::sigaction(signal as i32, ptr::null(), &raw mut now) };
    got == 0 && now.sa_sigaction == libc::SIG_IGN
}
