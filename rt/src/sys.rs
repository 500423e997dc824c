// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls without a safe wrapper.
#![allow(unsafe_code)]

use std::{io, mem, os::fd::AsRawFd, os::unix::net::UnixStream};

/// Gives thread `pid` a policy of sched(7) and a static priority.
pub(crate) fn set_scheduler(pid: u32, policy: i32, priority: i32) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: `param` lives over the call, which only reads it.
    match unsafe { libc::sched_setscheduler(pid, policy, &raw const param) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The process and the user that listened on the other end of a socket (SO_PEERCRED of unix(7)).
pub(crate) fn server_of(stream: &UnixStream) -> io::Result<(u32, u32)> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = libc::socklen_t::try_from(mem::size_of_val(&peer))
        .map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `peer` and `length` live over the call, which writes at most `length` bytes to `peer`.
    let got = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    // A process of another PID namespace has number 0 here.
    let pid = u32::try_from(peer.pid).unwrap_or(0);
    Ok((pid, peer.uid))
}
