// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What would be changed on a host, what only people can change, and what could not be seen.

use serde::{Deserialize, Serialize};

use crate::{
    host::{Look, Reading, Unread},
    partition::Partition,
    profile::Profile,
    settings::{self, Context},
    value::{self, Format},
};

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
pub(crate) const THERE: &str = "there";
/// The value of a folder that isn't.
pub(crate) const ABSENT: &str = "absent";

impl Target {
    /// What people call it.
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
    /// Why it can't be told.
    pub fn now(&self, look: &dyn Look) -> Reading {
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
}

/// What proc_pid_stat(5) says of a thread.
pub(crate) struct ThreadStat {
    /// Field 22.
    pub start_ticks: u64,
    /// Field 3: a zombie, or dead.
    pub has_ended: bool,
    /// Field 3: a kernel thread that is parked, and does nothing.
    pub is_parked: bool,
    /// Fields 9 and 4: a kernel thread that kthreadd made. A process can take a kernel thread's
    /// name, but neither this flag nor this parent.
    pub is_kernel_thread: bool,
    /// Fields 41 and 40; `None` for other policies than OTHER, FIFO, RR.
    pub scheduling: Option<String>,
}

/// A flag of the kernel's sched.h.
const PF_KTHREAD: u32 = 0x0020_0000;
/// The process that makes all other kernel threads.
const KTHREADD: &str = "2";

impl ThreadStat {
    pub(crate) fn read(look: &dyn Look, pid: u32) -> Result<Self, Unread> {
        let text = look.read(&format!("/proc/{pid}/stat"))?;
        // The name, in parentheses, can hold anything: count behind it, from field 3.
        let (_, rest) = text.rsplit_once(')').ok_or(Unread::Refused)?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).ok_or(Unread::Refused);
        let number = |at: usize| field(at).ok()?.parse::<i32>().ok();
        let policy = number(41).zip(number(40));
        let flags: u32 = field(9)?.parse().map_err(|_| Unread::Refused)?;
        Ok(Self {
            start_ticks: field(22)?.parse().map_err(|_| Unread::Refused)?,
            has_ended: ["Z", "X"].contains(field(3)?),
            is_parked: *field(3)? == "P",
            is_kernel_thread: flags & PF_KTHREAD != 0 && *field(4)? == KTHREADD,
            scheduling: policy
                .and_then(|(policy, priority)| value::scheduling_text(policy, priority)),
        })
    }
}

/// The users of a process, by proc_pid_status(5): real, effective, saved, and for files.
///
/// # Errors
/// Why procfs doesn't show them.
pub(crate) fn users(look: &dyn Look, pid: u32) -> Result<Vec<u32>, Unread> {
    let text = look.read(&format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    let numbers = line.ok_or(Unread::Refused)?.split_whitespace();
    let users = numbers.map(|number| number.parse().map_err(|_| Unread::Refused));
    users.collect()
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// What is changed.
    #[serde(flatten)]
    pub target: Target,
    /// Its value now; `None` for a file of a folder that isn't there yet.
    pub now: Option<String>,
    /// The value wanted. `None`: the value is lost by another change and brought back with it.
    pub want: Option<String>,
}

impl Change {
    /// Whether nothing has to be done.
    #[must_use]
    pub fn is_set(&self) -> bool {
        match (&self.now, &self.want) {
            (Some(now), Some(want)) => self.target.same(now, want),
            (_, None) => true,
            (None, Some(_)) => false,
        }
    }
}

/// A setting with its changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedSetting {
    /// Its name: the profile's key.
    pub name: &'static str,
    /// Why a real-time guest needs it.
    pub reason: &'static str,
    /// File by file, in the order in which they are made.
    pub changes: Vec<Change>,
}

/// A setting, or a part of one, that this host doesn't have or doesn't show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Absent {
    /// The setting's name.
    pub setting: &'static str,
    /// The file.
    pub path: String,
    /// What follows from that.
    pub why: String,
}

/// What people have to change or to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind", content = "text")]
pub enum Finding {
    /// By a reboot with another command line.
    Reboot(String),
    /// In the firmware's set-up.
    Firmware(String),
    /// By hand, now.
    Hand(String),
    /// Nothing to change, but good to know.
    Note(String),
    /// A process that has the name of one that a setting is about, and is left alone.
    Impostor(String),
}

/// A plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The partition that it is for.
    pub partition: Partition,
    /// Settings, in the order in which they are made.
    pub settings: Vec<PlannedSetting>,
    /// What this host doesn't have.
    pub absent: Vec<Absent>,
    /// What this user can't see.
    pub unseen: Vec<Absent>,
    /// The words missing on the kernel's command line, as they have to stand there.
    pub cmdline: Option<String>,
    /// What people have to do or to know.
    pub findings: Vec<Finding>,
}

impl Plan {
    /// All changes, in order, each with its setting's name.
    pub fn changes(&self) -> impl Iterator<Item = (&'static str, &Change)> {
        self.settings.iter().flat_map(|setting| {
            let changes = setting.changes.iter();
            changes.map(move |change| (setting.name, change))
        })
    }

    /// The processes that have the name of one that a setting is about, and are left alone.
    pub fn impostors(&self) -> impl Iterator<Item = &str> {
        self.findings.iter().filter_map(|finding| match finding {
            Finding::Impostor(what) => Some(&**what),
            _ => None,
        })
    }
}

/// The plan for a partition. Nothing is changed.
#[must_use]
pub fn plan(look: &dyn Look, partition: &Partition, profile: &Profile) -> Plan {
    settings::plan(&Context::new(look, partition, profile))
}
