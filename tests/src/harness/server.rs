// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq serve` beside a guest of another VMM.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStderr, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::vmm::{Setup, serve};

/// In its line once a VMM may come, or is there already.
const WAITS: [&str; 2] = ["waits at", "takes process"];

/// In its line about a VM whose vCPUs can't have cgroups.
pub const NO_GROUPS: &str = "no cgroup to be had";

/// A server. Dropping it kills it.
#[derive(Debug)]
pub struct ServeProcess {
    child: Child,
    stderr: BufReader<ChildStderr>,
    /// What it has printed on stderr.
    said: String,
}

impl ServeProcess {
    /// Starts it; a VMM may connect when this returns, unless one is taken over.
    pub fn start(setup: &Setup) -> Result<Self> {
        Self::start_by(serve(setup), &WAITS)
    }

    /// One by this command, once it has printed one of these lines.
    pub fn start_by(mut command: Command, lines: &[&str]) -> Result<Self> {
        let mut child = command.stderr(Stdio::piped()).spawn()?;
        let stderr = child.stderr.take().context("no stderr")?;
        let mut server = Self {
            child,
            stderr: BufReader::new(stderr),
            said: String::new(),
        };
        while !lines.iter().any(|line| server.said.contains(line)) {
            if server.stderr.read_line(&mut server.said)? == 0 {
                bail!("the server has ended: {}", server.said.trim());
            }
        }
        Ok(server)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it, as a service manager does; its stderr.
    pub fn stop(mut self) -> Result<String> {
        let pid = Pid::from_raw(self.child.id().try_into()?);
        kill(pid, Signal::SIGTERM)?;
        self.stderr.read_to_string(&mut self.said)?;
        let status = self.child.wait()?;
        let said = std::mem::take(&mut self.said);
        ensure!(status.success(), "the server ended with {status}: {said}");
        Ok(said)
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
