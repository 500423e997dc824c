// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Removes what dead VMMs left: by their records, and, where even the record
//! is lost, by cgroups that carry our names, are empty and whose maker is gone.
//! What belongs to a living VMM, or isn't ours, stays.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::statfs::{CGROUP2_SUPER_MAGIC, statfs},
};
use vcpufreq_device::host::{self, CgroupError, CgroupTree, GroupRecord, HostRoot};
use vcpufreq_rt::KernelHost;

use crate::lifecycle::state::{self, NoRecord, Record, Standing, StateDir};

/// How long processes that were just killed may take to leave their cgroup.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often to try while they do. Killed processes take 1 to 20 ms.
const TRY_EVERY: Duration = Duration::from_millis(5);

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
            tree: &host::KernelTree,
            may_be_group,
            patience: PATIENCE,
        }
    }

    /// Removes what all records of dead VMMs name.
    ///
    /// # Errors
    /// When the records can't be listed, or one isn't a VMM's; nothing is removed then.
    pub fn by_records(&self, dir: &StateDir) -> anyhow::Result<Cleaned> {
        let mut cleaned = Cleaned::default();
        let records = dir.list()?;
        for (path, record) in &records {
            if let Ok(record) = record {
                self.check(path, record)?;
            }
        }
        for (path, record) in records {
            match record {
                Ok(record) => self.by_record(&path, &record, &mut cleaned),
                Err(why) => self.unreadable(&path, &why, &mut cleaned),
            }
        }
        Ok(cleaned)
    }

    /// Whether what a record names are cgroups: what is in one is moved, and it is removed.
    ///
    /// # Errors
    /// When something else is there.
    pub fn check(&self, path: &Path, record: &Record) -> Result<(), NoRecord> {
        match record.paths().find(|path| !(self.may_be_group)(path)) {
            Some(what) => Err(NoRecord::Foreign {
                record: path.to_owned(),
                what: what.to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// Removes what one record names, and the record, if its VMM is dead.
    pub fn by_record(&self, path: &Path, record: &Record, cleaned: &mut Cleaned) {
        let standing = record.owner.standing(&KernelHost::from(self.host));
        match standing {
            Standing::InUse => return,
            Standing::Unseen => {
                let pid = record.owner.pid;
                let path = path.display();
                cleaned.left.push(format!(
                    "{path}: process {pid} can't be seen from here; run cleanup in its PID namespace, with /proc mounted"
                ));
                return;
            }
            Standing::Stale | Standing::OtherBoot => {}
        }
        let _claimed = match self.claim(path) {
            Ok(Some(claimed)) => claimed,
            Ok(None) => return,
            Err(why) => {
                let path = path.display();
                cleaned
                    .left
                    .push(format!("{path}: somebody else cleans up after it: {why}"));
                return;
            }
        };
        let removed = match standing {
            Standing::Stale => self.undo(record, cleaned),
            _ => Ok(()),
        };
        match removed.map_err(|error| error.to_string()).and_then(|()| {
            state::remove(path).map_err(|error| format!("{}: {error}", path.display()))
        }) {
            Ok(()) => cleaned.removed.push(path.to_owned()),
            Err(why) => cleaned.left.push(why),
        }
    }

    fn undo(&self, record: &Record, cleaned: &mut Cleaned) -> Result<(), CgroupError> {
        if let Some(groups) = &record.groups {
            self.groups(groups, cleaned)?;
        }
        if let Some(rt) = &record.rt {
            let undone = rt.undo(self.host, self.tree, record.owner.pid, self.patience)?;
            cleaned.removed.extend(undone);
        }
        Ok(())
    }

    /// Holds a dead VMM's record, against others that clean up after it: of two, the later would
    /// undo what another guest has set by then. `None` when there is nothing left to do.
    fn claim(&self, path: &Path) -> io::Result<Option<File>> {
        let Some(file) = state::open(path)? else {
            return Ok(None);
        };
        let deadline = Instant::now() + self.patience;
        while let Err(error) = file.try_lock() {
            if Instant::now() >= deadline {
                return Err(error.into());
            }
            sleep(TRY_EVERY);
        }
        Ok(path.exists().then_some(file))
    }

    /// What isn't a record goes only if it is an unfinished one of a process
    /// that is gone: nothing is made before the record is whole.
    fn unreadable(&self, path: &Path, why: &anyhow::Error, cleaned: &mut Cleaned) {
        if state::is_unfinished(path) {
            let pid = state::pid_of(path).unwrap_or(0);
            let alive = self.host.path(format!("proc/{pid}")).exists();
            if !alive && state::remove_file(path).is_ok() {
                cleaned.removed.push(path.to_owned());
            }
            return;
        }
        cleaned.left.push(format!(
            "{} is no record of ours ({why}); remove it by hand if it is not needed",
            path.display()
        ));
    }

    fn groups(&self, groups: &GroupRecord, cleaned: &mut Cleaned) -> Result<(), CgroupError> {
        if !groups.group.exists() {
            return Ok(());
        }
        let deadline = Instant::now() + self.patience;
        loop {
            match host::remove(self.tree, groups) {
                Err(CgroupError::Busy { .. }) if Instant::now() < deadline => sleep(TRY_EVERY),
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        cleaned.removed.push(groups.group.clone());
        Ok(())
    }

    /// Removes cgroups of dead VMMs that have no record any more.
    pub fn without_records(&self, cleaned: &mut Cleaned) {
        // Without cgroup v2 nothing can be left in it.
        let found = host::leftovers(self.host);
        for leftover in found.unwrap_or_default() {
            let groups = GroupRecord {
                origin: leftover.group.parent().unwrap_or(&leftover.group).into(),
                group: leftover.group,
                enabled_cpu: false,
                raised_min: false,
            };
            if let Err(error) = self.groups(&groups, cleaned) {
                cleaned.left.push(error.to_string());
            }
        }
    }
}

#[cfg(test)]
#[path = "cleanup_tests.rs"]
mod tests;
