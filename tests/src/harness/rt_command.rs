// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt` on the emulated host.

use std::process::Command;

use anyhow::{Result, ensure};

/// Of a command that has to; what it said on standard error.
pub fn succeeded(line: &[&str]) -> Result<String> {
    let output = Command::new("/bin/vcpufreq")
        .arg("rt")
        .args(line)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "rt {line:?}: {}: {said}",
        output.status
    );
    Ok(said.into_owned())
}
