// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service `vcpufreq scx`, for the guests of the variant that asks by it.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::piped::{Piped, end_with_this_thread};

/// How long to wait for it, in steps.
const LOOKS: u32 = 100;
const BETWEEN: Duration = Duration::from_millis(100);

/// The service, in force. Dropping it ends it.
#[derive(Debug)]
pub struct ScxProcess(Piped);

impl ScxProcess {
    /// Starts it.
    pub fn start() -> Result<Self> {
        let mut command = Command::new(program()?);
        end_with_this_thread(command.args(["scx", "start"]));
        let mut service = Self(Piped::start(&mut command)?);
        for _ in 0..LOOKS {
            if scx("status")?.status.success() {
                return Ok(service);
            }
            if let Err(RecvTimeoutError::Disconnected) = service.0.line(BETWEEN) {
                bail!("{}", service.0.last_words().trim());
            }
        }
        bail!("vcpufreq scx start has no scheduler in force after 10 s")
    }
}

impl Drop for ScxProcess {
    fn drop(&mut self) {
        // Else it is killed, and the kernel ends its scheduler.
        let _ = scx("stop");
    }
}

fn program() -> Result<PathBuf> {
    std::env::current_exe().context("finding this program")
}

fn scx(word: &str) -> Result<Output> {
    let output = Command::new(program()?).args(["scx", word]).output();
    output.context("running vcpufreq scx")
}
