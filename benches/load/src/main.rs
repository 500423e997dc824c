// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq-load`: carries out the commands of `vcpufreq bench` and `vcpufreq demo`, line by line.
//! The program `vcpufreq` does the same under this name.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    vcpufreq_load::run()
}
