// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of the `vcpufreq` program.
//!
//! ```text
//! cli ─▶ options ─▶ config ─▶ run ─▶ vcpufreq-vm
//!                              ├───▶ path, floors: what the host offers
//!                              ├───▶ rt_guest: its real-time side
//!                              ├───▶ lifecycle: what is made on the host, and removed
//!                              └───▶ session: stats, tune, events
//! ```
//! `doctor` and `dt` are commands of their own, on the same facts of the host. So are `demo`,
//! `bench` and `report`, whose guest is `host_guest`. `tune` and `trace` are for a guest that
//! runs.

#[cfg(test)]
mod as_other;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod dt;
pub mod events;
pub mod floors;
#[cfg(test)]
mod hint_tests;
pub mod host_guest;
mod kernel_version;
pub mod lifecycle;
mod manager;
pub mod message;
pub mod options;
pub mod path;
mod patience;
pub mod policy;
pub mod qemu;
mod qemu_command;
pub mod report;
pub mod rt_guest;
pub mod run;
pub mod sandbox;
pub mod scx;
pub mod serve;
pub mod session;
pub mod signals;
mod socket_thread;
pub mod stats;
mod sys;
pub mod trace;
pub mod tune;
