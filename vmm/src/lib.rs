// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of the `vcpufreq` program.

pub mod config;
pub mod energy_model;
pub mod facts;
#[cfg(test)]
mod fake_host;
pub mod opp_node;
pub mod options;
pub mod parse;
pub mod vm;
