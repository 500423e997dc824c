// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process that is asked by lines on its standard input, and its threads.

use std::fs;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::getppid;

/// The process. Dropping it kills it.
#[derive(Debug)]
pub struct Piped {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Receiver<Vec<u8>>,
}

/// How long more is waited for on stderr once the process has ended: its children may hold that
/// open as long as they like.
const MORE_ERRORS: Duration = Duration::from_secs(1);

impl Piped {
    /// Starts it.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("no output")?;
        let errors = child.stderr.take().context("no stderr")?;
        let errors = pieces(errors);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            input,
            lines,
            errors,
        })
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line.
    ///
    /// # Errors
    /// When it doesn't read any more.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("the line is closed")?;
        writeln!(input, "{line}")
            .and_then(|()| input.flush())
            .with_context(|| format!("writing '{line}'"))
    }

    /// Its next line.
    ///
    /// # Errors
    /// When none comes in this time, or none can come any more.
    pub fn line(&self, limit: Duration) -> Result<String, RecvTimeoutError> {
        self.lines.recv_timeout(limit)
    }

    /// Waits for its end, which is at most `limit` after its last line; what it wrote to stderr.
    ///
    /// # Errors
    /// When it doesn't end.
    pub fn finish(&mut self, limit: Duration) -> Result<(ExitStatus, String)> {
        loop {
            match self.lines.recv_timeout(limit) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => bail!("it did not end: {}", self.last_words()),
            }
        }
        let status = self.child.wait()?;
        Ok((status, self.errors()))
    }

    /// Kills it; what it wrote to stderr.
    pub fn last_words(&mut self) -> String {
        // So that they can be read to the end.
        let _ = self.child.kill();
        self.errors()
    }

    /// SIGKILL, and waits for the process to be gone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    fn errors(&self) -> String {
        let pieces = std::iter::from_fn(|| self.errors.recv_timeout(MORE_ERRORS).ok());
        let bytes = pieces.collect::<Vec<_>>().concat();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }
}

/// Has a process that is started get SIGTERM when this thread ends, however that comes about: a VMM
/// tidies up then. It starts with no signal blocked, and in a process group of its own: a terminal's
/// Ctrl-C reaches this program alone. A child that it ended first would look like a failure.
#[expect(unsafe_code, reason = "pre_exec runs between fork and exec")]
pub fn end_with_this_thread(command: &mut Command) {
    let own = std::process::id();
    let ask = move || {
        SigSet::empty().thread_set_mask()?;
        set_pdeathsig(Signal::SIGTERM)?;
        match u32::try_from(getppid().as_raw()) {
            Ok(parent) if parent == own => Ok(()),
            // It has ended in between.
            _ => Err(std::io::ErrorKind::Interrupted.into()),
        }
    };
    command.process_group(0);
    // SAFETY: the three calls are async-signal-safe, and nothing of this allocates.
    unsafe { command.pre_exec(ask) };
}

/// What is read, as it comes.
fn pieces(mut from: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, pieces) = channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        // What could be read until an error is what there is to show.
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if sender.send(bytes[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    pieces
}

impl Drop for Piped {
    fn drop(&mut self) {
        // It fails when the process has ended already, which is as well.
        let _ = self.kill();
    }
}

/// The threads of a process, with their names.
///
/// # Errors
/// When there is no such process.
pub fn threads(pid: u32) -> Result<Vec<(i32, String)>> {
    let tasks = format!("/proc/{pid}/task");
    let mut found = Vec::new();
    for entry in fs::read_dir(&tasks)
        .with_context(|| tasks.clone())?
        .flatten()
    {
        let tid = entry.file_name().to_string_lossy().parse()?;
        // A thread that ends meanwhile has no name any more.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        found.push((tid, name.trim().to_owned()));
    }
    found.sort_unstable();
    Ok(found)
}

/// The child of a process whose name begins so.
#[must_use]
pub fn child(pid: u32, name: &str) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let mut children = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    children.find(|pid: &u32| {
        let own = fs::read_to_string(format!("/proc/{pid}/comm"));
        own.is_ok_and(|own| own.starts_with(name))
    })
}

#[cfg(test)]
mod tests {
    //! Promises: the words of a process that failed are there while its children live on; what ends
    //! with a thread is not in its process group.
    use nix::unistd::{Pid, getpgid};

    use super::*;

    #[test]
    fn a_terminals_signal_does_not_reach_what_ends_with_a_thread() {
        let mut command = Command::new("cat");
        end_with_this_thread(&mut command);
        let cat = Piped::start(&mut command).unwrap();
        let pid = Pid::from_raw(i32::try_from(cat.pid()).unwrap());
        assert_eq!(getpgid(Some(pid)), Ok(pid));
    }

    #[test]
    fn last_words_do_not_wait_for_children() {
        let script = "(sleep 60; echo late >&2) & echo why >&2; echo $!; wait";
        let mut shell = Piped::start(Command::new("sh").args(["-c", script])).unwrap();
        let child = shell.line(Duration::from_secs(60)).unwrap();
        let words = shell.last_words();
        Command::new("kill").arg(child).status().unwrap();
        assert_eq!(words, "why");
    }
}
