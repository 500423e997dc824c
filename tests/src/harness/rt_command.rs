// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line `vcpufreq rt`, and what scenarios give it.

use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

pub const CONFIG: &str = "/run/rt.toml";
/// What `apply` leaves for `restore`.
pub const RECORD: &str = "/run/vcpufreq-rt/rt.json";
pub const NOBODY: u32 = 65534;

pub fn command(line: &[&str]) -> Command {
    let mut command = Command::new("/bin/vcpufreq");
    command.arg("rt").args(line);
    command
}

pub fn output(line: &[&str]) -> Result<Output> {
    command(line).output().context("starting vcpufreq rt")
}

/// Runs a command that has to end with this code; returns its standard error.
pub fn ended(line: &[&str], code: i32) -> Result<String> {
    let output = output(line)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(code),
        "rt {line:?}: {}: {said}",
        output.status
    );
    Ok(said.into_owned())
}

/// The same, of one that has to succeed.
pub fn succeeded(line: &[&str]) -> Result<String> {
    ended(line, 0)
}

/// Of a command that may have findings.
pub fn json_of(line: &[&str]) -> Result<Value> {
    let output = output(line)?;
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).with_context(|| format!("rt {line:?}: {said}"))
}
