// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The order of the looks at a vCPU's frequency.
//!
//! Several threads may look at once: the vCPU, the maintenance thread, the one that sees events of
//! frequencies. What a look has found is stored unless a later look has stored before it: so a page
//! never goes back to a frequency that has changed since.

#![forbid(unsafe_code)]

use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use crate::sync::{AtomicU64, Mutex};

/// The looks at one vCPU.
#[derive(Debug, Default)]
pub struct Looks {
    begun: AtomicU64,
    /// The latest one that has stored what it found.
    stored: Mutex<u64>,
}

impl Looks {
    /// Begins a look, before the host is asked; returns its number.
    pub fn begin(&self) -> u64 {
        self.begun.fetch_add(1, SeqCst) + 1
    }

    /// Ends `look` with `store`, unless a later look has stored. `store` makes no host call.
    pub fn end(&self, look: u64, store: impl FnOnce()) {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        if *stored < look {
            *stored = look;
            store();
        }
    }
}
