// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of the `vcpufreq` program.

pub mod cleanup;
pub mod cli;
pub mod config;
pub mod console_choice;
pub mod dl_server;
pub mod doctor;
pub mod doctor_facts;
pub mod dt_command;
pub mod events;
pub mod frequency_floor;
pub mod guardian;
pub mod guest_bridge;
pub mod guest_topology;
pub mod host_changes;
pub mod options;
pub mod parse;
pub mod path;
pub mod resolve;
pub mod rt_config;
pub mod rt_guest;
pub mod rt_options;
pub mod run;
pub mod run_report;
pub mod state;
pub mod stats;
mod sys;
pub mod vm;
