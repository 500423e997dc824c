// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings in force on this host, held while a guest starts.

use std::io;

use thiserror::Error;

use vcpufreq_host::undo::{LockedFile, WriteHost};

use crate::record::{self, NAME, PATH, Record, RecordError};

/// The record of this boot, if there is one; while this is held, no restore begins.
#[derive(Debug)]
pub struct InForce {
    record: Option<Record>,
    _held: Option<LockedFile>,
}

/// Why the settings in force are unknown.
#[derive(Debug, Error)]
pub enum InForceError {
    /// The record can't be judged.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// It is being made or undone.
    #[error("vcpufreq rt is at work on this host; start the guest when it has ended")]
    Busy,
    /// It was made meanwhile.
    #[error(
        "vcpufreq rt apply has begun on this host meanwhile; start the guest when it has ended"
    )]
    Begun,
    /// It can't be held.
    #[error("{PATH} can't be held ({0}); run as root")]
    Unheld(io::Error),
}

impl InForce {
    /// Holds the record in force, if there is one. For a user without access to it there is none.
    ///
    /// # Errors
    /// [`InForceError::Busy`] while an apply or restore is under way, [`InForceError::Record`] when
    /// the record is invalid, [`InForceError::Unheld`] when it can't be locked.
    pub fn look(host: &dyn WriteHost) -> Result<Self, InForceError> {
        let nothing = Self {
            record: None,
            _held: None,
        };
        if visible(host)?.is_none() {
            return Ok(nothing);
        }
        let held = match record::journal(host.as_look()).share(NAME) {
            Ok(held) => held,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Err(InForceError::Busy),
                io::ErrorKind::NotFound => return Ok(nothing),
                _ => return Err(InForceError::Unheld(error)),
            },
        };
        // Again: before it was held, it may have become another.
        match Record::read(host.as_look())? {
            Some(record) if !record.is_of_another_boot(host.as_look())? => Ok(Self {
                record: Some(record),
                _held: Some(held),
            }),
            _ => Ok(nothing),
        }
    }

    /// The record.
    #[must_use]
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Whether this is still so. It is while a record is held.
    ///
    /// # Errors
    /// [`InForceError::Begun`] when there was nothing, and an apply has begun;
    /// [`InForceError::Record`] when the record is invalid.
    pub fn check_still(&self, host: &dyn WriteHost) -> Result<(), InForceError> {
        match (&self.record, visible(host)?) {
            (None, Some(record)) if !record.is_of_another_boot(host.as_look())? => {
                Err(InForceError::Begun)
            }
            _ => Ok(()),
        }
    }
}

fn visible(host: &dyn WriteHost) -> Result<Option<Record>, RecordError> {
    match Record::read(host.as_look()) {
        Err(RecordError::Denied) => Ok(None),
        read => read,
    }
}
