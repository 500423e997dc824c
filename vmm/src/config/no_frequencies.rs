// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The error of a vCPU without frequencies. What to do about it differs between commands: each adds
//! what it takes.

use thiserror::Error;

/// A vCPU has no frequencies: the user gives it none, and the host has none of its pCPU.
#[derive(Debug, Error)]
#[error("vCPU {vcpu} has no frequencies: {why}")]
pub struct NoFrequencies {
    /// The vCPU.
    pub vcpu: u32,
    /// What the host lacks.
    pub why: String,
    /// Whether other pCPUs have a cpufreq policy.
    pub others_have: bool,
}

/// The same error; with the next step, if it is [`NoFrequencies`]. A command that `drives` the
/// host's frequency can't do so with a table alone; `instead` is what it offers without frequencies.
pub fn with_next_step(error: anyhow::Error, drives: bool, instead: &str) -> anyhow::Error {
    let Some(NoFrequencies {
        vcpu, others_have, ..
    }) = error.downcast_ref()
    else {
        return error;
    };
    let step = match drives && !others_have {
        true => "load the host's cpufreq driver".to_owned(),
        false => format!("give --table {vcpu}=KHZ,..."),
    };
    anyhow::anyhow!("{error}; {step}, or {instead}")
}
