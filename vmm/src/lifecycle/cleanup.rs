// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Removes what dead VMMs left, by their records. Without a record, removes empty cgroups that have
//! our names and whose maker has ended. What belongs to a living VMM, or isn't ours, stays.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::statfs::{CGROUP2_SUPER_MAGIC, statfs},
};
use vcpufreq_host::undo::{JournalEntry, KernelHost, LockedFile, UndoHost};
use vcpufreq_host::{CgroupTree, GroupRecord, HostRoot, RaisedGroups};

use crate::lifecycle::born_threads::put_back_born;
use crate::lifecycle::record::{NoRecord, OwnerStatus, VmmRecord};
use crate::lifecycle::record_names::{is_unfinished, pid_of};
use crate::lifecycle::state::{self, StateDir};
use crate::message::chain;
use crate::patience::{patience_of, patiently};

/// How long processes that were just killed may take to leave their cgroup.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many seconds others may hold records of dead VMMs: a VMM that starts looks at what they put back.
const CLAIMED_WITHIN: u64 = 5;
const TRY_EVERY: Duration = Duration::from_millis(20);

/// What cleaning up did.
#[derive(Debug, Default)]
pub struct Cleaned {
    /// What was removed.
    pub removed: Vec<PathBuf>,
    /// What is left and why, a line each.
    pub left: Vec<String>,
}

/// The host that is cleaned.
pub struct Cleaner<'a> {
    /// Where procfs is.
    pub host: &'a HostRoot,
    /// How cgroups are removed.
    pub tree: &'a dyn CgroupTree,
    /// Whether there is a cgroup at a path, or nothing.
    pub may_be_group: fn(&Path) -> bool,
    /// How long to wait for processes that are ending.
    pub patience: Duration,
    /// How long to wait for others that clean up by the same records, of all records together.
    pub claims_within: Duration,
}

/// In cgroup v2 only the kernel makes files.
fn may_be_group(path: &Path) -> bool {
    match statfs(path) {
        Ok(found) => found.filesystem_type() == CGROUP2_SUPER_MAGIC,
        Err(error) => error == Errno::ENOENT,
    }
}

impl<'a> Cleaner<'a> {
    /// For the running host.
    pub fn new(host: &'a HostRoot) -> Self {
        Self {
            host,
            tree: &vcpufreq_host::KernelTree,
            may_be_group,
            patience: PATIENCE,
            claims_within: patience_of(CLAIMED_WITHIN),
        }
    }

    /// Removes what all records of dead VMMs name.
    ///
    /// # Errors
    /// When the records can't be listed, or one isn't a VMM's; nothing is removed then. When a signal
    /// asks this program to end, which waits for another that cleans up.
    pub fn by_records(&self, dir: &StateDir) -> anyhow::Result<Cleaned> {
        let mut cleaned = Cleaned::default();
        let records = dir.list()?;
        for (path, record) in &records {
            if let Ok(record) = record {
                self.check(path, record)?;
            }
        }
        let mut left = self.claims_within;
        for (path, record) in records {
            match record {
                Ok(record) => self.by_record_within(&mut left, (&path, &record), &mut cleaned)?,
                Err(why) => self.unreadable(&path, &why, &mut cleaned),
            }
        }
        cleaned.removed.extend(dir.remove_ended_vms(self.host)?);
        Ok(cleaned)
    }

    /// Checks that a record names cgroups only, before their threads are moved and they are
    /// removed.
    ///
    /// # Errors
    /// When something else is there.
    pub fn check(&self, path: &Path, record: &VmmRecord) -> Result<(), NoRecord> {
        let mut cgroups = record.entries.iter().flat_map(JournalEntry::cgroups);
        match cgroups.find(|path| !(self.may_be_group)(path)) {
            Some(what) => Err(NoRecord::Foreign {
                record: path.to_owned(),
                what: what.display().to_string(),
            }),
            None => Ok(()),
        }
    }

    /// Removes what one record names, and the record, if its VMM is dead.
    ///
    /// # Errors
    /// As [`Self::by_records`], by a signal.
    pub fn by_record(
        &self,
        path: &Path,
        record: &VmmRecord,
        cleaned: &mut Cleaned,
    ) -> anyhow::Result<()> {
        let mut left = self.claims_within;
        self.by_record_within(&mut left, (path, record), cleaned)
    }

    fn by_record_within(
        &self,
        patience_left: &mut Duration,
        (path, record): (&Path, &VmmRecord),
        cleaned: &mut Cleaned,
    ) -> anyhow::Result<()> {
        let status = record.owner.status(&KernelHost::from(self.host));
        match status {
            OwnerStatus::InUse => return Ok(()),
            OwnerStatus::Unseen => {
                let pid = record.owner.pid;
                let path = path.display();
                cleaned.left.push(format!(
                    "{path}: process {pid} can't be seen from here; run cleanup in its PID namespace, with /proc mounted"
                ));
                return Ok(());
            }
            OwnerStatus::Stale | OwnerStatus::OtherBoot => {}
        }
        let _claimed = match claim(path, patience_left)? {
            Ok(Some(claimed)) => claimed,
            Ok(None) => return Ok(()),
            Err(why) => {
                let path = path.display();
                cleaned
                    .left
                    .push(format!("{path}: another process cleans up after it: {why}"));
                return Ok(());
            }
        };
        let dir = StateDir::at(path.parent().unwrap_or(path));
        let left = match status {
            OwnerStatus::Stale => self.end(&dir, record, cleaned),
            _ => remove_record(path),
        };
        if left.is_empty() {
            cleaned.removed.push(path.to_owned());
        }
        cleaned.left.extend(left);
        Ok(())
    }

