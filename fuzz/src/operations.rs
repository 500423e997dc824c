// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How much was tried by the targets whose input is a sequence of accesses.

use std::sync::atomic::{AtomicU64, Ordering};

static OPERATIONS: AtomicU64 = AtomicU64::new(0);

/// How many accesses this process has carried out.
pub fn operations() -> u64 {
    OPERATIONS.load(Ordering::Relaxed)
}

pub fn count() {
    OPERATIONS.fetch_add(1, Ordering::Relaxed);
}
