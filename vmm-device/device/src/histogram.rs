// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Times in buckets of powers of two, counted without a lock.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Buckets of a histogram: the last one has everything from 2^38 ns (275 s) on.
pub const HISTOGRAM_BUCKETS: usize = 40;

/// How often something took how long. Bucket 0 counts 0 ns, bucket *n* counts from 2^(n-1) ns up
/// to, but not including, 2^n ns.
#[derive(Debug)]
pub struct Histogram([AtomicU64; HISTOGRAM_BUCKETS]);

/// A histogram at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Times in each bucket.
    pub counts: [u64; HISTOGRAM_BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Default for HistogramSnapshot {
    fn default() -> Self {
        Self {
            counts: [0; HISTOGRAM_BUCKETS],
        }
    }
}

impl Histogram {
    /// Counts a time.
    pub fn record(&self, ns: u64) {
        let bucket = usize::try_from(u64::BITS - ns.leading_zeros()).unwrap_or(usize::MAX);
        self.0[bucket.min(HISTOGRAM_BUCKETS - 1)].fetch_add(1, Relaxed);
    }

    /// What was counted so far.
    #[must_use]
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            counts: std::array::from_fn(|bucket| self.0[bucket].load(Relaxed)),
        }
    }
}

impl HistogramSnapshot {
    /// Times counted.
    #[must_use]
    pub fn n(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// A bound in ns below which at least `percent` of the times are, a power of two; `None` when
    /// there are none.
    #[must_use]
    pub fn below_ns(&self, percent: u32) -> Option<u64> {
        let wanted = (u128::from(self.n()) * u128::from(percent)).div_ceil(100);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|&count| {
            seen += u128::from(count);
            seen > 0 && seen >= wanted
        })?;
        Some(1 << bucket)
    }
}

#[cfg(test)]
mod tests {
    //! Promises: each time is in the bucket of its power of two, whatever its size; a bound is
    //! never below what it bounds.

    use super::*;

    #[test]
    fn each_time_has_its_bucket() {
        let histogram = Histogram::default();
        for ns in [0, 1, 2, 3, 4, 1023, 1024, u64::MAX] {
            histogram.record(ns);
        }
        let counts = histogram.snapshot().counts;
        let filled: Vec<_> = counts.iter().enumerate().filter(|(_, n)| **n > 0).collect();
        let expected = [
            (0, &1),
            (1, &1),
            (2, &2),
            (3, &1),
            (10, &1),
            (11, &1),
            (39, &1),
        ];
        assert_eq!(filled, expected);
    }

    #[test]
    fn bounds() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot().below_ns(50), None);
        for ns in [5, 6, 7, 900] {
            histogram.record(ns);
        }
        let snapshot = histogram.snapshot();
        assert_eq!((snapshot.n(), snapshot.below_ns(50)), (4, Some(8)));
        assert_eq!(snapshot.below_ns(75), Some(8));
        assert_eq!(snapshot.below_ns(99), Some(1024));
        assert_eq!(snapshot.below_ns(0), Some(8));
    }
}
