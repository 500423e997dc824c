// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Removes what dead VMMs left: by their records, and, where even the record
//! is lost, by cgroups that carry our names, are empty and whose maker is gone.
//! What belongs to a living VMM, or isn't ours, stays.

use std::{
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use vcpufreq_device::host::{self, CgroupError, CgroupTree, GroupRecord};

use crate::{
    facts::HostTree,
    state::{self, Record, Standing, StateDir},
};

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
    pub host: &'a HostTree,
    /// How cgroups are removed.
    pub tree: &'a dyn CgroupTree,
    /// How long to wait for processes that are ending.
    pub patience: Duration,
}

impl<'a> Cleaner<'a> {
    /// For the running host.
    pub fn new(host: &'a HostTree) -> Self {
        Self {
            host,
            tree: &host::KernelTree,
            patience: PATIENCE,
        }
    }

    /// Removes what all records of dead VMMs name.
    ///
    /// # Errors
    /// When the records can't be listed.
    pub fn by_records(&self, dir: &StateDir) -> anyhow::Result<Cleaned> {
        let mut cleaned = Cleaned::default();
        for (path, record) in dir.list()? {
            match record {
                Ok(record) => self.by_record(&path, &record, &mut cleaned),
                Err(why) => self.unreadable(&path, &why, &mut cleaned),
            }
        }
        Ok(cleaned)
    }

    /// Removes what one record names, and the record, if its VMM is dead.
    pub fn by_record(&self, path: &Path, record: &Record, cleaned: &mut Cleaned) {
        let removed = match record.owner.standing(self.host) {
            Standing::InUse => return,
            Standing::Unseen => {
                let pid = record.owner.pid;
                let path = path.display();
                cleaned.left.push(format!(
                    "{path}: process {pid} can't be seen from here; run cleanup in its PID namespace, with /proc mounted"
                ));
                return;
            }
            Standing::OtherBoot => Ok(()),
            Standing::Stale => record.groups.as_ref().map_or(Ok(()), |groups| {
                self.groups(&GroupRecord::from(groups), cleaned)
            }),
        };
        let removed = removed.and_then(|()| match &record.rt {
            Some(rt) if record.owner.standing(self.host) == Standing::Stale => {
                let undone = rt.undo(self.host, self.tree, record.owner.pid, self.patience)?;
                cleaned.removed.extend(undone);
                Ok(())
            }
            _ => Ok(()),
        });
        match removed.map_err(|error| error.to_string()).and_then(|()| {
            state::remove(path).map_err(|error| format!("{}: {error}", path.display()))
        }) {
            Ok(()) => cleaned.removed.push(path.to_owned()),
            Err(why) => cleaned.left.push(why),
        }
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
        let found = host::leftovers(&host::HostRoot::at(&self.host.path("/")));
        for leftover in found.unwrap_or_default() {
            let groups = GroupRecord {
                origin: leftover.group.parent().unwrap_or(&leftover.group).into(),
                group: leftover.group,
                enabled_cpu: false,
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
