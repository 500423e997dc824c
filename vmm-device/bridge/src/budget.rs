// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bounds the share of the time that a worker runs. After a turn the worker sleeps for a multiple
//! of the turn's CPU time. Idle time before the turn counts as sleep, up to a reserve. A turn can
//! be charged for an interrupt or a hypervisor below; the next request still waits for no longer
//! than `NAP`, and later naps pay the rest.

use std::time::{Duration, Instant};

/// How long it may run at once after it has been idle.
const RESERVE: Duration = Duration::from_millis(2);
/// The longest that a request waits for the worker's share.
const NAP: Duration = Duration::from_millis(10);
/// Debt that is remembered, in time of the CPU.
const DEBT: Duration = Duration::from_millis(10);

/// How long a worker may still run now, and what it has run too long.
pub struct Budget {
    one_in: u32,
    left: Duration,
    debt: Duration,
    since: Instant,
}

impl Budget {
    /// For a worker that starts at `since` and may run one part in `one_in` of the time.
    pub fn new(one_in: u32, since: Instant) -> Self {
        Self {
            one_in,
            left: RESERVE,
            debt: Duration::ZERO,
            since,
        }
    }

    /// After a turn that took `used` of the CPU: how long to sleep before the
    /// next one.
    pub fn after(&mut self, used: Duration, now: Instant) -> Duration {
        let earned = now.saturating_duration_since(self.since) / self.one_in;
        self.since = now;
        let left = (self.left + earned.saturating_sub(self.debt)).min(RESERVE);
        let debt = self.debt.saturating_sub(earned) + used.saturating_sub(left);
        self.left = left.saturating_sub(used);
        self.debt = debt.min(DEBT);
        (self.debt * self.one_in).min(NAP)
    }
}

#[cfg(test)]
mod tests {
    //! The worker may run its share of the time, here a twentieth, and a reserve at once.
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_budget_is_a_twentieth_of_the_time() {
        let start = Instant::now();
        let mut budget = Budget::new(20, start);
        assert_eq!(budget.after(2 * MS, start), Duration::ZERO);
        assert_eq!(budget.after(MS / 4, start), 5 * MS);
        assert_eq!(budget.after(MS / 4, start + 5 * MS), 5 * MS);
        // A long idle time earns no more than the reserve.
        let later = start + 1000 * MS;
        assert_eq!(budget.after(2 * MS + MS / 4, later), 5 * MS);
    }

    #[test]
    fn a_debt_is_paid_by_naps_that_requests_can_wait_for() {
        let start = Instant::now();
        let mut budget = Budget::new(20, start);
        let mut nap = budget.after(RESERVE + 3 * MS, start);
        let mut slept = Duration::ZERO;
        while nap > Duration::ZERO {
            assert!(nap <= NAP);
            slept += nap;
            nap = budget.after(Duration::ZERO, start + slept);
        }
        assert_eq!(slept, 3 * MS * 20);
        // One that was charged for a second doesn't pay for it for ever.
        assert_eq!(budget.after(1000 * MS, start + slept), NAP);
        assert_eq!(budget.debt, DEBT);
    }
}
