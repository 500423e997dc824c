// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The line to a load program: a pipe to the host's, the console to a guest's.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Any answer, and the boot of a guest: what takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// A load program that answers. Dropping it kills it.
#[derive(Debug)]
pub struct LoadClient {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl LoadClient {
    /// Starts it, and waits until it can be talked to.
    pub fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("no output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut client = Self {
            child,
            input,
            lines,
        };
        client.answer().context("waiting for the load program")?;
        Ok(client)
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks for something; the answer.
    pub fn ask(&mut self, line: &str) -> Result<String> {
        self.tell(line)?;
        self.answer().with_context(|| format!("'{line}'"))
    }

    /// Sends a line.
    fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("the line is closed")?;
        writeln!(input, "{line}")
            .and_then(|()| input.flush())
            .context("writing to the load program")
    }

    /// The next line that is an answer; others are a kernel's messages.
    fn answer(&mut self) -> Result<String> {
        let mut heard = String::new();
        loop {
            let line = match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => line,
                Err(error) => bail!("{}", self.broken(error, &heard)),
            };
            let line = line.trim_end();
            let Some(at) = line
                .find("@ok")
                .or(line.find("@ready"))
                .or(line.find("@error"))
            else {
                heard = line.to_owned();
                continue;
            };
            return match line[at..].split_once(' ') {
                Some(("@error", why)) => bail!("{why}"),
                Some((_, answer)) => Ok(answer.to_owned()),
                None => Ok(String::new()),
            };
        }
    }

    /// Why there is no answer, with the last words of both streams.
    fn broken(&mut self, error: RecvTimeoutError, heard: &str) -> String {
        // So that its last words can be read to the end.
        let _ = self.child.kill();
        let mut words = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut words);
        }
        let words = words.trim().replace('\n', "; ");
        format!("no answer ({error}); it said: {words} {heard}")
    }

    /// Asks it to end, and waits; whether it ended well.
    pub fn end(mut self) -> Result<()> {
        self.tell("quit")?;
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(error) => bail!("{}", self.broken(error, "")),
            }
        }
        let status = self.child.wait()?;
        if !status.success() {
            bail!(
                "it ended with {status}: {}",
                self.broken(RecvTimeoutError::Disconnected, "")
            );
        }
        Ok(())
    }
}

impl Drop for LoadClient {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
