// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process that is asked by lines on its standard input, and its threads.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::getppid;
use vcpufreq_host::memory_file;

/// The process. Dropping it kills it.
#[derive(Debug)]
pub struct Piped {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// Its stderr: a file, which has all that it wrote as soon as it has ended. A pipe would have to
    /// be read to its end, and its children may hold that open as long as they like.
    errors: File,
}

impl Piped {
    /// Starts it.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let errors = memory_file(c"stderr").context("no file for stderr")?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone()?)
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
        // It has written all of them then.
        let _ = self.kill();
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

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What it wrote to stderr by now.
    pub fn errors(&self) -> String {
        let len = self.errors.metadata().map_or(0, |file| file.len());
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        // At a place of its own: the process writes where the file's is.
        let read = self.errors.read_exact_at(&mut bytes, 0);
        read.map_or_else(
            |error| format!("its stderr can't be read: {error}"),
            |()| String::from_utf8_lossy(&bytes).trim().to_owned(),
        )
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
    use nix::sys::signal::{Signal, kill};
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
        let script = "(sleep 3600; echo late >&2) & echo why >&2; echo $!; wait";
        let mut shell = Piped::start(Command::new("sh").args(["-c", script])).unwrap();
        let child = shell.line(Duration::from_secs(600)).unwrap();
        let words = shell.last_words();
        kill(Pid::from_raw(child.parse().unwrap()), Signal::SIGTERM).unwrap();
        assert_eq!(words, "why");
    }
}
