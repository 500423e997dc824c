// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long each entry of a table was the request in force.
//!
//! A thread that puts a request into force closes the interval of the one before: a few atomic
//! operations, no lock and no call. A reader adds the interval that is still open.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::SeqCst;

use crate::config::DeviceConfig;
use crate::sync::AtomicU64;
use crate::table::PerfTable;
use crate::units::{DomainId, Khz};

/// How often a reader tries to find no thread in the middle of a change.
const ATTEMPTS: u32 = 100;
/// Low bits of the word for the entry: a table has up to 64.
const ENTRY_BITS: u32 = 8;

/// Of one domain.
#[derive(Debug)]
pub(crate) struct Residency {
    start_us: u64,
    /// Since when, in µs, which of `us` counts: in one word, so that of two threads one closes an
    /// interval. The time has room for 2,000 years.
    open: AtomicU64,
    /// µs of closed intervals: without a request, then for each table entry.
    us: Box<[AtomicU64]>,
}

impl Residency {
    /// Without a request from `now_us` on, for a table of so many entries.
    pub fn new(entries: usize, now_us: u64) -> Self {
        Self {
            start_us: now_us,
            open: AtomicU64::new(now_us << ENTRY_BITS),
            us: (0..=entries).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// From `now_us` on entry `index` is in force, counted from 1; 0 is no request. A time before
    /// the last change counts as that one's.
    pub fn change(&self, index: usize, now_us: u64) {
        if unpack(self.open.load(SeqCst)).1 == index {
            return;
        }
        let next = |open: u64| {
            let since = (open >> ENTRY_BITS).max(now_us);
            Some((since << ENTRY_BITS) | index as u64)
        };
        let Ok(before) = self.open.fetch_update(SeqCst, SeqCst, next) else {
            return;
        };
        let (since, index) = unpack(before);
        if let Some(us) = self.us.get(index) {
            us.fetch_add(now_us.saturating_sub(since), SeqCst);
        }
    }

    /// µs without a request, then at each entry, until `now_us`.
    pub fn at(&self, now_us: u64) -> Vec<u64> {
        let mut us = Vec::new();
        for _ in 0..ATTEMPTS {
            let (since, index) = unpack(self.open.load(SeqCst));
            us = self.us.iter().map(|us| us.load(SeqCst)).collect();
            let closed: u64 = us.iter().sum();
            if let Some(us) = us.get_mut(index) {
                *us += now_us.saturating_sub(since);
            }
            // Else a thread is between opening an interval and closing the one before.
            if self.start_us + closed == since {
                break;
            }
        }
        us
    }
}

fn unpack(open: u64) -> (u64, usize) {
    let [index, ..] = open.to_le_bytes();
    (open >> ENTRY_BITS, index.into())
}

/// For each domain of a device that is made at `now_ns`.
pub(super) fn of_domains(config: &DeviceConfig, now_ns: u64) -> Box<[Residency]> {
    let now = us(now_ns);
    let of_domain = |domain: DomainId| {
        let mut members = config.vcpus.iter();
        let member = members.find(|spec| spec.domain == domain);
        Residency::new(member.map_or(0, |spec| spec.table.entries().len()), now)
    };
    config.domains().into_iter().map(of_domain).collect()
}

/// The entry of a request: the host rounds up to one. 0 is no request.
pub(super) fn entry_of(table: &PerfTable, khz: Khz) -> usize {
    let entries = table.entries();
    match khz {
        Khz(0) => 0,
        _ => entries[..entries.len() - 1].partition_point(|entry| *entry < khz) + 1,
    }
}

pub(super) fn us(ns: u64) -> u64 {
    ns / 1000
}

#[cfg(test)]
mod tests {
    //! Promises: the times add up to the age, whichever threads change and read meanwhile; each is of the
    //! entry in force; a value between two entries is the higher one's.

    use super::*;

    #[test]
    fn each_interval_is_of_the_entry_in_force() {
        let residency = Residency::new(2, 100);
        assert_eq!(residency.at(150), [50, 0, 0]);
        residency.change(2, 160);
        residency.change(1, 200);
        assert_eq!(residency.at(205), [60, 5, 40]);
        // The same again changes nothing; a time before the last change is taken for that one.
        residency.change(1, 210);
        residency.change(2, 190);
        assert_eq!(residency.at(215), [60, 0, 55]);
        residency.change(0, 300);
        assert_eq!(residency.at(301), [61, 0, 140]);
    }

    #[test]
    fn times_add_up_while_others_change() {
        let residency = Residency::new(3, 0);
        let now = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for first in 0..2 {
                let (residency, now) = (&residency, &now);
                scope.spawn(move || {
                    for change in 0..50_000 {
                        residency.change((first + change) % 4, now.fetch_add(1, SeqCst));
                    }
                });
            }
        });
        assert_eq!(residency.at(200_000).iter().sum::<u64>(), 200_000);
    }

    #[test]
    fn a_value_between_two_entries_is_the_higher_ones() {
        let table = PerfTable::try_from(vec![Khz(1000), Khz(2000), Khz(3000)]).unwrap();
        for (khz, entry) in [
            (0, 0),
            (1, 1),
            (1000, 1),
            (1001, 2),
            (3000, 3),
            (u32::MAX, 3),
        ] {
            assert_eq!(entry_of(&table, Khz(khz)), entry, "{khz}");
        }
    }
}
