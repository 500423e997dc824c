// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What can be wrong with cgroups: a line each, the cause and the next step.

#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;

/// Why a VM can't have groups, or they can't be removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup v2 at all.
    #[error("cgroup v2 is not mounted; mount it at /sys/fs/cgroup")]
    NotMounted,
    /// The process is in a group that its namespace doesn't show.
    #[error("this process is in cgroup {group}, outside its cgroup namespace")]
    OutsideNamespace {
        /// The group as the kernel names it.
        group: String,
    },
    /// The cpu controller is not to be had.
    #[error(
        "{} has no cpu controller; delegate it, or free it from cgroup v1",
        path.display()
    )]
    NoCpuController {
        /// The group.
        path: PathBuf,
    },
    /// The kernel has no clamps on groups.
    #[error("{} has no cpu.uclamp.min; the kernel needs CONFIG_UCLAMP_TASK_GROUP", path.display())]
    NoUclamp {
        /// The group.
        path: PathBuf,
    },
    /// A group above caps every minimum below it.
    #[error("{} is {value}, which caps all below it; write max to it", path.display())]
    Capped {
        /// The file.
        path: PathBuf,
        /// What it holds.
        value: String,
    },
    /// The cpu controller can't be switched on in a group with processes.
    #[error("{} has processes, so the cpu controller can't be switched on in it", path.display())]
    InternalProcesses {
        /// The group.
        path: PathBuf,
    },
    /// A group that can't have domain children.
    #[error("{} is a cgroup of type '{kind}', not a domain", path.display())]
    NotADomain {
        /// The group.
        path: PathBuf,
        /// Its type.
        kind: String,
    },
    /// The groups around the process belong to another manager.
    #[error(
        "{} isn't delegated to this program; start it by a systemd unit with Delegate=cpu, or name \
         a place with --cgroup-parent",
        path.display()
    )]
    NotDelegated {
        /// The process' own group.
        path: PathBuf,
    },
    /// A parent that isn't one.
    #[error(
        "{} is no cgroup below {}; name one by its whole path",
        path.display(),
        mount.display()
    )]
    NoGroup {
        /// What was named.
        path: PathBuf,
        /// Where groups are.
        mount: PathBuf,
    },
    /// A limit would end without a word.
    #[error(
        "{} has {limit}, which the move to {} would end; name a group below that one, or start \
         where nothing is limited (systemd-run -p TasksMax=infinity)",
        group.display(),
        to.display()
    )]
    LeavesLimit {
        /// The group that has it.
        group: PathBuf,
        /// File and value, or type of program.
        limit: String,
        /// Where the process would go.
        to: PathBuf,
    },
    /// A limit might end.
    #[error(
        "can't read whether {} has BPF programs ({error}); take a group below it, or run with \
         CAP_NET_ADMIN",
        group.display()
    )]
    UnknownLimits {
        /// The group.
        group: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// A group that should be gone still has processes or children.
    #[error("{} is still in use; try again when its processes have ended", path.display())]
    Busy {
        /// The group.
        path: PathBuf,
    },
    /// The group that this process would make is there, with a process in it.
    #[error(
        "{} is the group of a running process that has this one's number in another PID namespace; \
         start again",
        path.display()
    )]
    Taken {
        /// The group.
        path: PathBuf,
    },
    /// Any other refusal.
    #[error("{}: {error}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}
