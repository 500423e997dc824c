// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's clock of the day.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime, clock_settime};

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// Does something at this hour, UTC; the clock goes on as before then.
pub fn set_hour<T>(hour: i64, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let clock = ClockId::CLOCK_REALTIME;
    let before = clock_gettime(clock)?;
    let begun = Instant::now();
    let day = before.tv_sec() - before.tv_sec() % DAY;
    clock_settime(clock, TimeSpec::new(day + hour * HOUR, 0)).context("setting the clock")?;
    let done = act();
    let after = Duration::from(before) + begun.elapsed();
    clock_settime(clock, after.into()).context("setting the clock back")?;
    done
}
