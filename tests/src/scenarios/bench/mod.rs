// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq bench` and `vcpufreq demo`, and crosvm beside vcpufreq.

pub mod board;
pub mod peer;
pub mod peer_setup;
pub mod program;
