// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A limit on how often a vCPU's requests reach the host: a token bucket in one word.
//!
//! The word is the time at which the bucket is full again (generic cell rate algorithm): a request
//! takes it one token's time further, and has to wait while it is more than a whole bucket ahead.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

const SECOND_NS: u64 = 1_000_000_000;

/// How many requests of a vCPU reach the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// Tokens a second: requests for ever.
    pub per_second: NonZeroU32,
    /// Tokens that a bucket holds: requests at once.
    pub burst: NonZeroU32,
}

impl RateLimit {
    fn token_ns(self) -> u64 {
        (SECOND_NS / u64::from(self.per_second.get())).max(1)
    }

    fn slack_ns(self) -> u64 {
        self.token_ns() * u64::from(self.burst.get() - 1)
    }
}

/// The time as the limit sees it.
pub trait Clock: Send + Sync {
    /// Nanoseconds since some moment; never goes back.
    fn now_ns(&self) -> u64;
}

/// The host's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Monotonic(Instant);

impl Default for Monotonic {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// One vCPU's bucket, full at first.
#[derive(Debug, Default)]
pub(crate) struct Bucket(AtomicU64);

impl Bucket {
    /// Takes a token at `now_ns`.
    ///
    /// # Errors
    /// When the next one will be there.
    pub fn take(&self, limit: RateLimit, now_ns: u64) -> Result<(), u64> {
        let latest = now_ns.saturating_add(limit.slack_ns());
        let took = self.0.fetch_update(Relaxed, Relaxed, |full_at| {
            (full_at <= latest).then(|| full_at.max(now_ns) + limit.token_ns())
        });
        took.map(|_| ())
            .map_err(|full_at| full_at - limit.slack_ns())
    }
}

#[cfg(test)]
mod tests {
    //! A burst at once, then one each token's time; an idle bucket holds no more than a burst.
    use super::*;

    const LIMIT: RateLimit = RateLimit {
        per_second: NonZeroU32::new(1000).unwrap(),
        burst: NonZeroU32::new(3).unwrap(),
    };

    fn burst(bucket: &Bucket, now: u64) -> usize {
        (0..10).filter(|_| bucket.take(LIMIT, now).is_ok()).count()
    }

    #[test]
    fn a_burst_then_the_rate() {
        let bucket = Bucket::default();
        assert_eq!(burst(&bucket, 5), 3);
        assert_eq!(bucket.take(LIMIT, 5), Err(1_000_005));
        assert_eq!(bucket.take(LIMIT, 1_000_004), Err(1_000_005));
        assert_eq!(bucket.take(LIMIT, 1_000_005), Ok(()));
        assert_eq!(bucket.take(LIMIT, 1_000_005), Err(2_000_005));
    }

    #[test]
    fn an_idle_bucket_holds_one_burst() {
        let bucket = Bucket::default();
        assert_eq!(burst(&bucket, 0), 3);
        assert_eq!(burst(&bucket, 3600 * SECOND_NS), 3);
    }
}
