// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A limit on how often a guest's requests reach the host: token buckets of one word each.
//!
//! The word is the time at which the bucket is full again (generic cell rate algorithm). A request
//! moves it on by one token's time, and has to wait while it is more than a whole bucket ahead.
//!
//! A request takes a token of the vCPU that writes it and one of the VM. The written register's
//! vCPU pays nothing: a vCPU that writes every page has one bucket. If the writer isn't known, the
//! domain pays.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::sync::AtomicU64;

const SECOND_NS: u64 = 1_000_000_000;

/// How many requests reach the host: of a vCPU, or of a domain. Those of a VM are bounded by this
/// times its domains, of which [`VM_DOMAINS`] count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// Tokens a second: requests for ever.
    pub per_second: NonZeroU32,
    /// Tokens that a bucket holds: requests at once.
    pub burst: NonZeroU32,
}

/// The VM's limit counts at most this many domains.
pub const VM_DOMAINS: NonZeroU32 = NonZeroU32::new(8).expect("not 0");

/// A limit as a bucket needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Time for which a token lasts, in ns; at least 1.
    pub token_ns: u64,
    /// How far ahead of the time of a request, in ns, its bucket may be full again at most: a burst
    /// less one token.
    pub slack_ns: u64,
}

impl Pace {
    /// When a bucket that is full at `full_at` is full again after a token has been taken at
    /// `now_ns`, whether it had one or not; in ns of the same clock.
    #[must_use]
    pub fn charged(self, full_at: u64, now_ns: u64) -> u64 {
        full_at.max(now_ns).saturating_add(self.token_ns)
    }
}

impl RateLimit {
    /// Of a vCPU or a domain.
    #[must_use]
    pub fn each(self) -> Pace {
        self.times(NonZeroU32::MIN)
    }

    /// The limit of a VM; domains beyond [`VM_DOMAINS`] add nothing.
    #[must_use]
    pub fn of_vm(self, domains: NonZeroU32) -> Pace {
        self.times(domains.min(VM_DOMAINS))
    }

