// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! QEMU's control socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::harness::wait::{settled, wait_for};

/// In which QEMU is there.
const STARTS: Duration = Duration::from_secs(10);
/// In which a job ends.
const JOB: Duration = Duration::from_secs(60);

/// A connection to it.
pub struct QmpClient(BufReader<UnixStream>);

/// Has QEMU listen at `path`.
pub fn listen(qemu: &mut Command, path: &str) {
    qemu.args(["-qmp", &format!("unix:{path},server=on,wait=off")]);
}

impl QmpClient {
    /// To the QEMU that listens at `path`, soon after its start. The QEMU that writes the guest's
    /// device tree listens there before it, and ends.
    pub fn connect(path: &str) -> Result<Self> {
        settled(STARTS, || Ok(Self::greet(path)), Result::is_ok)?.context(path.to_owned())
    }

    fn greet(path: &str) -> Result<Self> {
        let mut qmp = Self(BufReader::new(UnixStream::connect(path)?));
        qmp.line()?;
        qmp.ask("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Has it carry out a command; its answer.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments });
        // In one piece: QEMU carries it out before the line's end, and may end itself.
        let line = format!("{line}\n");
        let sent = self.0.get_mut().write_all(line.as_bytes());
        sent.with_context(|| line.trim().to_owned())?;
        loop {
            let mut answer = self.line()?;
            if !answer["error"].is_null() {
                bail!("{command}: {}", answer["error"]["desc"]);
            }
            // Not an event.
            if let Some(answer) = answer.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    /// The same of a command that starts a job, and waits for its end.
    pub fn job(&mut self, command: &str, mut arguments: Value) -> Result<()> {
        const ID: &str = "job";
        arguments["job-id"] = ID.into();
        self.ask(command, arguments)?;
        let job = wait_for(command, JOB, || {
            let job = self.ask("query-jobs", json!({}))?[0].clone();
            Ok((job["status"] == "concluded").then_some(job))
        })?;
        if !job["error"].is_null() {
            bail!("{command}: {}", job["error"]);
        }
        self.ask("job-dismiss", json!({ "id": ID })).map(drop)
    }

    /// Moves its guest to the QEMU that waits at `uri`.
    pub fn migrate(&mut self, uri: &str) -> Result<()> {
        self.ask("migrate", json!({ "uri": uri }))?;
        wait_for("migrate", JOB, || {
            let migration = self.ask("query-migrate", json!({}))?;
            match migration["status"].as_str() {
                Some("completed") => Ok(Some(())),
                Some("failed") => bail!("migrate: {}", migration["error-desc"]),
                _ => Ok(None),
            }
        })
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.0.read_line(&mut line).context("reading its line")?;
        if read == 0 {
            bail!("QEMU has ended");
        }
        serde_json::from_str(&line).context(line)
    }
}
