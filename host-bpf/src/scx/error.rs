// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why a service doesn't start, or a VM has no part in it.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use crate::error::BpfError;

/// The file system where maps are pinned.
pub(super) const BPFFS: &str = "/sys/fs/bpf";

/// Why there is no such actuator: each with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ScxError {
    /// The process isn't root's.
    #[error("loading a scheduler takes root; run it as root or as a unit of the system's")]
    NotRoot,
    /// The kernel is without sched_ext.
    #[error(
        "this kernel has no sched_ext; it needs CONFIG_SCHED_CLASS_EXT=y (Linux 7.0 or later); use \
         another --actuator"
    )]
    NoSchedExt,
    /// There is nowhere to pin maps.
    #[error("{BPFFS} is no BPF file system; mount it: mount -t bpf -o mode=700 bpf {BPFFS}")]
    NoBpffs,
    /// Another scheduler is loaded, or was just now.
    #[error("sched_ext is {state} with the scheduler {ops}; end that one first")]
    Another {
        /// `/sys/kernel/sched_ext/state`.
        state: String,
        /// Its name.
        ops: String,
    },
    /// The kernel has taken the scheduler and not enabled it.
    #[error(
        "the kernel did not enable the scheduler ({0}); SCHED_DEADLINE threads have to leave 5 % of \
         each CPU, see dmesg"
    )]
    NotEnabled(String),
    /// No service runs.
    #[error(
        "no vcpufreq scx service runs; start it (vcpufreq scx start) or use another --actuator"
    )]
    NotRunning,
    /// Maps of another version.
    #[error("the vcpufreq scx service is of another version; start it again from this one")]
    OtherVersion,
    /// It was started anew between two looks at its pins.
    #[error("the vcpufreq scx service has just been started again; start the guest again")]
    Restarted,
    /// The pinned maps.
    #[error("{}: {why}", .path.display())]
    Pin {
        /// What was pinned or opened.
        path: PathBuf,
        /// The kernel's error, as text.
        why: String,
    },
    /// All that can be wrong with an object.
    #[error(transparent)]
    Bpf(#[from] BpfError),
}

pub(super) fn pin_error(path: &Path, why: impl std::fmt::Display) -> ScxError {
    ScxError::Pin {
        path: path.to_owned(),
        why: format!("{why:#}"),
    }
}
