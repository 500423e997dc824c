// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls that the library makes on a VMM's threads and its own, for filters (seccomp(2)).
//! They are those of a program with the GNU C library, without the path `bpf`. Not in them is what each
//! thread of a Rust program makes: memory, locks, clocks, `close`, `write` and `exit`. Nor is what starts
//! and ends a bridge, and the new path in [`fall_back`](crate::Attachment::fall_back): threads, files,
//! eventfds, epoll sets and perf events.

/// On a vCPU's thread: an access that exits, and [`before_run`](crate::BridgeHandle::before_run).
/// `register_this_thread` comes before the filter.
pub const VCPU: &[i64] = &[
    libc::SYS_epoll_pwait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setattr,
];

/// On a [`Requests`](crate::BridgeThread::Requests) thread, as a filter of
/// [`spawn`](crate::Embedder::spawn) finds it.
pub const REQUESTS: &[i64] = &[
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_gettid,
    // Perf events are armed again.
    libc::SYS_ioctl,
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
];

/// On the [`Maintenance`](crate::BridgeThread::Maintenance) thread, as a filter of
/// [`spawn`](crate::Embedder::spawn) finds it. It opens files of sysfs to read them.
pub const MAINTENANCE: &[i64] = &[
    libc::SYS_epoll_ctl,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_getcpu,
    libc::SYS_getdents64,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    // Of a pCPU that has come online, without a helper.
    libc::SYS_perf_event_open,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_statx,
];
