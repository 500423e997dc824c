// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks and atomics of what vCPUs do at the same time. `fuzz/orders` compiles the same files with
//! loom's, which runs them in each order.

#![forbid(unsafe_code)]

pub use std::sync::atomic::{AtomicBool, AtomicU64, fence};
use std::sync::{LockResult, PoisonError};
pub use std::sync::{Mutex, MutexGuard};

/// The guard of a lock, also if a thread panicked with it: what is behind these locks is whole after each
/// step.
pub(crate) fn unpoisoned<G>(guard: LockResult<G>) -> G {
    guard.unwrap_or_else(PoisonError::into_inner)
}
