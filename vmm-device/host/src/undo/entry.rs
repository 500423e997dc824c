// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One change of a VMM's record, with all that undoing it needs.

use std::{
    path::{Component, Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{kernel_host::KernelHost, old_value::OldValue, retry::TRY_EVERY, scope::JournalScope};
use crate::{
    AdoptedGroups, CgroupError, CgroupTree, GROUP_PREFIX, GroupRecord, HostRoot, PartitionGroups,
    RaisedGroups, SavedThread, remove,
};

/// A change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JournalEntry {
    /// A kernel file has another value.
    File(OldValue),
    /// A thread of another program is clamped, pinned or scheduled.
    Thread(SavedThread),
    /// Cgroups of another program are clamped.
    Cgroup(AdoptedGroups),
    /// A VM has cgroups of its own.
    Groups(GroupRecord),
    /// It has them in a real-time partition.
    Partition(PartitionGroups),
    /// Cgroups above those of a VM are raised.
    Raised(RaisedGroups),
}

/// What entries are undone on.
#[derive(Clone, Copy)]
pub struct UndoHost<'a> {
    /// Where the host's files are.
    pub root: &'a HostRoot,
    /// How cgroups are removed.
    pub tree: &'a dyn CgroupTree,
    /// How long to wait for threads that are just leaving a cgroup.
    pub patience: Duration,
    /// What others have raised, and still need.
    pub raised_by_others: &'a [RaisedGroups],
}

impl JournalEntry {
    /// The cgroups that it names.
    #[must_use]
    pub fn cgroups(&self) -> Vec<&Path> {
        match self {
            Self::File(_) | Self::Thread(_) => Vec::new(),
            Self::Cgroup(adopted) => adopted.of_vcpus().collect(),
            Self::Groups(groups) => vec![&groups.group, &groups.origin],
            Self::Partition(groups) => vec![&groups.top, &groups.origin],
            Self::Raised(raised) => raised.paths().collect(),
        }
    }

    /// Its name in texts.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File(value) => value.target.name(),
            Self::Thread(SavedThread { pid, tid, .. }) => format!("thread {tid} of process {pid}"),
            _ => {
                // Of those that none makes, one; else the first.
                let cgroups = self.cgroups();
                let odd = cgroups.iter().find(|path| !is_plain(path));
                let named = odd.or(cgroups.first());
                named.map_or_else(String::new, |path| path.display().to_string())
            }
        }
    }

    /// Whether process `pid`, which may change the files of `scope`, makes such a change: root undoes
    /// no other. Whether a path is a cgroup's is not looked at.
    #[must_use]
    pub fn is_ours(&self, pid: u32, scope: &JournalScope) -> bool {
        let named = match self {
            Self::File(value) => scope.has(&value.target),
            Self::Groups(groups) => name_of(&groups.group) == format!("{GROUP_PREFIX}{pid}"),
            Self::Partition(groups) => {
                groups.pid == pid && name_of(&groups.top).starts_with("vcpufreq-rt.")
            }
            Self::Thread(_) | Self::Cgroup(_) | Self::Raised(_) => true,
        };
        named && self.cgroups().iter().all(|path| is_plain(path))
    }

    /// Whether it changes what belongs to other programs and may be shared with other VMs. That is
    /// undone behind the journal's lock, after what the VM has made itself.
    #[must_use]
    pub fn is_of_others(&self) -> bool {
        matches!(self, Self::Thread(_) | Self::Cgroup(_) | Self::Raised(_))
    }

    /// The groups that it raises.
    #[must_use]
    pub fn raises(&self) -> RaisedGroups {
        match self {
            Self::Raised(raised) => raised.clone(),
            Self::Groups(groups) if groups.raised_min => {
                RaisedGroups::one(groups.origin.clone(), "0")
            }
            _ => RaisedGroups::default(),
        }
    }

    /// Puts a thread's scheduling policy back, before anything else is undone: a real-time thread that
    /// leaves its pCPU starves others.
    ///
    /// # Errors
    /// As [`SavedThread::put_policy_back`], in a line.
    pub fn put_policy_back(&self, root: &HostRoot) -> Result<(), String> {
        let Self::Thread(thread) = self else {
            return Ok(());
        };
        let put = thread.put_policy_back(root);
        put.map_err(|error| format!("the policy of {} can't be put back: {error}", self.name()))
    }

    /// Undoes it; returns the cgroup that was removed. It leaves a thread's policy to
    /// [`Self::put_policy_back`], and what is raised for the VM's own groups to an entry
    /// [`Self::Raised`]. What is undone or gone already is no error.
    ///
    /// # Errors
    /// What could not be undone, in a line.
    pub fn undo(&self, host: &UndoHost<'_>) -> Result<Option<PathBuf>, String> {
        let done = match self {
            Self::File(value) => {
                let undone = value.undo(&KernelHost::from(host.root), host.patience);
                return undone
                    .map(|_| None)
                    .map_err(|why| format!("{}: {why}", self.name()));
            }
            Self::Thread(thread) => {
                let put = thread.put_back(host.root);
                let put = put.map_err(|error| {
                    format!("the clamp of {} can't be put back: {error}", self.name())
                });
                return put.map(|()| None);
            }
            Self::Cgroup(adopted) => adopted.put_back().map(|()| None),
            Self::Raised(raised) => raised.put_back(host.raised_by_others).map(|()| None),
            Self::Groups(groups) => {
                // What is raised for them may be raised for others, too.
                let groups = GroupRecord {
                    raised_min: false,
                    ..groups.clone()
                };
                host.remove(&groups.group, || remove(host.tree, &groups))
            }
            Self::Partition(groups) => host.remove(&groups.rest(), || groups.remove(host.tree)),
        };
        done.map_err(|error| error.to_string())
    }
}

