// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's system calls that have no safe wrapper: the clock, and what
//! makes a process independent of the one that started it. The virtual
//! machine's are in `vm::sys`.
#![allow(unsafe_code)]

use std::io;

/// CLOCK_MONOTONIC in ns, the clock of the kernel's trace events with
/// `trace_clock=mono`. Through the vDSO: no system call.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec that lives through the call. The clock
    // exists on every Linux, so the result has nothing to say.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let second = u64::try_from(now.tv_sec).unwrap_or(0);
    second * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Leaves the session of the terminal and of whoever started this process.
pub fn leave_session() -> io::Result<()> {
    // SAFETY: setsid has no arguments and touches no memory of ours.
    match unsafe { libc::setsid() } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Ignores the signals that end or stop a group of processes.
pub fn ignore_group_signals() {
    let signals = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGTSTP,
        libc::SIGPIPE,
    ];
    for signal in signals {
        // SAFETY: SIG_IGN is no function of ours, and these signals can be
        // ignored, so the call can't fail.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
