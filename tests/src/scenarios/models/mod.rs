// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lab's own host, without a guest: its drivers, its speed model, its programs.

pub mod host_driver;
pub mod idle;
pub mod rt_app;
pub mod speed;
