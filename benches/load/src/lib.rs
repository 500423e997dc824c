// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loads, the same on host and guest: the unit of work, and threads that go
//! through its phases on command.
//!
//! It measures nothing but the time of its own marks. The caller reads the load's share from the
//! host's trace.

pub mod answer;
pub mod commands;
mod device;
mod fio;
mod init;
mod jobs;
pub mod load_log;
pub mod phases;
mod registers;
mod rt_app;
mod rt_app_file;
pub mod settle;
mod signals;
mod teams;
pub mod work;

pub use device::{IO_DEVICE, NULL_BLK, other_null_blk};
pub use init::run;

/// The program's name, and where it is in a guest's ramdisk below `/bin`.
pub const NAME: &str = "vcpufreq-load";
