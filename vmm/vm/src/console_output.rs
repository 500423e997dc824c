// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where the guest's console output goes: the program's standard output, a file up to a size, or
//! nowhere. The same for all boots of a guest: what it wrote before a reset counts.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed},
};

use anyhow::Context;
use nix::{errno::Errno, unistd};

/// What is at the other end of the console.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ConsoleEnd {
    /// Standard input and output: the terminal, or pipes.
    #[default]
    Stdio,
    /// Nothing: output is dropped, and nothing is read.
    Nothing,
    /// A file takes the output; nothing is read.
    File {
        /// Which one; it is made anew.
        path: PathBuf,
        /// The most that is written to it, in bytes.
        max: u64,
    },
}

/// Receives a warning for the user.
pub type WarningHandler = Box<dyn Fn(&str) + Send + Sync>;

/// The output of one guest.
pub struct ConsoleOutput {
    to: Option<File>,
    /// Bytes that there is still room for.
    left: AtomicU64,
    dropped: AtomicU64,
    /// The warning when the first byte is dropped.
    full: String,
    stop: Arc<AtomicBool>,
    warn: WarningHandler,
}

impl ConsoleOutput {
    /// The output to `end`. While `stop` is set, a write that a signal interrupts is given up; it
    /// is repeated otherwise.
    ///
    /// # Errors
    /// When the file can't be made, or the process has no more open files.
    pub fn new(
        end: &ConsoleEnd,
        stop: Arc<AtomicBool>,
        warn: WarningHandler,
    ) -> anyhow::Result<Self> {
        let (to, max, full) = match end {
            ConsoleEnd::Stdio => {
                let stdout = io::stdout().as_fd().try_clone_to_owned();
                let stdout = stdout.context("can't open the console's output")?;
                (Some(File::from(stdout)), u64::MAX, String::new())
            }
            ConsoleEnd::Nothing => (None, u64::MAX, String::new()),
            ConsoleEnd::File { path, max } => {
                let file = File::create(path);
                let path = path.display();
                let file = file.with_context(|| {
                    format!("can't write the guest's console to {path}; give another --console")
                })?;
                let full = format!(
                    "the guest's console has filled {path} with its {max} bytes; what follows is \
                     dropped, give more with --console"
                );
                (Some(file), *max, full)
            }
        };
        Ok(Self {
            to,
            left: AtomicU64::new(max),
            dropped: AtomicU64::new(0),
            full,
            stop,
            warn,
        })
    }

    /// Bytes that the file had no room for.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    fn drop_all(&self, bytes: &[u8]) -> usize {
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.dropped.fetch_add(len, Relaxed) == 0 {
            (self.warn)(&self.full);
        }
        bytes.len()
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let Some(file) = &self.to else {
            return Ok(bytes.len());
        };
        let left = usize::try_from(self.left.load(Relaxed)).unwrap_or(usize::MAX);
        if left == 0 {
            return Ok(self.drop_all(bytes));
        }
        let room = bytes.len().min(left);
        let written = unistd::write(file, &bytes[..room]).map_err(|error| match error {
            // Not `Interrupted`, which `write_all` would repeat.
            Errno::EINTR if self.stop.load(Acquire) => io::Error::other(error),
            _ => error.into(),
        })?;
        if self.left.load(Relaxed) != u64::MAX {
            // One vCPU at a time is at the port.
            let written = u64::try_from(written).unwrap_or(u64::MAX);
            self.left.fetch_sub(written, Relaxed);
        }
        Ok(written)
    }
}

/// The end of it that one boot's port writes to.
pub struct Writer(pub Arc<ConsoleOutput>);

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! A file takes as much as it may, over resets too; the rest is counted, and reported once.
    //! (That a signal loses nothing: `tests/terminal.rs`.)

    use std::sync::Mutex;

    use super::*;

    type Said = Arc<Mutex<Vec<String>>>;

    fn output(end: &ConsoleEnd) -> (Arc<ConsoleOutput>, Said) {
        let said = Said::default();
        let heard = said.clone();
        let warn: WarningHandler =
            Box::new(move |text| heard.lock().unwrap().push(text.to_owned()));
        let output = ConsoleOutput::new(end, Arc::default(), warn).unwrap();
        (Arc::new(output), said)
    }

    #[test]
    fn a_file_takes_its_maximum_and_the_rest_is_counted_and_said_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        let end = ConsoleEnd::File {
            path: path.clone(),
            max: 5,
        };
        let (output, said) = output(&end);
        Writer(output.clone()).write_all(b"ab").unwrap();
        assert!(said.lock().unwrap().is_empty());
        // After a reset.
        let mut port = Writer(output.clone());
        for _ in 0..3 {
            port.write_all(b"cdef").unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"abcde");
        assert_eq!(output.dropped(), 9);
        let said = said.lock().unwrap();
        let [line] = &said[..] else {
            panic!("{said:?}")
        };
        let parts = [path.to_str().unwrap(), "5 bytes", "--console"];
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        assert_eq!(line.lines().count(), 1);
    }

    #[test]
    fn nothing_takes_everything() {
        let (output, said) = output(&ConsoleEnd::Nothing);
        Writer(output.clone()).write_all(b"abc").unwrap();
        assert_eq!(output.dropped(), 0);
        assert!(said.lock().unwrap().is_empty());
    }
}
