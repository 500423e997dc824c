// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a report has started, so that it ends with the report: a test of SCHED_FIFO 90 that nobody
//! waits for would stay for hours.

use std::{
    collections::BTreeSet,
    os::fd::AsRawFd as _,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, bail};
use vmm_sys_util::eventfd::EventFd;

use crate::{rt_sys, vm::sys::EndingSignals};

/// Processes, or with a minus groups of them, as kill(2) takes them.
#[derive(Debug, Default)]
struct State {
    targets: BTreeSet<i32>,
    signal: Option<i32>,
}

/// The processes that run for a report.
#[derive(Clone, Debug, Default)]
pub(super) struct Running(Arc<Mutex<State>>);

impl Running {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        // What is held is a set and a number: there is no half of a change.
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add(&self, target: i32) {
        self.with(|state| {
            state.targets.insert(target);
            if state.signal.is_some() {
                rt_sys::kill(target, libc::SIGTERM);
            }
        });
    }

    pub(super) fn remove(&self, target: i32) {
        self.with(|state| state.targets.remove(&target));
    }

    /// Whether the report may go on.
    ///
    /// # Errors
    /// That it was asked to end.
    pub(super) fn go_on(&self) -> anyhow::Result<()> {
        match self.with(|state| state.signal) {
            Some(signal) => bail!("ended by signal {signal} before it had measured"),
            None => Ok(()),
        }
    }

    /// A second signal is for what doesn't heed the first.
    fn end(&self, signal: i32) {
        self.with(|state| {
            let with = match state.signal.replace(signal) {
                None => libc::SIGTERM,
                Some(_) => libc::SIGKILL,
            };
            for target in &state.targets {
                rt_sys::kill(*target, with);
            }
        });
    }
}

/// While it lives, a signal that asks this program to end ends what runs for the report; the report
/// then undoes what it did and says so.
pub(super) struct Ending(
    #[expect(dead_code, reason = "its drop is what matters")] Arc<EndingSignals>,
);

impl Ending {
    pub(super) fn watch(running: &Running) -> anyhow::Result<Self> {
        const CONTEXT: &str = "can't take over the signals that end a program";
        let event = EventFd::new(0).context(CONTEXT)?;
        let signals = Arc::new(EndingSignals::divert_to(event.as_raw_fd()).context(CONTEXT)?);
        let (running, known) = (running.clone(), Arc::downgrade(&signals));
        let watch = move || {
            loop {
                let read = event.read();
                let Some(signals) = known.upgrade() else {
                    return;
                };
                if let (Ok(_), Some(signal)) = (read, signals.last()) {
                    running.end(signal);
                }
            }
        };
        let thread = thread::Builder::new().name("signals".to_owned());
        thread.spawn(watch).context(CONTEXT)?;
        Ok(Self(signals))
    }
}
