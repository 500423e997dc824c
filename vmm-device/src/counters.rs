// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters of what a guest did and what became of it, per vCPU.

#![forbid(unsafe_code)]

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One vCPU's counters at one moment.
///
/// When no request is under way, `requests` is the sum of `applied`, `unchanged`, `superseded`,
/// `coalesced`, `refused` and `not_applicable`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CounterSnapshot {
    /// Writes of set_perf, and requests made again by a restore or a reset.
    pub requests: u64,
    /// Requests that changed the host's clamp.
    pub applied: u64,
    /// Requests that were in force already.
    pub unchanged: u64,
    /// Requests overtaken by a newer one of the domain.
    pub superseded: u64,
    /// Requests overtaken by a newer one before the device saw them: on the paths on which a write
    /// ends in the kernel.
    pub coalesced: u64,
    /// Requests that had to wait because they came faster than the limit allows. What became of
    /// each is in the counters above and below, too.
    pub limited: u64,
    /// Requests that the host refused.
    pub refused: u64,
    /// Requests to which clamps mean nothing.
    pub not_applicable: u64,
    /// Accesses outside the contract.
    pub illegal: u64,
    /// Reads of cur_perf for which the host had no answer.
    pub source_failures: u64,
}

impl Add for CounterSnapshot {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(other, u64::saturating_add)
    }
}

impl CounterSnapshot {
    /// What was counted since `before`, of the same counters.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        self.with(before, u64::saturating_sub)
    }

    fn with(self, other: Self, of: fn(u64, u64) -> u64) -> Self {
        Self {
            requests: of(self.requests, other.requests),
            applied: of(self.applied, other.applied),
            unchanged: of(self.unchanged, other.unchanged),
            superseded: of(self.superseded, other.superseded),
            coalesced: of(self.coalesced, other.coalesced),
            limited: of(self.limited, other.limited),
            refused: of(self.refused, other.refused),
            not_applicable: of(self.not_applicable, other.not_applicable),
            illegal: of(self.illegal, other.illegal),
            source_failures: of(self.source_failures, other.source_failures),
        }
    }
}

/// How one vCPU's registers were reached so far. Reads from memory don't exit and can't be counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Accesses {
    /// Reads that exited to the VMM, illegal ones too.
    pub reads_exited: u64,
    /// Writes that exited to the VMM, illegal ones too.
    pub writes_exited: u64,
    /// Writes of set_perf that ended in the kernel, as far as the VMM has learned of them.
    pub writes_in_kernel: u64,
}

/// The live form of [`CounterSnapshot`] and [`Accesses`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub requests: Counter,
    pub applied: Counter,
    pub unchanged: Counter,
    pub superseded: Counter,
    pub coalesced: Counter,
    pub limited: Counter,
    pub refused: Counter,
    pub not_applicable: Counter,
    pub illegal: Counter,
    pub source_failures: Counter,
    pub reads_exited: Counter,
    pub writes_exited: Counter,
    pub writes_in_kernel: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub fn bump(&self) {
        self.add(1);
    }

    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Takes away up to `most`; how many.
    fn take(&self, most: u64) -> u64 {
        let less = |n: u64| Some(n.saturating_sub(most));
        let before = self.0.fetch_update(Relaxed, Relaxed, less);
        before.unwrap_or_else(|n| n).min(most)
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Counters {
    pub fn add(&self, more: CounterSnapshot) {
        self.requests.add(more.requests);
        self.applied.add(more.applied);
        self.unchanged.add(more.unchanged);
        self.superseded.add(more.superseded);
        self.coalesced.add(more.coalesced);
        self.limited.add(more.limited);
        self.refused.add(more.refused);
        self.not_applicable.add(more.not_applicable);
        self.illegal.add(more.illegal);
        self.source_failures.add(more.source_failures);
    }

    pub fn applied_was_refused(&self, most: u64) -> u64 {
        let taken = self.applied.take(most);
        self.refused.add(taken);
        taken
    }

    pub fn accesses(&self) -> Accesses {
        Accesses {
            reads_exited: self.reads_exited.get(),
            writes_exited: self.writes_exited.get(),
            writes_in_kernel: self.writes_in_kernel.get(),
        }
    }

    pub fn snapshot(&self) -> CounterSnapshot {
        CounterSnapshot {
            requests: self.requests.get(),
            applied: self.applied.get(),
            unchanged: self.unchanged.get(),
            superseded: self.superseded.get(),
            coalesced: self.coalesced.get(),
            limited: self.limited.get(),
            refused: self.refused.get(),
            not_applicable: self.not_applicable.get(),
            illegal: self.illegal.get(),
            source_failures: self.source_failures.get(),
        }
    }
}
