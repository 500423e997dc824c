// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vmm-device/device/src/sync.rs` with loom's locks and atomics. No access is sequentially consistent here:
//! loom's have more order than C++'s, so that a missing fence wouldn't show. The fences are.

pub use loom::sync::atomic::fence;
pub use loom::sync::{Mutex, MutexGuard};

use loom::sync::atomic;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use std::sync::{LockResult, PoisonError};

/// As there.
pub fn unpoisoned<G>(guard: LockResult<G>) -> G {
    guard.unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
pub struct AtomicBool(atomic::AtomicBool);

#[derive(Debug, Default)]
pub struct AtomicU64(atomic::AtomicU64);

fn unless_relaxed(asked: Ordering, weaker: Ordering) -> Ordering {
    match asked {
        Relaxed => Relaxed,
        _ => weaker,
    }
}

impl AtomicBool {
    pub fn new(value: bool) -> Self {
        Self(atomic::AtomicBool::new(value))
    }

    pub fn load(&self, order: Ordering) -> bool {
        self.0.load(unless_relaxed(order, Acquire))
    }

    /// A swap: loom has no order between a store and another thread's swap before it, and would let
    /// a later load see the older value.
    pub fn store(&self, value: bool, order: Ordering) {
        self.0.swap(value, unless_relaxed(order, Release));
    }

    pub fn swap(&self, value: bool, order: Ordering) -> bool {
        self.0.swap(value, unless_relaxed(order, AcqRel))
    }
}

impl AtomicU64 {
    pub fn new(value: u64) -> Self {
        Self(atomic::AtomicU64::new(value))
    }

    pub fn load(&self, order: Ordering) -> u64 {
        self.0.load(unless_relaxed(order, Acquire))
    }

    pub fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, unless_relaxed(order, AcqRel))
    }

    pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, unless_relaxed(order, AcqRel))
    }

    pub fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_and(value, unless_relaxed(order, AcqRel))
    }

    pub fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_sub(value, unless_relaxed(order, AcqRel))
    }

    pub fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        let success = unless_relaxed(success, AcqRel);
        let failure = unless_relaxed(failure, Acquire);
        self.0.compare_exchange(current, new, success, failure)
    }

    pub fn fetch_update(
        &self,
        success: Ordering,
        failure: Ordering,
        change: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64> {
        let success = unless_relaxed(success, AcqRel);
        let failure = unless_relaxed(failure, Acquire);
        self.0.fetch_update(success, failure, change)
    }
}
