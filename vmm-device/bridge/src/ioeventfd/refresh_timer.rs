// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decides when cur_perf of the vCPUs is read: once in a period, and soon after it may have
//! changed, within a bound on the time that this takes ([`Budget`]).
//!
//! A look takes a few microseconds for each vCPU: many vCPUs are looked at less often. Time saved
//! before pays for one look that took long (an interrupt, a slow pCPU): it doesn't delay the next
//! one.

use std::time::{Duration, Instant};

use crate::budget::Budget;

/// A tick of a host with HZ = 250, which is how often its frequency changes.
const PERIOD: Duration = Duration::from_millis(4);
/// Looks may take one part in this many of the time.
const SHARE: u32 = 20;
/// How soon after a look the next one comes, when there was a change.
const AGAIN: Duration = Duration::from_micros(250);

pub struct RefreshTimer {
    budget: Budget,
    /// When the next one is due, and from when on it may be.
    at: Instant,
    not_before: Instant,
}

impl RefreshTimer {
    /// The first one is due at `now`.
    pub fn new(now: Instant) -> Self {
        Self {
            budget: Budget::new(SHARE, now),
            at: now,
            not_before: now,
        }
    }

    /// A fact that cur_perf depends on has changed since the last look.
    pub fn hear_of_a_change(&mut self) {
        self.at = self.at.min(self.not_before);
    }

    /// When the next one is due.
    pub fn due_at(&self) -> Instant {
        self.at
    }

    /// One has begun at `started`, and taken so much of the CPU's time.
    pub fn done(&mut self, started: Instant, took: Duration) {
        let nap = self.budget.after(took, started);
        self.at = started + PERIOD.max(nap);
        self.not_before = started + AGAIN.max(nap);
    }
}

#[cfg(test)]
mod tests {
    //! Looks are soon after a change, also after one that took long, and take
    //! a twentieth of the time at most.
    use super::*;

    const US: Duration = Duration::from_micros(1);
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn without_changes_there_is_one_a_tick() {
        let start = Instant::now();
        let mut timer = RefreshTimer::new(start);
        assert_eq!(timer.due_at(), start);
        timer.done(start, 40 * US);
        assert_eq!(timer.due_at(), start + PERIOD);
    }

    #[test]
    fn a_look_that_took_long_does_not_delay_the_next() {
        let start = Instant::now();
        let mut timer = RefreshTimer::new(start);
        let mut now = start;
        for took in [40, 1600, 40, 300, 40] {
            timer.done(now, took * US);
            timer.hear_of_a_change();
            assert_eq!(timer.due_at(), now + AGAIN, "after one of {took} us");
            // The next change comes later.
            now += 20 * MS;
        }
    }

    #[test]
    fn looks_take_a_twentieth_of_the_time_at_most() {
        for took in [40 * US, 300 * US] {
            let start = Instant::now();
            let (mut timer, mut spent) = (RefreshTimer::new(start), Duration::ZERO);
            // Something changes all the time.
            while timer.due_at() < start + 1000 * MS {
                timer.done(timer.due_at(), took);
                timer.hear_of_a_change();
                spent += took;
            }
            // And the reserve that there is at first.
            assert!(spent <= 1000 * MS / 20 + 3 * MS, "{spent:?}");
            assert!(spent >= 1000 * MS / 21, "{spent:?}");
        }
    }
}
