// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls of real-time guests that have no safe wrapper.
#![allow(unsafe_code)]

use std::{io, os::unix::process::CommandExt as _, process::Command};

use crate::rt_options::RtPolicy;

/// `struct sched_attr` of `include/uapi/linux/sched/types.h`, version 0: without clamps.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

const SIZE: u32 = 48;
const _: () = assert!(size_of::<SchedAttr>() == 48);
const SCHED_FIFO: u32 = 1;
const SCHED_RR: u32 = 2;
const SCHED_DEADLINE: u32 = 6;
const RESET_ON_FORK: u64 = 1;

/// Gives thread `tid` a real-time policy. What it forks starts without.
pub fn schedule(tid: i32, policy: RtPolicy) -> io::Result<()> {
    let ns = |us: u32| u64::from(us) * 1000;
    let base = SchedAttr {
        size: SIZE,
        flags: RESET_ON_FORK,
        ..SchedAttr::default()
    };
    let attr = match policy {
        RtPolicy::Fifo(priority) => SchedAttr {
            policy: SCHED_FIFO,
            priority,
            ..base
        },
        RtPolicy::Rr(priority) => SchedAttr {
            policy: SCHED_RR,
            priority,
            ..base
        },
        RtPolicy::Deadline {
            runtime_us,
            period_us,
        } => SchedAttr {
            policy: SCHED_DEADLINE,
            runtime_ns: ns(runtime_us),
            deadline_ns: ns(period_us),
            period_ns: ns(period_us),
            ..base
        },
    };
    // SAFETY: the kernel reads `attr.size` bytes, which is the size of `attr`.
    let ret = unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attr, 0u32) };
    check(ret)
}

/// Locks all memory of this process, what it maps later too; mapping it then makes it there.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: takes flags only.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) }.into())
}

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
