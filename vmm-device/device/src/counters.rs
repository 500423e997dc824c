// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters of what a guest did and what became of it, per vCPU.

#![forbid(unsafe_code)]

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One vCPU's counters at one moment; the device keeps them with atomic fields.
///
/// When no request is under way, `requests` is the sum of `applied`, `unchanged`, `superseded`,
/// `coalesced`, `refused` and `not_applicable`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CounterSnapshot<T = u64> {
    /// Writes of set_perf, and requests made again by a restore or a reset.
    pub requests: T,
    /// Requests that changed the host's clamp.
    pub applied: T,
    /// Requests that were in force already.
    pub unchanged: T,
    /// Requests overtaken by a newer one of the domain.
    pub superseded: T,
    /// Requests overtaken by a newer one before the device saw them: on the paths on which a write
    /// ends in the kernel.
    pub coalesced: T,
    /// Requests that had to wait because they came faster than the limit allows. What became of
    /// each is in the counters above and below, too.
    pub limited: T,
    /// Requests that the host refused.
    pub refused: T,
    /// Requests to which clamps mean nothing.
    pub not_applicable: T,
    /// Accesses outside the contract.
    pub illegal: T,
    /// Reads of cur_perf for which the host had no answer.
    pub source_failures: T,
}

impl Add for CounterSnapshot {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(&other, |one, other| one.saturating_add(*other))
    }
}

impl CounterSnapshot {
    /// What was counted since `before`, of the same counters.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        self.zip(&before, |now, before| now.saturating_sub(*before))
    }
}

impl<T> CounterSnapshot<T> {
    fn zip<U, V>(&self, other: &CounterSnapshot<U>, of: fn(&T, &U) -> V) -> CounterSnapshot<V> {
        CounterSnapshot {
            requests: of(&self.requests, &other.requests),
            applied: of(&self.applied, &other.applied),
            unchanged: of(&self.unchanged, &other.unchanged),
            superseded: of(&self.superseded, &other.superseded),
            coalesced: of(&self.coalesced, &other.coalesced),
            limited: of(&self.limited, &other.limited),
            refused: of(&self.refused, &other.refused),
            not_applicable: of(&self.not_applicable, &other.not_applicable),
            illegal: of(&self.illegal, &other.illegal),
            source_failures: of(&self.source_failures, &other.source_failures),
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
    pub outcomes: CounterSnapshot<Counter>,
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

    /// Subtracts up to `most`; returns how much.
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
        self.outcomes.zip(&more, |counter, more| counter.add(*more));
    }

    pub fn applied_was_refused(&self, most: u64) -> u64 {
        let taken = self.outcomes.applied.take(most);
        self.outcomes.refused.add(taken);
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
        self.outcomes
            .zip(&self.outcomes, |counter, _| counter.get())
    }
}
