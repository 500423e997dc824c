// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `systemctl` of a host whose first process is systemd.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// What it prints for these words.
pub fn systemctl(words: &[&str]) -> Result<String> {
    let mut command = Command::new("/usr/bin/systemctl");
    let output = command.arg("--no-ask-password").args(words).output();
    let output = output.context("starting systemctl")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "systemctl {words:?}: {}",
        said.trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
