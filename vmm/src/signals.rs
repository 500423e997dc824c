// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting for a file, or for a signal that asks the program to end.

use std::{
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use anyhow::bail;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

/// Signals that ask the program to end, as a file. They end nothing while it lives.
pub struct EndSignals(SignalFd);

/// Those that end a wait for something else, too, if they are blocked.
const TO_END: [Signal; 4] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
];

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

    fn take_these(signals: &[Signal]) -> nix::Result<Self> {
        let mut set = SigSet::empty();
        for signal in signals {
            set.add(*signal);
        }
        set.thread_block()?;
        file_of(&set).map(Self)
    }
}

fn file_of(set: &SigSet) -> nix::Result<SignalFd> {
    SignalFd::with_flags(set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Whether one of `files` is readable within so long, on a thread that may have [`EndSignals`], which it
/// may heed.
///
/// # Errors
/// When one of these asks the program to end, which stays for [`wait`]; or as poll(2).
pub fn is_ready(files: &[BorrowedFd<'_>], within: Duration, heeds: bool) -> anyhow::Result<bool> {
    let (blocked, mut heeded) = (SigSet::thread_get_mask()?, SigSet::empty());
    let all = TO_END
        .iter()
        .filter(|signal| heeds && blocked.contains(**signal));
    all.for_each(|signal| heeded.add(*signal));
    let signals = file_of(&heeded)?;
    match ready(signals.as_fd(), files, Some(within))? {
        Some(0) => bail!("this program is told to end"),
        ready => Ok(ready.is_some()),
    }
}

/// Whether a signal has come that asks the program to end, and stays for [`wait`].
pub fn is_told_to_end() -> bool {
    is_ready(&[], Duration::ZERO, true).is_err()
}

/// Which is readable first, or its other end has gone: `first` is 0, `files` follow.
fn ready(
    first: BorrowedFd<'_>,
    files: &[BorrowedFd<'_>],
    within: Option<Duration>,
) -> nix::Result<Option<usize>> {
    let timeout = within.map_or(PollTimeout::NONE, |within| {
        PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX)
    });
    let all = [first].into_iter().chain(files.iter().copied());
    let mut polled: Vec<_> = all
        .map(|file| PollFd::new(file, PollFlags::POLLIN))
        .collect();
    while let Err(error) = poll(&mut polled, timeout) {
        if error != Errno::EINTR {
            return Err(error);
        }
    }
    Ok(polled.iter().position(|file| file.any() == Some(true)))
}

/// Waits for one of `files` or a signal, at most so long; a signal comes first, then the first file.
pub fn wait(
    signals: &EndSignals,
    files: &[BorrowedFd<'_>],
    within: Option<Duration>,
) -> nix::Result<Ready> {
    loop {
        match ready(signals.0.as_fd(), files, within)? {
            Some(0) => {
                let number = signals.0.read_signal()?.map(|info| info.ssi_signo);
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

#[cfg(test)]
mod tests {
    //! A signal that asks the program to end ends each wait, and is there for the next one.
    use nix::sys::signal::raise;

    use super::*;

    #[test]
    fn a_signal_ends_a_wait_and_stays() {
        // On a thread of its own: the mask is that thread's.
        let heard = std::thread::spawn(|| {
            let signals = EndSignals::take().unwrap();
            assert!(!is_ready(&[], Duration::ZERO, true).unwrap());
            raise(Signal::SIGTERM).unwrap();
            assert!(!is_ready(&[], Duration::ZERO, false).unwrap());
            for _ in 0..2 {
                let told = is_ready(&[], Duration::MAX, true).unwrap_err();
                assert_eq!(told.to_string(), "this program is told to end");
            }
            wait(&signals, &[], None)
        });
        let heard = heard.join().unwrap();
        assert!(matches!(heard, Ok(Ready::Signal(Signal::SIGTERM))));
    }
}
