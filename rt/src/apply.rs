// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Makes a plan's changes, after the old values are on disk.

use std::{io, time::Duration};

use thiserror::Error;

use vcpufreq_host::undo::{InTheWay, OldValue, THERE, Target, Vcpus, WriteHost, check_free};

use crate::{
    change::Change,
    partition::PartitionError,
    plan::RtPlan,
    profile::Profile,
    record::{self, Entry, NAME, PATH, Record, RecordError},
};

/// Why nothing was changed.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// The record of an earlier apply can't be judged.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A CPU is another guest's.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// An earlier apply is in force.
    #[error(
        "{0} has real-time CPUs here already; run vcpufreq rt restore first, then apply for all guests at once"
    )]
    InForce(String),
    /// An earlier apply is in force, which is for all CPUs.
    #[error("profile {0} is applied here; run vcpufreq rt restore first, then apply")]
    InForceForAll(String),
    /// A guest runs on CPUs that are to be set apart.
    #[error("{0}; then apply, and start it again")]
    Guest(#[from] InTheWay),
    /// A folder that is to be made is there.
    #[error(
        "{0} is there already, and no record names it; remove it with rmdir, its innermost folders first, or give the guest another name"
    )]
    Leftover(String),
    /// A value has changed since the plan was made.
    #[error("{name} was {planned} when this was planned and is {now}; apply again")]
    Moved {
        /// The target's name.
        name: String,
        /// Its value in the plan.
        planned: String,
        /// Its value now.
        now: String,
    },
    /// The old values can't be put on disk.
    #[error("{PATH} can't be written ({0}); run as root")]
    Unrecorded(io::Error),
    /// Another process is applying or restoring.
    #[error("another vcpufreq rt is at work; wait until it has ended")]
    Busy,
}

/// The result.
#[derive(Debug, Default)]
pub struct Applied {
    /// Changes made.
    pub made: usize,
    /// Changes that the kernel refused, with its reason.
    pub refused: Vec<(String, String)>,
    /// A record of an earlier boot was removed.
    pub closed_earlier_boot: bool,
}

/// Makes the changes of `plan` that aren't made yet, unless a guest of ours runs on the CPUs that
/// it sets apart. Before each change, `report` gets the target's name, old value and new value.
///
/// A refused change doesn't stop the others: the kernel always refuses those of interrupts that
/// drivers manage.
///
/// # Errors
/// [`ApplyError::Busy`] when another process is at it, [`ApplyError::Unrecorded`] when the old
/// values can't be put on disk, otherwise the variant for what is in the way. Nothing was changed
/// then.
pub fn apply(
    host: &dyn WriteHost,
    plan: &RtPlan,
    profile: (&str, &Profile),
    report: &mut dyn FnMut(&str, &str, &str),
) -> Result<Applied, ApplyError> {
    let closed_earlier_boot = close_earlier(host, plan)?;
    check_new(plan)?;
    let record = Record {
        boot_id: record::boot_id(host.as_look())?,
        profile_name: profile.0.to_owned(),
        profile: profile.1.clone(),
        partition: plan.partition.clone(),
        owner: plan.owner.clone(),
        entries: entries(plan),
    };
    record.check()?;
    // Held to the end: a restore in between would leave what comes after it.
    let journal = record::journal(host.as_look());
    let _held = journal
        .create(NAME, &record.text())
        .map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::AlreadyExists => ApplyError::Busy,
            _ => ApplyError::Unrecorded(error),
        })?;
    // From here on no guest starts on these CPUs.
    if let Err(why) = check_unmoved(host, &record) {
        record::discard(host.as_look()).map_err(ApplyError::Unrecorded)?;
        return Err(why);
    }
    Ok(Applied {
        closed_earlier_boot,
        ..make(host, plan, report)
    })
}

/// Makes the changes that aren't made yet, and those that another one has undone.
fn make(host: &dyn WriteHost, plan: &RtPlan, report: &mut dyn FnMut(&str, &str, &str)) -> Applied {
    let mut applied = Applied::default();
    let changes = plan.changes().map(|(_, change)| change);
    record::until_stuck(changes.collect(), report, |left, report| {
        pass(host, left, &mut applied, report)
    });
    applied
}

