// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which process a record is of, and whether that still runs.

use serde::{Deserialize, Serialize};

use super::{
    host::{ReadHost, Unread},
    thread_stat::ThreadStat,
};

/// The file with the number of this boot.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A process, with what distinguishes it from all others of all boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since boot: field 22 of
    /// proc_pid_stat(5). Together with the number, unique for a boot.
    pub start_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// The PID namespace that the number counts in, as the link
    /// `/proc/self/ns/pid` names it.
    pub pid_namespace: String,
}

/// Whether a process still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerStatus {
    /// It runs.
    InUse,
    /// It is gone, or a zombie without other threads.
    Stale,
    /// It was of an earlier boot: nothing that it made in the kernel exists any more.
    OtherBoot,
    /// It can't be seen from here: it is in another PID namespace, or procfs hides it.
    Unseen,
}

impl Owner {
    /// The process `pid`.
    ///
    /// # Errors
    /// As [`ReadHost::read`] of its files in procfs; [`Unread::Missing`] when it has ended or procfs
    /// hides it.
    pub fn read(look: &dyn ReadHost, pid: u32) -> Result<Self, Unread> {
        let stat = ThreadStat::read(look, pid)?;
        if stat.has_ended {
            return Err(Unread::Missing);
        }
        Ok(Self {
            pid,
            start_ticks: stat.start_ticks,
            boot_id: look.read(BOOT_ID)?,
            pid_namespace: pid_namespace(look),
        })
    }

    /// Whether it still runs.
    #[must_use]
    pub fn status(&self, look: &dyn ReadHost) -> OwnerStatus {
        let Ok(boot_id) = look.read(BOOT_ID) else {
            return OwnerStatus::Unseen;
        };
        if boot_id != self.boot_id {
            return OwnerStatus::OtherBoot;
        }
        if pid_namespace(look) != self.pid_namespace {
            return OwnerStatus::Unseen;
        }
        let stat = ThreadStat::read(look, self.pid);
        let runs = stat.is_ok_and(|stat| !stat.has_ended && stat.start_ticks == self.start_ticks);
        match runs {
            true => OwnerStatus::InUse,
            false => OwnerStatus::Stale,
        }
    }
}

fn pid_namespace(look: &dyn ReadHost) -> String {
    look.link_name("/proc/self/ns/pid").unwrap_or_default()
}
