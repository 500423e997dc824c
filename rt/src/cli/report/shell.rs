// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shells that run scripts: this host's, and one that a command leads to.

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    os::{fd::AsFd, unix::process::CommandExt as _},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
    sys::{
        prctl::set_pdeathsig,
        signal::{SigSet, Signal},
    },
    unistd::getppid,
};

use super::running::ReportProcesses;

/// Bytes that a test prints at most: 100,000 bins of each of 300 threads.
const PRINTED_MAX: usize = 256 << 20;
/// How often something else is done while a script runs, ms.
const EVERY_MS: u16 = 1000;
/// Bytes of stderr that are kept.
const ERRORS_MAX: u64 = 64 << 10;

/// Where `sh` is run.
#[derive(Clone, Debug)]
pub(super) struct Shell {
    /// The command that leads there; `None` on this host.
    words: Option<Vec<String>>,
    running: ReportProcesses,
}

impl Shell {
    /// On this host.
    pub(super) fn here(running: &ReportProcesses) -> Self {
        Self {
            words: None,
            running: running.clone(),
        }
    }

    /// By a command, split at spaces, that runs `sh` elsewhere.
    pub(super) fn by(command: &str, running: &ReportProcesses) -> anyhow::Result<Self> {
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        ensure!(
            !words.is_empty(),
            "--guest-shell is empty; write the command that runs sh in the guest"
        );
        Ok(Self {
            words: Some(words),
            running: running.clone(),
        })
    }

    /// Runs a script to its end; its stdout.
    pub(super) fn run(&self, script: &str) -> anyhow::Result<String> {
        self.run_while(script, &mut || ())
    }

    /// The same; calls `meanwhile` each second until it ends.
    pub(super) fn run_while(
        &self,
        script: &str,
        meanwhile: &mut dyn FnMut(),
    ) -> anyhow::Result<String> {
        let output = self.output(script, None, meanwhile)?;
        match output.status.success() {
            true => Ok(output.printed),
            false => bail!(
                "measuring ended with {}: {}",
                output.status,
                output.last_error()
            ),
        }
    }

    /// Runs a script to its end, or, if the command doesn't end in `limit`, ends the command. Calls
    /// `meanwhile` each second.
    pub(super) fn output(
        &self,
        script: &str,
        limit: Option<Duration>,
        meanwhile: &mut dyn FnMut(),
    ) -> anyhow::Result<ScriptOutput> {
        let mut started = self.start(script)?;
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut input = started.child.stdin.take().context("no stdin")?;
        if self.words.is_some() {
            // A shell that ended early shows in its exit code.
            let _ = input.write_all(script.as_bytes());
        }
        drop(input);
        let errors = started.child.stderr.take().context("no stderr")?;
        let errors = thread::spawn(move || start_of(errors));
        let output = started.child.stdout.take().context("no stdout")?;
        let child = &mut started.child;
        let printed = read_while(output, EVERY_MS, &mut || {
            meanwhile();
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                // It is a child of this process, and not waited for yet.
                let _ = child.kill();
            }
        })?;
        let status = started.child.wait().context("waiting for sh")?;
        self.running.go_on()?;
        Ok(ScriptOutput {
            status,
            printed: String::from_utf8_lossy(&printed).into_owned(),
            errors: errors.join().unwrap_or_default(),
        })
    }

    /// Starts a script on this host that prints a line when it has begun, and ends with its stdin.
    pub(super) fn begin(&self, script: &str) -> anyhow::Result<Begun> {
        let mut started = self.start(script)?;
        let mut output = BufReader::new(started.child.stdout.take().context("no stdout")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let begun = Begun(started);
        if line.trim() != "started" {
            return begun.end().and_then(|()| bail!("it didn't start"));
        }
        Ok(begun)
    }

    fn start(&self, script: &str) -> anyhow::Result<Started> {
        self.running.go_on()?;
        let mut command = match &self.words {
            Some(words) => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                command
            }
            None => {
                let mut command = Command::new("sh");
                // A group, for what it starts to be ended with it. One that leads elsewhere may
                // have to ask the terminal for a password, which is for its foreground group.
                command.args(["-c", script]).process_group(0);
                command
            }
        };
        end_with_this_thread(&mut command);
        let command = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn();
        let child = child.with_context(|| format!("can't start {name}"))?;
        let pid = i32::try_from(child.id())?;
        let target = if self.words.is_none() { -pid } else { pid };
        self.running.add(target);
        Ok(Started {
            child,
            target,
            running: self.running.clone(),
        })
    }
}