    fn times(self, domains: NonZeroU32) -> Pace {
        let per_second = u64::from(self.per_second.get()) * u64::from(domains.get());
        let token_ns = (SECOND_NS / per_second).max(1);
        let more = u64::from(self.burst.get()) * u64::from(domains.get()) - 1;
        Pace {
            token_ns,
            slack_ns: token_ns.saturating_mul(more),
        }
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

/// A bucket, full at first.
#[derive(Debug, Default)]
pub(crate) struct Bucket(AtomicU64);

impl Bucket {
    /// Takes a token at `now_ns`.
    ///
    /// # Errors
    /// When the next token is there, in ns of the same clock; the bucket stays as it was.
    pub fn take(&self, pace: Pace, now_ns: u64) -> Result<(), u64> {
        let latest = now_ns.saturating_add(pace.slack_ns);
        let took = self.0.fetch_update(Relaxed, Relaxed, |full_at| {
            (full_at <= latest).then(|| pace.charged(full_at, now_ns))
        });
        took.map(|_| ())
            .map_err(|full_at| full_at.saturating_sub(pace.slack_ns))
    }

    /// Gives a token back that was taken for nothing. Those that others have taken since stay
    /// taken.
    fn give_back(&self, pace: Pace) {
        self.0.fetch_sub(pace.token_ns, Relaxed);
    }
}

/// A VM's limit: its own bucket, and how fast that and the others fill.
#[derive(Debug)]
pub(crate) struct Limit {
    each: Pace,
    all: Pace,
    vm: Bucket,
}

impl Limit {
    pub fn new(limit: RateLimit, domains: usize) -> Self {
        let domains = u32::try_from(domains).ok().and_then(NonZeroU32::new);
        Self {
            each: limit.each(),
            all: limit.of_vm(domains.unwrap_or(NonZeroU32::MIN)),
            vm: Bucket::default(),
        }
    }

    /// Takes a token of `payer` and one of the VM, or none.
    ///
    /// # Errors
    /// When to try again, in ns of the same clock; no token is taken.
    pub fn take(&self, payer: &Bucket, now_ns: u64) -> Result<(), u64> {
        payer.take(self.each, now_ns)?;
        self.vm
            .take(self.all, now_ns)
            .inspect_err(|_| payer.give_back(self.each))
    }
}

#[cfg(test)]
mod tests {
    //! A burst at once, then one each token's time; an idle bucket holds no more than a burst. A VM
    //! of 64 domains gets no more than one of 8. A
    //! token that the VM refuses isn't taken of the payer. Takers at the same time lose no charge.
    use std::thread;

    use super::*;

    const LIMIT: RateLimit = RateLimit {
        per_second: NonZeroU32::new(1000).unwrap(),
        burst: NonZeroU32::new(3).unwrap(),
    };

    fn burst(bucket: &Bucket, now: u64) -> usize {
        let pace = LIMIT.each();
        (0..10).filter(|_| bucket.take(pace, now).is_ok()).count()
    }

    #[test]
    fn a_burst_then_the_rate() {
        let bucket = Bucket::default();
        assert_eq!(burst(&bucket, 5), 3);
        let pace = LIMIT.each();
        assert_eq!(bucket.take(pace, 5), Err(1_000_005));
        assert_eq!(bucket.take(pace, 1_000_004), Err(1_000_005));
        assert_eq!(bucket.take(pace, 1_000_005), Ok(()));
        assert_eq!(bucket.take(pace, 1_000_005), Err(2_000_005));
    }

    #[test]
    fn an_idle_bucket_holds_one_burst() {
        let bucket = Bucket::default();
        assert_eq!(burst(&bucket, 0), 3);
        assert_eq!(burst(&bucket, 3600 * SECOND_NS), 3);
    }

    #[test]
    fn a_vm_of_many_vcpus_is_no_multiple_of_them() {
        let granted = |domains: usize| {
            let limit = Limit::new(LIMIT, domains);
            let payers: Vec<Bucket> = (0..domains).map(|_| Bucket::default()).collect();
            // Each vCPU tries a burst each millisecond, for a second.
            let tries = (0..=1000).map(|ms| ms * 1_000_000);
            let passed = tries.map(|now| {
                let tries = (0..3).flat_map(|_| &payers);
                tries.filter(|one| limit.take(one, now).is_ok()).count()
            });
            passed.sum::<usize>()
        };
        assert_eq!(granted(1), 3 + 1000);
        assert_eq!(granted(8), 8 * granted(1));
        assert_eq!(granted(64), granted(8));
    }

    #[test]
    fn what_the_vm_refuses_costs_the_payer_nothing() {
        let limit = Limit::new(LIMIT, 1);
        let (first, second) = (Bucket::default(), Bucket::default());
        for _ in 0..3 {
            assert_eq!(limit.take(&first, 0), Ok(()));
        }
        for _ in 0..10 {
            assert_eq!(limit.take(&second, 0), Err(1_000_000));
        }
        // It has its burst still, when the VM's bucket is full again.
        assert_eq!(burst(&second, 3_000_000), 3);
    }

    #[test]
    fn takers_at_the_same_time_lose_no_charge() {
        const TRIES: u32 = 50_000;
        // The VM has fewer tokens than its vCPUs together.
        let limit = RateLimit {
            per_second: NonZeroU32::MIN,
            burst: NonZeroU32::new(TRIES).unwrap(),
        };
        let (limit, payers) = (Limit::new(limit, 2), [(); 4].map(|()| Bucket::default()));
        let granted: usize = thread::scope(|scope| {
            let takers = payers.each_ref().map(|payer| {
                let take = || limit.take(payer, 0).is_ok();
                scope.spawn(move || (0..TRIES).filter(|_| take()).count())
            });
            takers.into_iter().map(|taker| taker.join().unwrap()).sum()
        });
        assert_eq!(granted, usize::try_from(2 * TRIES).unwrap());
    }
}
