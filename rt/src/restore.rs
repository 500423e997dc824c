// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Brings back the old values of the record, last change first. A value that is the old one already
//! is not written. So restore may be killed and run again at any point, and so may apply before it.

use std::{io, time::Duration};

use thiserror::Error;

use vcpufreq_host::undo::{
    InTheWay, OldValue, Owner, OwnerStatus, Target, ValueNow, Vcpus, WriteHost, check_free,
};

use crate::{
    record::{self, Entry, NAME, PATH, Record, RecordError},
    settings,
};

/// Why nothing was brought back.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The record can't be judged.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A guest of ours runs, or has left something.
    #[error("{0}; then restore")]
    Guest(#[from] InTheWay),
    /// A guest's cgroup has threads.
    #[error("{0} has threads in it: a guest still runs there; end it, then restore")]
    Occupied(String),
    /// A command runs with the settings.
    #[error(
        "vcpufreq rt exec, process {0}, runs a command with these settings; end it, and they are restored"
    )]
    Exec(u32),
    /// Another process is at it.
    #[error("another vcpufreq rt is at work, or a guest is starting; wait until it has ended")]
    Busy,
    /// The record can't be changed.
    #[error("{PATH} can't be written ({0}); run as root")]
    Unwritable(io::Error),
}

/// The result.
#[derive(Debug, PartialEq, Eq)]
pub enum Restored {
    /// There is no record: nothing was changed.
    Nothing,
    /// The record was of an earlier boot: it is removed, and nothing was written.
    EarlierBoot,
    /// Values were brought back.
    Done {
        /// How many.
        brought_back: usize,
        /// Targets that were gone, and so have no value to bring back.
        gone: Vec<String>,
        /// Targets that could not be restored, with the reason; the record keeps these.
        left: Vec<(String, String)>,
    },
}

/// Brings back what was. `report` gets each change before it is made: the target's name, the value
/// now, the old one.
///
/// # Errors
/// [`RestoreError::Record`] when the record can't be judged, [`RestoreError::Guest`] or
/// [`RestoreError::Occupied`] when a guest is on these CPUs, [`RestoreError::Exec`] while the process
/// runs that the values were changed for, [`RestoreError::Busy`] when another process is at it,
/// [`RestoreError::Unwritable`] when the record can't be changed. Only in the last case can values
/// have been brought back.
pub fn restore(
    host: &dyn WriteHost,
    report: &mut dyn FnMut(&str, &str, &str),
) -> Result<Restored, RestoreError> {
    let is_wanted = |record: &Record| match &record.owner {
        Some(owner) if owner.status(host.as_look()) == OwnerStatus::InUse => {
            Err(RestoreError::Exec(owner.pid))
        }
        _ => Ok(true),
    };
    restore_if(host, &is_wanted, report)
}

/// Brings back what was changed for `owner`, and nothing else.
///
/// # Errors
/// As [`restore`], but for [`RestoreError::Exec`].
pub fn restore_of(
    host: &dyn WriteHost,
    owner: &Owner,
    report: &mut dyn FnMut(&str, &str, &str),
) -> Result<Restored, RestoreError> {
    let is_wanted = |record: &Record| Ok(record.owner.as_ref() == Some(owner));
    restore_if(host, &is_wanted, report)
}

/// Brings back what was if the record is wanted.
fn restore_if(
    host: &dyn WriteHost,
    is_wanted: &dyn Fn(&Record) -> Result<bool, RestoreError>,
    report: &mut dyn FnMut(&str, &str, &str),
) -> Result<Restored, RestoreError> {
    match Record::read(host.as_look())? {
        Some(record) if is_wanted(&record)? => {}
        Some(_) => return Ok(Restored::Nothing),
        None => {
            record::discard_unfinished(&record::journal(host.as_look())).map_err(unheld)?;
            return Ok(Restored::Nothing);
        }
    }
    let journal = record::journal(host.as_look());
    let _held = journal.hold(NAME, Duration::ZERO).map_err(unheld)?;
    // Again: it may have gone or come before it was held.
    let Some(record) = Record::read(host.as_look())? else {
        return Ok(Restored::Nothing);
    };
    if record.is_of_another_boot(host.as_look())? {
        record::discard(host.as_look()).map_err(RestoreError::Unwritable)?;
        return Ok(Restored::EarlierBoot);
    }
    if !is_wanted(&record)? {
        return Ok(Restored::Nothing);
    }
    check_free(host.as_look(), &record.partition.rt(), Vcpus::RealTime)?;
    if let Some(group) = settings::occupied(host.as_look(), &record.partition) {
        return Err(RestoreError::Occupied(group));
    }
    bring_back(host, record, report)
}

