// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shells that run scripts: this host's, and one that a command leads to.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};

/// Where `sh` is run.
#[derive(Clone, Debug)]
pub(super) struct Shell(Option<Vec<String>>);

impl Shell {
    /// On this host.
    pub(super) fn here() -> Self {
        Self(None)
    }

    /// By a command, split at spaces, that runs `sh` elsewhere.
    pub(super) fn by(command: &str) -> anyhow::Result<Self> {
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        ensure!(
            !words.is_empty(),
            "--guest-shell is empty; write the command that runs sh in the guest"
        );
        Ok(Self(Some(words)))
    }

    /// Runs a script to its end; its stdout.
    pub(super) fn run(&self, script: &str) -> anyhow::Result<String> {
        let mut child = self.start(script)?;
        let mut input = child.stdin.take().context("no stdin")?;
        if self.0.is_some() {
            // A shell that ended early is told by its exit code.
            let _ = input.write_all(script.as_bytes());
        }
        drop(input);
        let output = child.wait_with_output().context("waiting for sh")?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().rfind(|line| !line.trim().is_empty());
        bail!(
            "measuring ended with {}: {}",
            output.status,
            said.unwrap_or("nothing was said")
        )
    }

    /// Starts a script of this host that says when it has begun, and ends with its stdin.
    pub(super) fn begin(&self, script: &str) -> anyhow::Result<Begun> {
        let mut child = self.start(script)?;
        let mut output = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let begun = Begun(child);
        if line.trim() != "started" {
            return begun.end().and_then(|()| bail!("it didn't start"));
        }
        Ok(begun)
    }

    fn start(&self, script: &str) -> anyhow::Result<Child> {
        let mut command = match &self.0 {
            Some(words) => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                command
            }
            None => {
                let mut command = Command::new("sh");
                command.args(["-c", script]);
                command
            }
        };
        let command = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let name = command.get_program().to_string_lossy().into_owned();
        command
            .spawn()
            .with_context(|| format!("can't start {name}"))
    }
}

/// A load that goes on.
#[derive(Debug)]
pub(super) struct Begun(Child);

impl Begun {
    /// Ends it, and waits for that.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        drop(self.0.stdin.take());
        let status = self.0.wait()?;
        let mut said = String::new();
        if let Some(mut errors) = self.0.stderr.take() {
            errors.read_to_string(&mut said)?;
        }
        ensure!(status.success(), "{}", said.trim());
        Ok(())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // Its script goes on at the end of its stdin, and ends the loads.
        drop(self.0.stdin.take());
    }
}
