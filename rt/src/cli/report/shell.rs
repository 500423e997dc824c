// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shells that run scripts: this host's, and one that a command leads to.

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    ops::ControlFlow,
    os::{fd::AsFd, unix::process::CommandExt as _},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
};

use super::running::ReportProcesses;
use crate::cli::{child::end_with_this_thread, output::plain};

/// Bytes that a test prints at most: 100,000 bins of each of 300 threads.
const PRINTED_MAX: usize = 256 << 20;
/// How often something else is done while a script runs, ms.
const EVERY_MS: u16 = 1000;
/// How often to look whether a script has ended that has closed its stdout, ms: another process may
/// keep its stderr.
const ENDED_MS: u16 = 10;
/// Bytes of stderr that are kept.
const ERRORS_MAX: usize = 64 << 10;

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

    /// Runs a script to its end, or, if the command doesn't end in `limit`, ends the command; what it
    /// started may go on, and is not waited for. Calls `meanwhile` each second.
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
        let child = &mut started.child;
        let printed = read_while(child, EVERY_MS, &mut || {
            meanwhile();
            match deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })?;
        if printed.is_partial {
            // It is a child of this process, and not waited for yet.
            let _ = child.kill();
        }
        let status = child.wait().context("waiting for sh")?;
        self.running.go_on()?;
        let text = |bytes: &[u8]| plain(&String::from_utf8_lossy(bytes));
        Ok(ScriptOutput {
            status,
            printed: text(&printed.output),
            errors: text(&printed.errors),
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

/// What a process has printed.
#[derive(Debug, Default)]
struct PrintedBytes {
    output: Vec<u8>,
    /// The start of its stderr.
    errors: Vec<u8>,
    /// It wasn't waited for any longer.
    is_partial: bool,
}

/// All of what a child prints; calls `meanwhile` each `every_ms`, whatever it prints, until that says
/// to stop.
fn read_while(
    child: &mut Child,
    every_ms: u16,
    meanwhile: &mut dyn FnMut() -> ControlFlow<()>,
) -> anyhow::Result<PrintedBytes> {
    let mut output = child.stdout.take();
    let mut errors = child.stderr.take();
    let mut printed = PrintedBytes::default();
    let every = Duration::from_millis(every_ms.into());
    let mut due = Instant::now() + every;
    while output.is_some() || errors.is_some() {
        if Instant::now() >= due {
            if meanwhile().is_break() {
                printed.is_partial = true;
                break;
            }
            due = Instant::now() + every;
        }
        let has_ended = output.is_none() && child.try_wait()?.is_some();
        let wait_ms = match output.is_some() {
            true => every_ms,
            false if has_ended => 0,
            false => every_ms.min(ENDED_MS),
        };
        let [of_output, of_errors] = wait_for(output.as_ref(), errors.as_ref(), wait_ms)?;
        if of_output {
            add(&mut output, &mut printed.output, PRINTED_MAX)?;
        }
        if of_errors {
            add(&mut errors, &mut printed.errors, ERRORS_MAX)?;
        }
        ensure!(printed.output.len() < PRINTED_MAX, "it prints without end");
        // What comes now is another process's.
        if has_ended && (!of_errors || printed.errors.len() >= ERRORS_MAX) {
            break;
        }
    }
    Ok(printed)
}

/// Waits until one of them has something to read, or is at its end; which.
fn wait_for(
    output: Option<&impl AsFd>,
    errors: Option<&impl AsFd>,
    wait_ms: u16,
) -> anyhow::Result<[bool; 2]> {
    let poll_fd = |file| PollFd::new(file, PollFlags::POLLIN);
    let output = output.map(|file| poll_fd(file.as_fd()));
    let errors = errors.map(|file| poll_fd(file.as_fd()));
    let is_first = output.is_some();
    let mut files: Vec<PollFd> = output.into_iter().chain(errors).collect();
    match poll(&mut files, wait_ms) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    let mut ready = files.iter().map(|file| file.any().unwrap_or_default());
    let of_output = is_first && ready.next().unwrap_or_default();
    Ok([of_output, ready.next().unwrap_or_default()])
}

/// Adds what is there to read, up to `most` bytes; `None` at the end.
fn add(file: &mut Option<impl Read>, to: &mut Vec<u8>, most: usize) -> io::Result<()> {
    let mut piece = [0; 64 << 10];
    let Some(reader) = file else { return Ok(()) };
    match reader.read(&mut piece)? {
        0 => *file = None,
        len => {
            let len = len.min(most.saturating_sub(to.len()));
            to.extend_from_slice(&piece[..len]);
        }
    }
    Ok(())
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
        let go_on = &mut || ControlFlow::Continue(());
        let printed = read_while(&mut self.0.child, EVERY_MS, go_on)?;
        let status = self.0.child.wait()?;
        let errors = plain(&String::from_utf8_lossy(&printed.errors));
        ensure!(status.success(), "{}", errors.trim());
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
    //! Promises: something else is done while a script runs, also while it prints; a command that
    //! doesn't end in its time is ended, and what it has started isn't waited for; nothing that it
    //! prints acts on a terminal.
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };

    use super::*;

    fn sh(script: &str) -> Child {
        let mut command = Command::new("sh");
        let command = command.args(["-c", script]).stdin(Stdio::piped());
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("sh")
    }

    /// Its output, when it ends after so many calls of what is done meanwhile.
    fn printed(script: &str, every_ms: u16, ends_at: u32) -> (PrintedBytes, u32) {
        let mut child = sh(script);
        let mut input = child.stdin.take();
        let mut calls = 0;
        let printed = read_while(&mut child, every_ms, &mut || {
            calls += 1;
            // The script's end comes after these calls only.
            drop(input.take_if(|_| calls == ends_at));
            ControlFlow::Continue(())
        });
        child.wait().expect("its end");
        (printed.expect("all of it"), calls)
    }

    #[test]
    fn a_script_that_prints_nothing_is_not_waited_for_alone() {
        let (printed, calls) = printed("cat; printf done; printf why >&2", 1, 3);
        assert_eq!(
            (&*printed.output, &*printed.errors),
            (&b"done"[..], &b"why"[..])
        );
        assert!(calls >= 3, "{calls}");
    }

    #[test]
    fn a_script_that_always_prints_is_not_waited_for_alone() {
        let always = "while :; do echo; done & cat > /dev/null; kill $!; wait";
        let (printed, calls) = printed(always, 0, 3);
        assert!(!printed.is_partial && calls >= 3, "{calls}");
    }

    #[test]
    fn who_keeps_the_pipes_of_a_command_is_not_waited_for() {
        let dir = tempfile::tempdir().expect("a folder");
        let pid = dir.path().join("pid");
        let wrapper = dir.path().join("wrapper");
        let command = format!("sh {}", wrapper.display());
        let left = || std::fs::read_to_string(&pid).unwrap_or_default();
        // A process has both pipes at the limit; or stderr alone, after the command's end.
        for (output, after, limit) in [
            ("", "wait", Some(Duration::ZERO)),
            ("> /dev/null", "", None),
        ] {
            let _ = std::fs::remove_file(&pid);
            let pid = pid.display();
            let script = format!("setsid sleep 1000.75 {output} &\necho $! > {pid}\n{after}\n");
            std::fs::write(&wrapper, script).expect("a file");
            let shell = Shell::by(&command, &ReportProcesses::default()).expect("a command");
            let begun = &mut || {
                while !left().ends_with('\n') {
                    std::thread::yield_now();
                }
            };
            let ended = shell.output("", limit, begun).expect("its output");
            assert_eq!(ended.status.success(), limit.is_none(), "{after}");
            let left = left().trim().parse().expect("a process's number");
            kill(Pid::from_raw(left), Signal::SIGTERM).expect("it had ended");
        }
    }

    #[test]
    fn nothing_that_it_prints_acts_on_a_terminal() {
        let shell = Shell::by("sh", &ReportProcesses::default()).expect("a command");
        let script = "printf '5\\033[2J\\n'; printf 'why\\r\\033[2J' >&2\n";
        let output = shell.output(script, None, &mut || ()).expect("its output");
        assert_eq!(
            (&*output.printed, output.last_error()),
            ("5?[2J\n", "why??[2J")
        );
    }
}
