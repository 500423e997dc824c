// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The signals that `rt exec` gets: they reach its command, and end it only when it has restored.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        signalfd::{SfdFlags, SignalFd},
    },
};

use crate::cli::child::{heed_children, heeded};

/// Signals that a command gets when a process sends them to exec.
const PASSED_ON: [Signal; 6] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];
/// The signals of exec, which are blocked from its start on: none ends it before it has restored.
pub(super) struct CommandSignals(SignalFd);

/// A signal that has come.
pub(super) struct Arrived {
    pub(super) signal: Signal,
    /// A process has sent it. The kernel sends a terminal's to the command, too.
    pub(super) is_of_process: bool,
}

impl CommandSignals {
    /// Those that are ignored stay so, and the command ignores them too.
    pub(super) fn take() -> anyhow::Result<Self> {
        const CONTEXT: &str = "can't take over the signals that end a program";
        heed_children().context(CONTEXT)?;
        let mut signals = heeded(&PASSED_ON).context(CONTEXT)?;
        signals.add(Signal::SIGCHLD);
        signals.thread_block().context(CONTEXT)?;
        let file = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context(CONTEXT)?;
        Ok(Self(file))
    }

    /// The first one that has come, but for a child's end.
    pub(super) fn pending(&self) -> anyhow::Result<Option<Signal>> {
        let mut files = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        while poll(&mut files, PollTimeout::ZERO)? > 0 {
            let signal = self.next()?.signal;
            // Of the guardian: the wait for the command replaces one that was killed.
            if signal != Signal::SIGCHLD {
                return Ok(Some(signal));
            }
        }
        Ok(None)
    }

    /// Whether one has come that asks exec to end. Others that have come are lost.
    pub(super) fn has_been_told_to_end(&self) -> anyhow::Result<bool> {
        while let Some(signal) = self.pending()? {
            if !matches!(signal, Signal::SIGUSR1 | Signal::SIGUSR2) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next one.
    pub(super) fn next(&self) -> anyhow::Result<Arrived> {
        loop {
            match self.0.read_signal() {
                Ok(Some(info)) => {
                    let number = i32::try_from(info.ssi_signo)?;
                    return Ok(Arrived {
                        signal: Signal::try_from(number)?,
                        // sigaction(2), si_code: the kernel's are above 0.
                        is_of_process: info.ssi_code <= 0,
                    });
                }
                Ok(None) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("can't wait for signals"),
            }
        }
    }
}

impl AsFd for CommandSignals {
    /// Readable when one has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
