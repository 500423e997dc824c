// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The record of the old values: on disk before the first change, removed after the last one is
//! undone. It is valid for one boot: the next boot sets the kernel's files anew.

use std::{collections::BTreeSet, io};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use vcpufreq_host::undo::{BOOT_ID, Journal, OldValue, Owner, ReadHost, Untrusted, read_strictly};

use crate::{
    partition::{self, Partition, PartitionError},
    profile::Profile,
    targets,
};

/// Where the record is. Its directory is no VMM's: a service manager that makes and removes the
/// VMM's (systemd's `RuntimeDirectory=`) would give it to another user, or lose the old values.
pub const PATH: &str = "/run/vcpufreq-rt/rt.json";
const DIR: &str = "/run/vcpufreq-rt";
pub(crate) const NAME: &str = "rt.json";
/// One value as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The setting that changes it.
    pub setting: String,
    /// What is changed, and its value before.
    #[serde(flatten)]
    pub was: OldValue,
    /// The value that it gets; `None` when another change loses the old one.
    pub new: Option<String>,
}

/// The old values, and the profile and CPUs that they were changed for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// The profile's name.
    pub profile_name: String,
    /// The profile.
    pub profile: Profile,
    /// The CPUs of guests and of housekeeping.
    pub partition: Partition,
    /// The process of `rt exec` that the values were changed for.
    pub owner: Option<Owner>,
    /// The values, in the order in which they are changed.
    pub entries: Vec<Entry>,
}

/// Why the old values are unknown.
#[derive(Debug, Error)]
pub enum RecordError {
    /// It can't be read.
    #[error("{PATH} can't be read; run as root")]
    Denied,
    /// Another user may have written it.
    #[error(transparent)]
    Untrusted(Untrusted),
    /// It isn't one.
    #[error("{PATH} is no record of this program's ({0}); remove it by hand if it is not needed")]
    Wrong(String),
    /// It names a file that no setting changes.
    #[error(
        "{PATH} names {0}, which this program never changes; look at what made it, then remove it"
    )]
    Foreign(String),
    /// It names a guest that has an invalid name or CPUs.
    #[error("{PATH} has an invalid guest ({0}); find out what wrote it, then remove it")]
    Guests(PartitionError),
    /// The boot id can't be read.
    #[error("{BOOT_ID} can't be read; mount /proc")]
    NoBootId,
}

impl Record {
    /// The record on this host, if there is one.
    ///
    /// # Errors
    /// [`RecordError::Denied`] when this user can't read it, [`RecordError::Untrusted`] when
    /// another one may have written it, [`RecordError::Wrong`], [`RecordError::Foreign`] or
    /// [`RecordError::Guests`] when this program can't have written it.
    pub fn read(look: &dyn ReadHost) -> Result<Option<Self>, RecordError> {
        let text = match journal(look).read(NAME) {
            Ok(Some(text)) => text,
            Ok(None) => return Ok(None),
            Err(why) if why.is_denied() => return Err(RecordError::Denied),
            Err(why) => return Err(RecordError::Untrusted(why)),
        };
        let record: Self =
            read_strictly(&text).map_err(|error| RecordError::Wrong(error.to_string()))?;
        record.check()?;
        Ok(Some(record))
    }

    /// Whether it names only files that the settings change: root writes a record's values to the
    /// host.
    pub(crate) fn check(&self) -> Result<(), RecordError> {
        partition::check_guests(&self.partition.guests).map_err(RecordError::Guests)?;
        let mut targets = self.entries.iter().map(|entry| &entry.was.target);
        match targets.find(|target| !targets::SCOPE.has(target)) {
            Some(target) => Err(RecordError::Foreign(target.name())),
            None => Ok(()),
        }
    }

    /// Whether it is of an earlier boot.
    ///
    /// # Errors
    /// [`RecordError::NoBootId`] when procfs doesn't show the boot id.
    pub fn is_of_another_boot(&self, look: &dyn ReadHost) -> Result<bool, RecordError> {
        Ok(boot_id(look)? != self.boot_id)
    }

    pub(crate) fn text(&self) -> String {
        // Plain data: it can't fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// Where the record is on this host.
pub(crate) fn journal(look: &dyn ReadHost) -> Journal {
    Journal::at(look.root().path(DIR))
}

/// Removes the record and its folder.
pub(crate) fn discard(look: &dyn ReadHost) -> io::Result<()> {
    let journal = journal(look);
    journal.remove([NAME])?;
    discard_unfinished(&journal).or_else(|error| match error.kind() {
        // Another process is making the next one.
        io::ErrorKind::WouldBlock => Ok(()),
        _ => Err(error),
    })
}

/// Removes what a killed apply left of a record that it was writing; a living one's stays.
pub(crate) fn discard_unfinished(journal: &Journal) -> io::Result<()> {
    journal.remove_unfinished(NAME)?;
    journal.leave();
    Ok(())
}

pub(crate) fn boot_id(look: &dyn ReadHost) -> Result<String, RecordError> {
    look.read(BOOT_ID).map_err(|_| RecordError::NoBootId)
}

/// Repeats `pass`, which makes the changes that are left and returns those that still are, as long
/// as they get fewer: the order of some changes depends on the old values. `report` gets each name
/// once.
pub(crate) fn until_stuck<T>(
    mut left: Vec<T>,
    report: &mut dyn FnMut(&str, &str, &str),
    mut pass: impl FnMut(&[T], &mut dyn FnMut(&str, &str, &str)) -> Vec<T>,
) -> Vec<T> {
    let mut reported = BTreeSet::new();
    let mut once = |name: &str, now: &str, new: &str| {
        if reported.insert(name.to_owned()) {
            report(name, now, new);
        }
    };
    loop {
        let before = left.len();
        left = pass(&left, &mut once);
        if left.is_empty() || left.len() == before {
            return left;
        }
    }
}