    /// Undoes what `record` names, as far as it can be, and removes it from `dir` if that is all.
    /// What is left, a line each.
    pub fn end(&self, dir: &StateDir, record: &VmmRecord, cleaned: &mut Cleaned) -> Vec<String> {
        let (others, own): (Vec<_>, Vec<_>) =
            (record.entries.iter()).partition(|entry| entry.is_of_others());
        let put = others.iter().map(|entry| entry.put_policy_back(self.host));
        let mut left: Vec<_> = put.filter_map(Result::err).collect();
        // What waits for threads that end comes next: others wait for the lock.
        // The last first.
        self.undo(own.into_iter().rev(), &[], (cleaned, &mut left));
        let raised = record.raises();
        let lock = raised.paths().next().is_some().then(|| dir.lock());
        let lock = lock.transpose();
        // Without the lock the rest is undone all the same.
        left.extend(lock.as_ref().err().map(chain));
        let is_raised = |entry: &&JournalEntry| matches!(entry, JournalEntry::Raised(_));
        let rest = others.into_iter().filter(|entry| !is_raised(entry));
        self.undo(rest, &[], (cleaned, &mut left));
        put_back_born(self.host, record);
        match dir.raised_by_others(self.host, record, OwnerStatus::InUse) {
            Ok(needed) => {
                let raised = JournalEntry::Raised(raised);
                self.undo([&raised].into_iter(), &needed, (cleaned, &mut left));
            }
            Err(error) => left.push(chain(&error)),
        }
        match left.is_empty() {
            true => remove_record(&dir.record_path(record.owner.pid)),
            false => left,
        }
    }

    /// Undoes entries, of whose raised groups others need these.
    fn undo<'e>(
        &self,
        entries: impl Iterator<Item = &'e JournalEntry>,
        raised_by_others: &[RaisedGroups],
        (cleaned, left): (&mut Cleaned, &mut Vec<String>),
    ) {
        let host = UndoHost {
            raised_by_others,
            ..self.undo_host()
        };
        for entry in entries {
            match entry.undo(&host) {
                Ok(removed) => cleaned.removed.extend(removed),
                Err(why) => left.push(why),
            }
        }
    }

    fn undo_host(&self) -> UndoHost<'_> {
        UndoHost {
            root: self.host,
            tree: self.tree,
            patience: self.patience,
            raised_by_others: &[],
        }
    }

    /// A file that is no valid record is removed only if it is the unfinished record of a process
    /// that has ended: a VMM makes nothing before its record is complete.
    fn unreadable(&self, path: &Path, why: &anyhow::Error, cleaned: &mut Cleaned) {
        if is_unfinished(path) {
            let pid = pid_of(path).unwrap_or(0);
            let alive = self.host.path(format!("proc/{pid}")).exists();
            if !alive && state::remove_file(path).is_ok() {
                cleaned.removed.push(path.to_owned());
            }
            return;
        }
        cleaned.left.push(format!(
            "{} can't be read as a record ({why}); use the version that wrote it, or remove it by hand \
             if it is not needed",
            path.display()
        ));
    }

    /// Removes cgroups of dead VMMs that have no record any more.
    pub fn without_records(&self, cleaned: &mut Cleaned) {
        // Without cgroup v2 nothing can be left in it.
        let found = vcpufreq_host::leftovers(self.host);
        let groups = found.unwrap_or_default().into_iter().map(|leftover| {
            JournalEntry::Groups(GroupRecord {
                origin: leftover.group.parent().unwrap_or(&leftover.group).into(),
                ..leftover.record()
            })
        });
        for groups in groups {
            match groups.undo(&self.undo_host()) {
                Ok(removed) => cleaned.removed.extend(removed),
                Err(why) => cleaned.left.push(why),
            }
        }
    }
}

/// Holds a dead VMM's record, against others that clean up after it: of two, the later would
/// undo what another guest has set by then. `None` when there is nothing left to do. A wait for another
/// takes of the time that is `left`.
///
/// # Errors
/// When a signal ends that wait.
fn claim(path: &Path, left: &mut Duration) -> anyhow::Result<io::Result<Option<LockedFile>>> {
    let begun = Instant::now();
    let what = format!("for another process, which cleans up by {}", path.display());
    let claimed = patiently(*left, &what, |part| {
        match state::hold(path, Duration::ZERO) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                part.is_ready(&[], TRY_EVERY).map(|_| None)
            }
            held => Ok(Some(held)),
        }
    });
    *left = left.saturating_sub(begun.elapsed());
    Ok(claimed?.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into())))
}

/// Why it can't be removed, in a line.
fn remove_record(path: &Path) -> Vec<String> {
    let removed = state::remove(path);
    let line = |error| format!("{} can't be removed: {error}", path.display());
    removed.map_err(line).err().into_iter().collect()
}

#[cfg(test)]
#[path = "cleanup_tests.rs"]
mod tests;
