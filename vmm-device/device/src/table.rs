// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The performance table that a vCPU shows its guest, and the frequency that its capacity refers to.

#![forbid(unsafe_code)]

use crate::regs::PERFTBL_MAX_LEN;
use crate::units::Khz;

/// 1 to 64 performance levels, none zero, strictly rising. One entry means that the guest sees no
/// table: it may ask for any value from 1 to that entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerfTable {
    entries: Box<[Khz]>,
    reference: Khz,
}

/// Which rule a performance table breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// No entry at all.
    #[error("the performance table is empty; it needs 1 to {PERFTBL_MAX_LEN} entries")]
    Empty,
    /// More entries than the register interface allows.
    #[error("the performance table has {len} entries; at most {PERFTBL_MAX_LEN} are possible")]
    TooLong {
        /// Entries given.
        len: usize,
    },
    /// An entry of 0 kHz.
    #[error("entry {index} of the performance table is 0 kHz")]
    Zero {
        /// Its index.
        index: usize,
    },
    /// An entry that is not above the one before.
    #[error(
        "entry {index} of the performance table is {entry}, not above the {previous} before it"
    )]
    NotRising {
        /// Index of the later entry.
        index: usize,
        /// The earlier entry.
        previous: Khz,
        /// The later entry.
        entry: Khz,
    },
}

impl PerfTable {
    /// All entries, rising.
    #[must_use]
    pub fn entries(&self) -> &[Khz] {
        &self.entries
    }

    /// Entry `index`, if there is one.
    #[must_use]
    pub fn entry(&self, index: u32) -> Option<Khz> {
        self.entries.get(usize::try_from(index).ok()?).copied()
    }

    /// The highest entry: what the vCPU delivers at most.
    #[must_use]
    pub fn max(&self) -> Khz {
        self.entries[self.entries.len() - 1]
    }

    /// The frequency that the vCPU's capacity refers to: the highest entry, unless
    /// [`Self::referring_to`] has named another.
    #[must_use]
    pub fn reference(&self) -> Khz {
        self.reference
    }

    /// No table: any performance from 1 to `max`, which is 1 at least.
    pub(crate) fn of_max(max: Khz) -> Self {
        let max = Khz(max.0.max(1));
        Self {
            entries: [max].into(),
            reference: max,
        }
    }

    /// The same entries for a capacity that refers to `reference`, as that of a pCPU with boost
    /// does. 0 is the highest entry.
    #[must_use]
    pub fn referring_to(self, reference: Khz) -> Self {
        let reference = match reference {
            Khz(0) => self.max(),
            other => other,
        };
        Self { reference, ..self }
    }

    /// Number of entries, 1..=64, as the register shows it.
    #[must_use]
    pub fn register_len(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(PERFTBL_MAX_LEN)
    }
}

impl TryFrom<Vec<Khz>> for PerfTable {
    type Error = TableError;

    fn try_from(entries: Vec<Khz>) -> Result<Self, TableError> {
        if entries.is_empty() {
            return Err(TableError::Empty);
        }
        let len = entries.len();
        if u32::try_from(len).map_or(true, |n| n > PERFTBL_MAX_LEN) {
            return Err(TableError::TooLong { len });
        }
        if let Some(index) = entries.iter().position(|khz| khz.0 == 0) {
            return Err(TableError::Zero { index });
        }
        if let Some(i) = entries.windows(2).position(|pair| pair[0] >= pair[1]) {
            return Err(TableError::NotRising {
                index: i + 1,
                previous: entries[i],
                entry: entries[i + 1],
            });
        }
        Ok(Self {
            reference: entries[len - 1],
            entries: entries.into_boxed_slice(),
        })
    }
}
