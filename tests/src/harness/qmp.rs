// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! QEMU's control socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const STEP: Duration = Duration::from_millis(20);
/// For QEMU to be there.
const TRIES: u32 = 500;
/// For a job: a look at it is work of QEMU's main thread.
const JOB_STEP: Duration = Duration::from_millis(100);
const JOB_TRIES: u32 = 600;

/// A connection to it.
pub struct Qmp(BufReader<UnixStream>);

/// Has QEMU listen at `path`.
pub fn listen(qemu: &mut Command, path: &str) {
    qemu.args(["-qmp", &format!("unix:{path},server=on,wait=off")]);
}

impl Qmp {
    /// To the QEMU that listens at `path`, soon after its start. The QEMU that writes the guest's
    /// device tree listens there before it, and ends.
    pub fn connect(path: &str) -> Result<Self> {
        let mut tries = 0;
        loop {
            match Self::greet(path) {
                Err(_) if tries < TRIES => sleep(STEP),
                qmp => return qmp.context(path.to_owned()),
            }
            tries += 1;
        }
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
        for _ in 0..JOB_TRIES {
            let jobs = self.ask("query-jobs", json!({}))?;
            let job = &jobs[0];
            if job["status"] == "concluded" {
                if !job["error"].is_null() {
                    bail!("{command}: {}", job["error"]);
                }
                return self.ask("job-dismiss", json!({ "id": ID })).map(drop);
            }
            sleep(JOB_STEP);
        }
        bail!("{command} does not end")
    }

    /// Moves its guest to the QEMU that waits at `uri`.
    pub fn migrate(&mut self, uri: &str) -> Result<()> {
        self.ask("migrate", json!({ "uri": uri }))?;
        for _ in 0..JOB_TRIES {
            let migration = self.ask("query-migrate", json!({}))?;
            match migration["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => bail!("migrate: {}", migration["error-desc"]),
                _ => sleep(JOB_STEP),
            }
        }
        bail!("migrate does not end")
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
