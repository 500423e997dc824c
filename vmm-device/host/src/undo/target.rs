// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a program changes on its host for a while: a kernel file, a folder, a kernel thread.

use std::{io, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    host::{ReadHost, Reading, Unread, WriteHost},
    thread_stat::ThreadStat,
    value::Format,
};

/// How often, and how far apart, to check whether a value is in force: a work item applies
/// cpufreq's limits.
const LOOKS: u32 = 50;
const BETWEEN_LOOKS: Duration = Duration::from_millis(2);

/// What is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Target {
    /// A kernel file.
    File {
        /// Its path.
        path: String,
        /// How its text is a value.
        format: Format,
        /// The file that shows what was written, where it is another one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shown_in: Option<String>,
    },
    /// A folder that is made: a cgroup.
    Dir {
        /// Its path.
        path: String,
    },
    /// A file of such a folder, or of a governor that is chosen: it goes with that.
    Inside {
        /// Its path.
        path: String,
        /// How its text is a value.
        format: Format,
        /// Where it is when it isn't there: a governor's tunables are each policy's or everyone's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        or_at: Option<String>,
    },
    /// A kernel thread's scheduling policy and priority.
    Thread {
        /// Its number.
        pid: u32,
        /// Its name, as `rcuc/3`.
        name: String,
        /// Field 22 of proc_pid_stat(5): with the number, unique for a boot.
        start_ticks: u64,
    },
}

/// The value of a folder that is there.
pub const THERE: &str = "there";
/// The value of a folder that isn't.
pub const ABSENT: &str = "absent";

impl Target {
    /// Its name in texts.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File { path, .. } | Self::Dir { path } | Self::Inside { path, .. } => {
                path.clone()
            }
            Self::Thread { pid, name, .. } => format!("{name} (thread {pid})"),
        }
    }

    /// Its value now.
    ///
    /// # Errors
    /// As [`ReadHost::read`] or [`ReadHost::list`]; [`Unread::Missing`] when the thread has ended or its
    /// number is another one's, [`Unread::Refused`] when its policy is none of
    /// [`WriteHost::schedule`].
    pub fn now(&self, look: &dyn ReadHost) -> Reading {
        match self {
            Self::File {
                path,
                format,
                shown_in,
            } => {
                let text = look.read(shown_in.as_ref().unwrap_or(path))?;
                Ok(format.value(&text))
            }
            Self::Inside {
                path,
                format,
                or_at,
            } => match (look.read(path), or_at) {
                (Err(Unread::Missing), Some(other)) => Ok(format.value(&look.read(other)?)),
                (text, _) => Ok(format.value(&text?)),
            },
            Self::Dir { path } => match look.list(path) {
                Ok(_) => Ok(THERE.to_owned()),
                Err(Unread::Missing) => Ok(ABSENT.to_owned()),
                Err(why) => Err(why),
            },
            Self::Thread {
                pid, start_ticks, ..
            } => {
                let thread = ThreadStat::read(look, *pid)?;
                if thread.start_ticks != *start_ticks || !thread.is_kernel_thread {
                    return Err(Unread::Missing);
                }
                thread.scheduling.ok_or(Unread::Refused)
            }
        }
    }

    /// Whether two values of it mean the same.
    #[must_use]
    pub fn same(&self, a: &str, b: &str) -> bool {
        match self {
            Self::File { format, .. } | Self::Inside { format, .. } => format.same(a, b),
            Self::Dir { .. } | Self::Thread { .. } => a == b,
        }
    }

    /// Whether it is there again with its CPU, with the same value: the kernel keeps the settings of
    /// a CPU that is offline. Interrupts, queues and threads that go are gone.
    #[must_use]
    pub(super) fn comes_back(&self) -> bool {
        matches!(self, Self::File { path, .. } if path.starts_with("/sys/devices/system/cpu/"))
    }

    /// Gives it a value.
    ///
    /// # Errors
    /// As [`WriteHost::write`], [`WriteHost::make_dir`], [`WriteHost::remove_dir`] or
    /// [`WriteHost::schedule`]; `NotFound` when the thread has ended.
    pub fn write(&self, host: &dyn WriteHost, value: &str) -> io::Result<()> {
        match self {
            Self::File { path, .. } => host.write(path, value),
            Self::Inside { path, or_at, .. } => match (host.write(path, value), or_at) {
                (Err(error), Some(other)) if error.kind() == io::ErrorKind::NotFound => {
                    host.write(other, value)
                }
                (written, _) => written,
            },
            Self::Dir { path } if value == THERE => host.make_dir(path),
            Self::Dir { path } => host.remove_dir(path),
            // Again: while the others were written, its number may have become another's.
            Self::Thread { pid, .. } => match self.now(host.as_look()) {
                Ok(_) => host.schedule(*pid, value),
                Err(_) => Err(io::ErrorKind::NotFound.into()),
            },
        }
    }

    /// Gives it a value, and checks that it has it.
    ///
    /// # Errors
    /// As [`Self::write`], as text; what the kernel made of the value.
    pub fn put(&self, host: &dyn WriteHost, value: &str) -> Result<(), String> {
        let written = self.write(host, value);
        written.map_err(|error| error.to_string())?;
        for _ in 0..LOOKS {
            match self.now(host.as_look()) {
                Ok(now) if self.same(&now, value) => return Ok(()),
                Ok(_) => std::thread::sleep(BETWEEN_LOOKS),
                Err(_) => break,
            }
        }
        match self.now(host.as_look()) {
            Ok(now) => Err(format!("the kernel made it '{now}'")),
            Err(_) => Err("it can't be read back".to_owned()),
        }
    }
}
