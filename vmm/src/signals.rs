// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting for a file, or for a signal that asks the program to end.

use std::{
    cell::Cell,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

/// Signals that ask the program to end, as a file. They end nothing while it lives.
pub struct EndSignals {
    file: SignalFd,
    /// One that has come while the program waited for something else.
    came: Cell<Option<Signal>>,
}

/// What has happened.
pub enum Ready {
    /// The file of this index is readable, or its other end has gone.
    File(usize),
    /// A signal came.
    Signal(Signal),
    /// The time is over.
    Nothing,
}

impl EndSignals {
    /// Blocks them for this thread and those that it makes.
    pub fn take() -> nix::Result<Self> {
        Self::take_these(&[Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM])
    }

    /// The same, the others that a terminal or a user sends, and the end of a child.
    pub fn take_with_children() -> nix::Result<Self> {
        let signals = [
            Signal::SIGHUP,
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGQUIT,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
            Signal::SIGCHLD,
        ];
        Self::take_these(&signals)
    }

    /// Whether `file` is readable within so long. A signal but SIGCHLD ends that wait, and is left for
    /// [`wait`].
    pub fn is_ready(&self, file: BorrowedFd<'_>, within: Duration) -> bool {
        let until = Instant::now() + within;
        while self.came.get().is_none() {
            let left = until.saturating_duration_since(Instant::now());
            match wait(self, &[file], Some(left)) {
                Ok(Ready::File(_)) => return true,
                Ok(Ready::Signal(Signal::SIGCHLD)) => {}
                Ok(Ready::Signal(signal)) => self.came.set(Some(signal)),
                Ok(Ready::Nothing) | Err(_) => return false,
            }
        }
        false
    }

    fn take_these(signals: &[Signal]) -> nix::Result<Self> {
        let mut set = SigSet::empty();
        for signal in signals {
            set.add(*signal);
        }
        set.thread_block()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self {
            file: SignalFd::with_flags(&set, flags)?,
            came: Cell::new(None),
        })
    }
}

/// Waits for one of `files` or a signal, at most so long; a signal comes first, then the first file.
pub fn wait(
    signals: &EndSignals,
    files: &[BorrowedFd<'_>],
    within: Option<Duration>,
) -> nix::Result<Ready> {
    if let Some(signal) = signals.came.take() {
        return Ok(Ready::Signal(signal));
    }
    let longest = PollTimeout::MAX;
    let timeout = within.map_or(PollTimeout::NONE, |within| {
        PollTimeout::try_from(within).unwrap_or(longest)
    });
    let all = [signals.file.as_fd()]
        .into_iter()
        .chain(files.iter().copied());
    let mut polled: Vec<_> = all
        .map(|file| PollFd::new(file, PollFlags::POLLIN))
        .collect();
    loop {
        match poll(&mut polled, timeout) {
            Err(Errno::EINTR) => continue,
            polled => polled?,
        };
        let ready = polled.iter().position(|file| file.any() == Some(true));
        match ready {
            Some(0) => {
                let number = signals.file.read_signal()?.map(|info| info.ssi_signo);
                let signal = number.and_then(|number| i32::try_from(number).ok());
                if let Some(Ok(signal)) = signal.map(Signal::try_from) {
                    return Ok(Ready::Signal(signal));
                }
            }
            Some(index) => return Ok(Ready::File(index - 1)),
            None => return Ok(Ready::Nothing),
        }
    }
}
