// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long another program may take before it counts as one that hangs. What waits for one on the
//! program's main thread says so after a second, and from then on a signal ends it.

use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use crate::{message::warn, signals};

/// A wait that takes longer is a line.
const SILENCE: Duration = Duration::from_secs(1);
/// In a build for tests, a longest wait in seconds, for tests of the wait itself.
const OF_TEST: &str = "VCPUFREQ_TEST_PATIENCE";

/// So many seconds. In a build for tests, which has debug assertions, no less than ten minutes: there
/// a machine that is busy with something else makes no failure.
pub const fn patience(seconds: u64) -> Duration {
    const OF_TESTS: u64 = 600;
    match cfg!(debug_assertions) && seconds < OF_TESTS {
        true => Duration::from_secs(OF_TESTS),
        false => Duration::from_secs(seconds),
    }
}

/// The same, or what a test wants.
pub fn patience_of(seconds: u64) -> Duration {
    let wanted = std::env::var(OF_TEST);
    let wanted = wanted.ok().filter(|_| cfg!(debug_assertions));
    let wanted = wanted.and_then(|text| text.parse().ok());
    wanted.map_or(patience(seconds), Duration::from_secs)
}

/// A part of a wait.
pub struct WaitPart {
    /// How long it may be.
    pub left: Duration,
    /// Whether a signal that asks the program to end ends it: what is done within a second, is done.
    heeds: bool,
}

impl WaitPart {
    /// Whether one of `files` is readable in this part, within so long.
    ///
    /// # Errors
    /// As [`signals::is_ready`].
    pub fn is_ready(&self, files: &[BorrowedFd<'_>], within: Duration) -> anyhow::Result<bool> {
        signals::is_ready(files, self.left.min(within), self.heeds)
    }
}

/// Tries again, `within` so long, until `attempt` has something. A wait that takes longer than a second is
/// a line: what it is for.
///
/// # Errors
/// The first one of an attempt, which ends the wait.
pub fn patiently<T>(
    within: Duration,
    what: &str,
    mut attempt: impl FnMut(&WaitPart) -> anyhow::Result<Option<T>>,
) -> anyhow::Result<Option<T>> {
    let begun = Instant::now();
    let mut heeds = false;
    loop {
        let until = if heeds { within } else { SILENCE.min(within) };
        let left = until.saturating_sub(begun.elapsed());
        let done = attempt(&WaitPart { left, heeds })?;
        if done.is_some() || begun.elapsed() >= within {
            return Ok(done);
        }
        if !heeds && begun.elapsed() >= SILENCE {
            warn(&format!("waits {what}, at most {} s", within.as_secs()));
            heeds = true;
        }
    }
}
