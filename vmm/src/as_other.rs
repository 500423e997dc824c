// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a test acts as another user or another process than its own.
#![expect(unsafe_code, reason = "system calls that no safe crate has")]

use std::{
    io,
    os::{fd::AsRawFd as _, unix::net::UnixStream},
    path::Path,
};

use nix::sys::{
    socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
    wait::{WaitStatus, waitpid},
};

/// Runs `act` on a thread of its own that is user `uid`, as the other threads aren't; needs root.
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

/// So many connections to `path`, all made by one other process, which has ended since.
pub fn connected_by_another(path: &Path, count: usize) -> Vec<UnixStream> {
    let address = UnixAddr::new(path).unwrap();
    let unix = |_| {
        let flags = SockFlag::SOCK_CLOEXEC;
        socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap()
    };
    let sockets: Vec<_> = (0..count).map(unix).collect();
    // SAFETY: the child makes system calls alone, and ends by one.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut all = sockets.iter();
        let connected = all.all(|socket| connect(socket.as_raw_fd(), &address).is_ok());
        // SAFETY: it ends this process, and no destructor runs.
        unsafe { libc::_exit(i32::from(!connected)) }
    }
    let ended = waitpid(nix::unistd::Pid::from_raw(child), None);
    assert!(matches!(ended, Ok(WaitStatus::Exited(_, 0))), "{ended:?}");
    sockets.into_iter().map(UnixStream::from).collect()
}