impl UndoHost<'_> {
    /// Has `remove` remove groups, one of them `group`, whose threads may be just leaving. That group,
    /// if it was there.
    fn remove(
        &self,
        group: &Path,
        remove: impl Fn() -> Result<(), CgroupError>,
    ) -> Result<Option<PathBuf>, CgroupError> {
        let was_there = group.exists();
        let until = Instant::now() + self.patience;
        loop {
            match remove() {
                Err(CgroupError::Busy { .. }) if Instant::now() < until => sleep(TRY_EVERY),
                done => return done.map(|()| was_there.then(|| group.to_owned())),
            }
        }
    }
}

/// Whether a path is one that a program makes: absolute, without `.` and `..`.
fn is_plain(path: &Path) -> bool {
    let mut parts = path.components();
    path.is_absolute()
        && parts.all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

/// The last part of a path; nothing of one that isn't text.
fn name_of(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    //! Promises: a process undoes only changes that its kind makes; an entry is the same after it
    //! was written.
    use super::*;
    use crate::undo::{Format, Target};

    const SCOPE: JournalScope = JournalScope {
        files: &[],
        inside: &["/sys/cpu*/bound"],
        shown_in: &[],
        dirs: &[],
        threads: &[],
    };

    fn groups(group: &str, origin: &str) -> JournalEntry {
        JournalEntry::Groups(GroupRecord {
            group: group.into(),
            origin: origin.into(),
            enabled_cpu: false,
            raised_min: false,
        })
    }

    fn partition(top: &str, pid: u32) -> JournalEntry {
        JournalEntry::Partition(PartitionGroups {
            top: top.into(),
            origin: "/cg".into(),
            pid,
            process: 8,
            rt: Vec::new(),
        })
    }

    fn file(path: &str) -> JournalEntry {
        JournalEntry::File(OldValue {
            target: Target::Inside {
                path: path.to_owned(),
                format: Format::Text,
                or_at: None,
            },
            old: "0".to_owned(),
            only_if: None,
        })
    }

    fn raised(group: &str) -> JournalEntry {
        JournalEntry::Raised(RaisedGroups::one(group.into(), "0"))
    }

    #[test]
    fn a_process_undoes_what_it_may_have_changed() {
        for (entry, is_ours) in [
            (groups("/cg/vcpufreq.7", "/cg"), true),
            (groups("/cg/vcpufreq.8", "/cg"), false),
            (groups("/cg/vcpufreq.7", "/cg/../etc"), false),
            (groups("cg/vcpufreq.7", "/cg"), false),
            (partition("/cg/vcpufreq-rt.plc", 7), true),
            (partition("/cg/vcpufreq-rt.plc", 8), false),
            (partition("/cg/system.slice", 7), false),
            (file("/sys/cpu3/bound"), true),
            (file("/sys/cpu3/../bound"), false),
            (file("/etc/passwd"), false),
            (raised("/cg/machine.slice"), true),
            (raised("/cg/.."), false),
        ] {
            assert_eq!(entry.is_ours(7, &SCOPE), is_ours, "{entry:?}");
            let text = serde_json::to_string(&entry).unwrap();
            assert_eq!(serde_json::from_str::<JournalEntry>(&text).unwrap(), entry);
        }
        // What no VMM makes is what a user has to look at.
        let named = groups("/cg/vcpufreq.7", "/cg/../etc").name();
        assert_eq!(named, "/cg/../etc");
        assert_eq!(groups("/cg/vcpufreq.7", "/cg").name(), "/cg/vcpufreq.7");
    }
}
