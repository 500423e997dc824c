// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a test acts as another user than its own.
#![expect(unsafe_code, reason = "system calls that no safe crate has")]

use std::io;

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
