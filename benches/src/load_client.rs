// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The line to a load program: a pipe to the host's, the console to a guest's.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vcpufreq_load::answer;

use crate::piped::{Piped, child, end_with_this_thread};

/// Any answer, and the boot of a guest: what takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// How the name of a QEMU behind `vcpufreq qemu` begins.
pub const QEMU: &str = "qemu-system";

/// A load program that answers. Dropping it kills it, and a QEMU behind it.
#[derive(Debug)]
pub struct LoadClient(Piped);

impl LoadClient {
    /// This program under the load program's name.
    pub fn on_host() -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new(program);
        command.arg0(vcpufreq_load::NAME);
        Self::start(command)
    }

    /// Starts it, and waits until it can be talked to. It ends with the calling thread.
    pub fn start(mut command: Command) -> Result<Self> {
        end_with_this_thread(&mut command);
        let mut client = Self(Piped::start(&mut command)?);
        client.answer().context("waiting for the load program")?;
        Ok(client)
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Asks for something; the answer.
    pub fn ask(&mut self, line: &str) -> Result<String> {
        self.0.tell(line)?;
        self.answer().with_context(|| format!("'{line}'"))
    }

    /// The next line that is an answer; others are a kernel's messages.
    fn answer(&mut self) -> Result<String> {
        let mut heard = String::new();
        loop {
            let line = match self.0.line(PATIENCE) {
                Ok(line) => line,
                Err(error) => bail!("{}", self.broken(error, &heard)),
            };
            match answer::read(&line) {
                Some(outcome) => return outcome,
                None => heard = line.trim_end().to_owned(),
            }
        }
    }

    /// Why there is no answer, with the last words of both streams.
    fn broken(&mut self, error: RecvTimeoutError, heard: &str) -> String {
        self.kill_qemu();
        let words = self.0.last_words().replace('\n', "; ");
        format!("no answer ({error}); its output: {words} {heard}")
    }

    /// Asks it to end, and waits; whether it ended well.
    pub fn end(mut self) -> Result<()> {
        self.0.tell("quit")?;
        let (status, said) = self.0.finish(PATIENCE)?;
        ensure!(status.success(), "it ended with {status}: {said}");
        Ok(())
    }

    /// QEMU outlives a prefix that is killed.
    fn kill_qemu(&mut self) {
        let runs = self.0.runs();
        let qemu = child(self.pid(), QEMU).filter(|_| runs);
        if let Some(Ok(pid)) = qemu.map(i32::try_from) {
            // It may have ended.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

impl Drop for LoadClient {
    fn drop(&mut self) {
        self.kill_qemu();
    }
}
