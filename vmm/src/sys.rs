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

/// Raises the limit of open files as far as this process may: a guest of 512
/// vCPUs takes some 2100, and shells start programs with 1024.
pub fn raise_open_files() -> io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is an rlimit that lives through the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How many files this process may have open, once it has raised that as far
/// as it may.
pub fn open_files_at_most() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is an rlimit that lives through the call.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => limit.rlim_max,
        _ => 0,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn open_files() -> (libc::rlim_t, libc::rlim_t) {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `limit` is an rlimit that lives through the call.
        let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
        assert_eq!(result, 0);
        (limit.rlim_cur, limit.rlim_max)
    }

    #[test]
    fn the_limit_of_open_files_is_raised_as_far_as_possible() {
        raise_open_files().expect("nobody needs privilege for it");
        let (soft, hard) = open_files();
        assert_eq!(soft, hard);
    }
}
