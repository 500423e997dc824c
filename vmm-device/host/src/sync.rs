// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks.

use std::sync::{LockResult, PoisonError};

/// The guard of a lock, also if a thread panicked with it: what is behind these locks is whole after each
/// step.
pub(crate) fn unpoisoned<G>(guard: LockResult<G>) -> G {
    guard.unwrap_or_else(PoisonError::into_inner)
}
