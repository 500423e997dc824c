// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting for what comes about by itself, in the host's (virtual) time.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

/// How long a VMM or a server may take to do its part, or to leave nothing behind when it has ended.
pub const SOON: Duration = Duration::from_secs(1);
/// Between two looks.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);

/// Looks until what was seen is `right`, at most so long; what was seen last.
pub fn settled<T>(
    within: Duration,
    mut look: impl FnMut() -> Result<T>,
    right: impl Fn(&T) -> bool,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let seen = look()?;
        let passed = start.elapsed();
        if right(&seen) || passed >= within {
            return Ok(seen);
        }
        // Looks are work of the host's: the longer it takes, the rarer they are.
        sleep((passed / 16).clamp(SHORTEST, LONGEST));
    }
}

/// Looks until something is found, at most so long.
pub fn wait_for<T>(
    what: &str,
    within: Duration,
    look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    settled(within, look, Option::is_some)?
        .with_context(|| format!("{what}: not within {within:?}"))
}

/// Looks until something is so, at most so long.
pub fn wait_until(
    what: &str,
    within: Duration,
    mut is_so: impl FnMut() -> Result<bool>,
) -> Result<()> {
    wait_for(what, within, || Ok(is_so()?.then_some(())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_ends_the_looks() -> Result<()> {
        let mut looks = 0..;
        let found = wait_for("a third", Duration::MAX, || {
            Ok(looks.next().filter(|look| *look == 2))
        })?;
        assert_eq!((found, looks.next()), (2, Some(3)));
        Ok(())
    }

    #[test]
    fn what_was_not_found_is_named_after_a_last_look() -> Result<()> {
        let mut looks = 0..;
        let seen = settled(Duration::ZERO, || Ok(looks.next()), |_| false)?;
        assert_eq!((seen, looks.next()), (Some(0), Some(1)));
        let error = wait_until("an end", Duration::ZERO, || Ok(false)).map_err(|e| e.to_string());
        assert_eq!(error, Err("an end: not within 0ns".to_owned()));
        Ok(())
    }
}
