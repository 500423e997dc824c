// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long frames took, and how many were late. A paced job does all of its work anyway, so that it
//! is judged by these.

use crate::machine::BenchMachine;
use crate::observed::Observed;

/// Samples beyond a percentile at least: of fewer, chance decides.
const BEYOND: usize = 5;

/// The percentile of these by nearest rank; `None` of too few: p50 needs 10 of them, p95 100, p99 500.
pub fn percentile(mut values: Vec<u64>, percent: u32) -> Option<u64> {
    values.sort_unstable();
    let percent = usize::try_from(percent).ok()?;
    let rank = (values.len() * percent).div_ceil(100).max(1);
    let enough = values.len().checked_sub(rank)? >= BEYOND;
    values.get(rank - 1).copied().filter(|_| enough)
}

impl Observed {
    /// How long each frame took of the time that counts, in µs.
    pub fn frames_us(&self, machine: &BenchMachine) -> Vec<u64> {
        let ends = self.frames.iter().map(|(_, to)| *to);
        let (Some(from), Some(to)) = (self.frames.first().map(|(from, _)| *from), ends.max())
        else {
            return Vec::new();
        };
        let charged = self.charged(machine, (from, to));
        let spans = self.frames.iter();
        let us = spans.map(|(from, to)| charged.between(*from, *to).div_ceil(1000));
        us.collect()
    }

    /// Per mille of the frames that ended after they were due.
    pub fn late(&self, machine: &BenchMachine) -> Option<u64> {
        let due = self.figures.get("due_us")?;
        let frames = self.frames_us(machine);
        let late = frames.iter().filter(|us| *us > due).count();
        u64::try_from(late * 1000)
            .ok()?
            .checked_div(u64::try_from(frames.len()).ok()?)
    }
}

#[cfg(test)]
mod tests {
    //! Percentiles of enough frames alone, at each edge; late is longer than the period.

    use super::*;
    use crate::measure_tests::{machine, observed};

    #[test]
    fn a_percentile_needs_five_samples_beyond_it() {
        let of = |count: u64, percent| percentile((1..=count).rev().collect(), percent);
        for (percent, least, is) in [(50, 10, 5), (95, 100, 95), (99, 500, 495)] {
            assert_eq!(of(least, percent), Some(is), "p{percent}");
            assert_eq!(of(least - 1, percent), None, "p{percent}");
        }
        assert_eq!(percentile(vec![], 50), None);
    }

    #[test]
    fn frames_that_take_their_period_are_in_time() {
        let mut load = observed(1, &[]);
        load.figures.insert("due_us".to_owned(), 1000);
        load.frames = vec![(1000, 2000), (2000, 3001), (3000, 3500), (4000, 5500)];
        assert_eq!(load.frames_us(&machine()), [1000, 1001, 500, 1500]);
        assert_eq!(load.late(&machine()), Some(500));
        load.frames.clear();
        assert_eq!(load.late(&machine()), None);
    }
}
