// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! As `sync.rs` of vcpufreq-device.

#![forbid(unsafe_code)]

pub use std::sync::atomic::AtomicBool;
pub use std::sync::{Mutex, MutexGuard};
