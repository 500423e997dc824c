// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The processes that a report has started. They end with the report: a test of SCHED_FIFO 90 would
//! go on for hours otherwise.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, bail};
use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::Pid,
};

use crate::cli::child::heeded;

/// Signals that end a program.
const ENDING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// Processes, or with a minus groups of them, as kill(2) takes them.
#[derive(Debug, Default)]
struct SignalState {
    targets: BTreeSet<i32>,
    signal: Option<u32>,
}

/// A target that has ended by itself gets nothing.
fn send(target: i32, signal: Signal) {
    let _ = kill(Pid::from_raw(target), signal);
}

/// The processes that run for a report.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportProcesses(Arc<Mutex<SignalState>>);

impl ReportProcesses {
    fn with<T>(&self, act: impl FnOnce(&mut SignalState) -> T) -> T {
        // What is held is a set and a number: there is no half of a change.
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add(&self, target: i32) {
        self.with(|state| {
            state.targets.insert(target);
            if state.signal.is_some() {
                send(target, Signal::SIGTERM);
            }
        });
    }

    pub(super) fn remove(&self, target: i32) {
        self.with(|state| state.targets.remove(&target));
    }

    /// Whether the report may go on.
    ///
    /// # Errors
    /// When such a signal has come.
    pub(super) fn go_on(&self) -> anyhow::Result<()> {
        match self.with(|state| state.signal) {
            Some(signal) => bail!("ended by signal {signal} before it had measured"),
            None => Ok(()),
        }
    }

    /// The second signal is SIGKILL, for processes that ignored the first.
    fn end(&self, signal: u32) {
        self.with(|state| {
            let with = match state.signal.replace(signal) {
                None => Signal::SIGTERM,
                Some(_) => Signal::SIGKILL,
            };
            for target in &state.targets {
                send(*target, with);
            }
        });
    }
}

/// While it lives, a signal to end this program ends the report's child processes. The report then
/// undoes its changes and ends with an error. Signals that are ignored stay so.
pub(super) struct Ending {
    /// What the thread had blocked before.
    before: SigSet,
}

impl Ending {
    /// Threads that were started before are not covered.
    pub(super) fn watch(running: &ReportProcesses) -> anyhow::Result<Self> {
        const CONTEXT: &str = "can't take over the signals that end a program";
        let signals = heeded(&ENDING).context(CONTEXT)?;
        let before = SigSet::thread_get_mask().context(CONTEXT)?;
        signals.thread_block().context(CONTEXT)?;
        let ending = Self { before };
        let arrived = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context(CONTEXT)?;
        let running = running.clone();
        let watch = move || {
            loop {
                match arrived.read_signal() {
                    Ok(Some(signal)) => running.end(signal.ssi_signo),
                    Ok(None) | Err(Errno::EINTR) => {}
                    Err(_) => return,
                }
            }
        };
        let thread = thread::Builder::new().name("signals".to_owned());
        thread.spawn(watch).context(CONTEXT)?;
        Ok(ending)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // A mask that was in force before can't be refused.
        let _ = self.before.thread_set_mask();
    }
}
