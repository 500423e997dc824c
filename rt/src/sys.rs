// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls without a safe wrapper.
#![allow(unsafe_code)]

use std::io;

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
