// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far the bench is, on stderr: a line before each repeat.

use std::time::{Duration, Instant};

use crate::scenario::Scenario;
use crate::variant::Variant;

/// What has ended of all repeats, and since when.
#[derive(Debug)]
pub struct Progress {
    /// Repeats that the user asks for.
    wanted: Option<u32>,
    all: u32,
    /// Repeats of scenarios that have ended, measured or not.
    before: u32,
    measured: u32,
    since: Instant,
}

impl Progress {
    /// Of so many repeats in all; `wanted` is how many the user asks for.
    pub fn new(wanted: Option<u32>, all: u32) -> Self {
        Self {
            wanted,
            all,
            before: 0,
            measured: 0,
            since: Instant::now(),
        }
    }

    /// How often a scenario is repeated.
    pub fn repeats_of(&self, scenario: &Scenario) -> u32 {
        scenario.repeats_of(self.wanted)
    }

    /// A repeat of a scenario begins, the first as 0.
    pub fn begins(&self, scenario: &Scenario, variant: Variant, repeat: u32) {
        let repeats = self.repeats_of(scenario);
        let left = left(
            self.all - self.before - repeat,
            self.measured,
            self.since.elapsed(),
        );
        eprintln!(
            "vcpufreq: {}: {}, repeat {} of {repeats}; {} of {} done{left}",
            variant.name(),
            scenario.name,
            repeat + 1,
            self.before + repeat,
            self.all
        );
    }

    /// A repeat was measured.
    pub fn measured(&mut self) {
        self.measured += 1;
    }

    /// A scenario has ended or failed: none of its repeats is ahead.
    pub fn ended(&mut self, scenario: &Scenario) {
        self.before += self.repeats_of(scenario);
    }
}

/// `, 4 min left` for the repeats ahead, if each takes as long as those that were measured:
/// `measured` in `elapsed`. Empty before the first. Failed ones take no time, so don't count.
fn left(ahead: u32, measured: u32, elapsed: Duration) -> String {
    let Some(each) = elapsed.checked_div(measured) else {
        return String::new();
    };
    format!(", {} left", time(each.saturating_mul(ahead).as_secs()))
}

/// Seconds as people read them: `40 s`, `6 min`.
pub fn time(s: u64) -> String {
    match s {
        0..60 => format!("{s} s"),
        _ => format!("{} min", s.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    //! Promise: the time left is that of the repeats ahead, at the pace so far.
    use super::*;

    #[test]
    fn the_time_left_is_at_the_pace_so_far() {
        let left = |ahead, measured, s| left(ahead, measured, Duration::from_secs(s));
        assert_eq!(left(36, 0, 9), "");
        assert_eq!(left(4, 6, 60), ", 40 s left");
        assert_eq!(left(30, 6, 61), ", 6 min left");
        assert_eq!(left(0, 36, 360), ", 0 s left");
    }
}