/// Makes these changes; those that could not be made.
fn pass<'a>(
    host: &dyn WriteHost,
    changes: &[&'a Change],
    applied: &mut Applied,
    report: &mut dyn FnMut(&str, &str, &str),
) -> Vec<&'a Change> {
    applied.refused.clear();
    let mut left = Vec::new();
    let mut missing_dirs: Vec<String> = Vec::new();
    for &change in changes {
        let name = change.target.name();
        if missing_dirs.iter().any(|dir| name.starts_with(dir)) {
            left.push(change);
            continue;
        }
        let Some(want) = &change.want else { continue };
        let set = change.is_set().then(|| change.target.now(host.as_look()));
        let now = match &set {
            None => change.now.as_deref().unwrap_or("new"),
            Some(Ok(now)) if !change.target.same(now, want) => now,
            Some(_) => continue,
        };
        report(&name, now, want);
        match change.target.put(host, want) {
            Ok(()) => applied.made += 1,
            Err(why) => {
                if matches!(change.target, Target::Dir { .. }) {
                    missing_dirs.push(format!("{name}/"));
                }
                applied.refused.push((name, why));
                left.push(change);
            }
        }
    }
    left
}

/// Whether the folders that are to be made aren't there: what is in one isn't recorded, for it goes
/// with it.
fn check_new(plan: &RtPlan) -> Result<(), ApplyError> {
    let is_there = |change: &Change| {
        matches!(change.target, Target::Dir { .. }) && change.now.as_deref() == Some(THERE)
    };
    match plan.changes().find(|(_, change)| is_there(change)) {
        Some((_, change)) => Err(ApplyError::Leftover(change.target.name())),
        None => Ok(()),
    }
}

/// Whether no guest is on the CPUs that are set apart, and the recorded old values are current: a
/// guest that has ended since the plan was made has restored its own.
fn check_unmoved(host: &dyn WriteHost, record: &Record) -> Result<(), ApplyError> {
    check_free(host.as_look(), &record.partition.rt(), Vcpus::Pinned)?;
    for Entry { was, .. } in &record.entries {
        let OldValue { target, old, .. } = was;
        match target.now(host.as_look()) {
            Ok(now) if !target.same(&now, old) => {
                return Err(ApplyError::Moved {
                    name: target.name(),
                    planned: old.clone(),
                    now,
                });
            }
            // What is gone or hidden now, the kernel refuses.
            _ => {}
        }
    }
    Ok(())
}

/// Removes the record of an earlier boot; one of this boot is an error.
fn close_earlier(host: &dyn WriteHost, plan: &RtPlan) -> Result<bool, ApplyError> {
    let Some(record) = Record::read(host.as_look())? else {
        return Ok(false);
    };
    if record.is_of_another_boot(host.as_look())? {
        let journal = record::journal(host.as_look());
        let _held = journal
            .hold(NAME, Duration::ZERO)
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::NotFound => ApplyError::Busy,
                _ => ApplyError::Unrecorded(error),
            })?;
        // Again: before it was held, another apply may have put its own there.
        if Record::read(host.as_look())? != Some(record) {
            return Err(ApplyError::Busy);
        }
        record::discard(host.as_look()).map_err(ApplyError::Unrecorded)?;
        return Ok(true);
    }
    for first in &record.partition.guests {
        for second in &plan.partition.guests {
            let cpus = first.cpus.and(&second.cpus);
            if first.name != second.name && !cpus.is_empty() {
                return Err(PartitionError::taken(&cpus, &first.name, &second.name).into());
            }
        }
    }
    if record.partition.guests.is_empty() {
        return Err(ApplyError::InForceForAll(record.profile_name));
    }
    let names = record.partition.guests.iter().map(|guest| &*guest.name);
    Err(ApplyError::InForce(names.collect::<Vec<_>>().join(", ")))
}

/// The values to record: all that will be changed or lost. Files of new folders go with them.
fn entries(plan: &RtPlan) -> Vec<Entry> {
    let lost = |change: &Change| change.want.is_none() || !change.is_set();
    let changes = plan.changes().filter(|(_, change)| lost(change));
    changes
        .filter(|(_, change)| !matches!(change.target, Target::Inside { .. }))
        .filter_map(|(setting, change)| {
            Some(Entry {
                setting: setting.to_owned(),
                was: OldValue {
                    target: change.target.clone(),
                    old: change.now.clone()?,
                    only_if: None,
                },
                new: change.want.clone(),
            })
        })
        .collect()
}
