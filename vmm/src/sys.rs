// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's system calls that have no safe wrapper: limits, users, and what
//! makes a process independent of the one that started it. The virtual
//! machine's are in `vm::sys`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

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

/// The user that this process acts as.
pub fn own_uid() -> u32 {
    // SAFETY: geteuid has no arguments and can't fail.
    unsafe { libc::geteuid() }
}

/// The user that the process at the other end of `socket` acted as when it connected.
pub fn peer_uid(socket: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `len` bytes at the pointer, the size of `peer`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    match result {
        0 => Ok(peer.uid),
        _ => Err(io::Error::last_os_error()),
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

/// Runs `act` on a thread of its own that is user `uid`, as the other threads aren't; needs root.
#[cfg(test)]
pub fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let uid = libc::c_long::from(uid);
            // SAFETY: the call has no memory arguments. Unlike the C library's function it is of
            // the calling thread alone.
            match unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) } {
                0 => Ok(act()),
                _ => Err(io::Error::last_os_error()),
            }
        });
        thread.join().expect("the thread doesn't panic")
    })
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