/// Has a process that is started get SIGTERM when this thread ends, however that comes about. It
/// starts with no signal blocked.
#[expect(unsafe_code, reason = "pre_exec runs between fork and exec")]
fn end_with_this_thread(command: &mut Command) {
    let mine = std::process::id();
    let ask = move || {
        SigSet::empty().thread_set_mask()?;
        set_pdeathsig(Signal::SIGTERM)?;
        match u32::try_from(getppid().as_raw()) {
            Ok(parent) if parent == mine => Ok(()),
            // It has ended in between.
            _ => Err(io::ErrorKind::Interrupted.into()),
        }
    };
    // SAFETY: the three calls are async-signal-safe, and nothing of this allocates.
    unsafe { command.pre_exec(ask) };
}

/// All of what a process prints; calls `meanwhile` each `every_ms`, whatever it prints.
fn read_while(
    output: impl Read + AsFd,
    every_ms: u16,
    meanwhile: &mut dyn FnMut(),
) -> anyhow::Result<Vec<u8>> {
    let mut output = output;
    let mut printed = Vec::new();
    let mut piece = [0; 64 << 10];
    let every = Duration::from_millis(every_ms.into());
    let mut due = Instant::now() + every;
    loop {
        if Instant::now() >= due {
            meanwhile();
            due = Instant::now() + every;
        }
        let ready = {
            let mut files = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
            poll(&mut files, every_ms)
        };
        match ready {
            Ok(0) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => match output.read(&mut piece)? {
                0 => return Ok(printed),
                len => printed.extend_from_slice(&piece[..len]),
            },
        }
        ensure!(printed.len() <= PRINTED_MAX, "it prints without end");
    }
}

/// The start of its stderr; reads to the end.
fn start_of(errors: impl Read) -> String {
    let mut errors = errors;
    let mut text = Vec::new();
    let _ = errors.by_ref().take(ERRORS_MAX).read_to_end(&mut text);
    let _ = io::copy(&mut errors, &mut io::sink());
    String::from_utf8_lossy(&text).into_owned()
}

/// What came of a script.
#[derive(Debug)]
pub(super) struct ScriptOutput {
    pub(super) status: ExitStatus,
    /// Its stdout.
    pub(super) printed: String,
    errors: String,
}

impl ScriptOutput {
    /// The last line of its stderr.
    pub(super) fn last_error(&self) -> &str {
        let mut lines = self.errors.lines();
        let last = lines.rfind(|line| !line.trim().is_empty());
        last.unwrap_or("it printed no error")
    }
}

/// A shell that runs.
#[derive(Debug)]
struct Started {
    child: Child,
    target: i32,
    running: ReportProcesses,
}

impl Drop for Started {
    fn drop(&mut self) {
        // One that is still running finds its output closed and its stdin at the end.
        self.running.remove(self.target);
    }
}

/// A load that goes on.
#[derive(Debug)]
pub(super) struct Begun(Started);

impl Begun {
    /// Ends it, and waits for that.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        drop(self.0.child.stdin.take());
        let errors = self.0.child.stderr.take().map(start_of);
        let status = self.0.child.wait()?;
        ensure!(status.success(), "{}", errors.unwrap_or_default().trim());
        Ok(())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // Its script goes on at the end of its stdin, and ends the loads.
        drop(self.0.child.stdin.take());
    }
}

#[cfg(test)]
mod tests {
    //! Promise: something else is done while a script runs, also while it prints.
    use std::fs::File;

    use super::*;

    #[test]
    fn a_script_that_prints_nothing_is_not_waited_for_alone() {
        let (output, input) = nix::unistd::pipe().expect("a pipe");
        let (output, mut input) = (File::from(output), Some(File::from(input)));
        let mut calls = 0;
        let printed = read_while(output, 1, &mut || {
            calls += 1;
            // The script's end comes after these calls only.
            if let Some(mut input) = input.take_if(|_| calls == 3) {
                input.write_all(b"done").expect("room");
            }
        });
        assert_eq!(printed.expect("all of it"), b"done");
        assert!(calls >= 3, "{calls}");
    }

    #[test]
    fn a_script_that_always_prints_is_not_waited_for_alone() {
        let (output, input) = nix::unistd::pipe().expect("a pipe");
        File::from(input).write_all(b"done").expect("room");
        let mut calls = 0;
        let printed = read_while(File::from(output), 0, &mut || calls += 1);
        assert_eq!(printed.expect("all of it"), b"done");
        assert!(calls > 0);
    }
}
