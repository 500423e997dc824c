// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Locks and atomics of what vCPUs do at the same time. `fuzz/orders` compiles the same files with
//! loom's, which runs them in each order.

#![forbid(unsafe_code)]

pub use std::sync::atomic::{AtomicBool, AtomicU64, fence};
pub use std::sync::{Mutex, MutexGuard};