fn unheld(error: io::Error) -> RestoreError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::NotFound => RestoreError::Busy,
        _ => RestoreError::Unwritable(error),
    }
}

fn bring_back(
    host: &dyn WriteHost,
    record: Record,
    report: &mut dyn FnMut(&str, &str, &str),
) -> Result<Restored, RestoreError> {
    let mut done = Done::default();
    let entries: Vec<&Entry> = record.entries.iter().rev().collect();
    let kept = record::until_stuck(entries, report, |left, report| {
        pass(host, left, &mut done, report)
    });
    let kept = with_lost(&record.entries, &kept);
    let ended = match kept.is_empty() {
        true => record::discard(host.as_look()),
        false => {
            let entries = kept;
            record::journal(host.as_look()).write(NAME, &Record { entries, ..record }.text())
        }
    };
    ended.map_err(RestoreError::Unwritable)?;
    Ok(Restored::Done {
        brought_back: done.brought_back,
        gone: done.gone,
        left: done.left,
    })
}

/// Those that could not be brought back, and what the same setting loses with such a change: it is
/// lost again when that one comes back.
fn with_lost(entries: &[Entry], kept: &[&Entry]) -> Vec<Entry> {
    let is_kept = |entry: &&Entry| {
        let mut kept = kept.iter();
        kept.any(|one| match entry.new {
            Some(_) => one == entry,
            None => one.setting == entry.setting,
        })
    };
    entries.iter().filter(is_kept).cloned().collect()
}

/// The result so far.
#[derive(Default)]
struct Done {
    brought_back: usize,
    gone: Vec<String>,
    left: Vec<(String, String)>,
}

/// Brings these back; those that could not be.
fn pass<'a>(
    host: &dyn WriteHost,
    entries: &[&'a Entry],
    done: &mut Done,
    report: &mut dyn FnMut(&str, &str, &str),
) -> Vec<&'a Entry> {
    done.left.clear();
    let mut kept = Vec::new();
    for &entry in entries {
        let name = entry.was.target.name();
        match one(host, entry, report) {
            Ok(RestoreOutcome::BroughtBack) => done.brought_back += 1,
            Ok(RestoreOutcome::AsBefore) => {}
            Ok(RestoreOutcome::Gone) => done.gone.push(name),
            Err(why) => {
                done.left.push((name, why));
                kept.push(entry);
            }
        }
    }
    kept
}

enum RestoreOutcome {
    BroughtBack,
    AsBefore,
    Gone,
}

fn one(
    host: &dyn WriteHost,
    entry: &Entry,
    report: &mut dyn FnMut(&str, &str, &str),
) -> Result<RestoreOutcome, String> {
    let OldValue { target, old, .. } = &entry.was;
    let now = match entry.was.now(host.as_look())? {
        ValueNow::Old | ValueNow::Anothers => return Ok(RestoreOutcome::AsBefore),
        ValueNow::Gone => return Ok(RestoreOutcome::Gone),
        ValueNow::Changed(now) => now,
    };
    report(&target.name(), &now, old);
    match (target.put(host, old), target) {
        (Ok(()), _) => Ok(RestoreOutcome::BroughtBack),
        // A killed VMM's groups, when its guardian was killed too.
        (Err(why), Target::Dir { .. }) => Err(format!(
            "{why}; if a guest that was killed left groups in it, run vcpufreq cleanup, then restore again"
        )),
        (Err(why), _) => Err(why),
    }
}
