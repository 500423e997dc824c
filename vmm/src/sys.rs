// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's system calls: limits, users, and what makes a process independent of the one that
//! started it. The virtual machine's are in `vm::sys`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};

/// Raises the limit of open files as far as this process may: a guest of 512
/// vCPUs takes some 2100, and shells start programs with 1024.
pub fn raise_open_files() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

/// How many files this process may have open, once it has raised that as far
/// as it may.
pub fn open_files_at_most() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard)
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

/// How many lines the terminal at standard output has.
pub fn terminal_rows() -> Option<u16> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the kernel writes one winsize at the pointer.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_row > 0).then_some(size.ws_row)
}

/// Ignores the signals that end or stop a group of processes.
pub fn ignore_group_signals() {
    let signals = [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGTSTP,
        Signal::SIGPIPE,
    ];
    for number in signals {
        // These signals can be ignored, so the call can't fail.
        // SAFETY: SIG_IGN is no function of ours.
        let _ = unsafe { signal(number, SigHandler::SigIgn) };
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

    #[test]
    fn the_limit_of_open_files_is_raised_as_far_as_possible() {
        raise_open_files().expect("nobody needs privilege for it");
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(soft, hard);
    }
}
