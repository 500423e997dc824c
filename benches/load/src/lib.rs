// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loads, the same on host and guest: the unit of work, and threads that go
//! through its phases on command.
//!
//! It measures nothing but the time of its own marks. The caller reads the load's share from the
//! host's trace.
#![forbid(unsafe_code)]

pub mod commands;
mod device;
mod jobs;
pub mod load_log;
pub mod phases;
mod rt_app;
pub mod settle;
pub mod work;
