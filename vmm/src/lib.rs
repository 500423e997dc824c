// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The parts of the `vcpufreq` program.

pub mod kernel_image;
pub mod vm;
