// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The order of the samples of a vCPU's frequency.
//!
//! Several threads may sample at the same time: the vCPU, the maintenance thread, the thread that
//! receives frequency events. A sample is stored unless a later one has been stored before it. So
//! a page never returns to a frequency that has changed since.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::SeqCst;

use crate::sync::{AtomicU64, Mutex, unpoisoned};

/// The samples of one vCPU.
#[derive(Debug, Default)]
pub struct SampleOrder {
    begun: AtomicU64,
    /// The latest sample that has been stored.
    stored: Mutex<u64>,
}

impl SampleOrder {
    /// Begins a sample, before the host is read; returns its number.
    pub fn begin(&self) -> u64 {
        self.begun.fetch_add(1, SeqCst) + 1
    }

    /// Ends `sample` with `store`, unless a later one has stored. `store` makes no host call.
    pub fn end(&self, sample: u64, store: impl FnOnce()) {
        let mut stored = unpoisoned(self.stored.lock());
        if *stored < sample {
            *stored = sample;
            store();
        }
    }
}
