// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ports that need no host, for tests and for VMMs that want the device without one.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::limit::Clock;
use crate::policy::{Clamp, PcpuPerf};
use crate::ports::{ActuateError, Actuator, Event, Events, Source, SourceError};
use crate::sync::unpoisoned;
use crate::units::{DomainId, VcpuId};

/// Records every clamp; refuses clamps after [`RecordingActuator::fail_with`].
#[derive(Debug, Default)]
pub struct RecordingActuator {
    applied: Mutex<Vec<(DomainId, Clamp)>>,
    failing: Mutex<Option<ActuateError>>,
}

/// Honours every clamp and remembers none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullActuator;

/// Shows every vCPU the same pCPU, which a test may change; fails when there is none.
#[derive(Debug, Default)]
pub struct FixedSource(Mutex<Option<PcpuPerf>>);

/// Remembers every event until it is paused.
#[derive(Debug, Default)]
pub struct RecordingEvents {
    events: Mutex<Vec<Event>>,
    paused: AtomicBool,
}

/// A clock that stands still until a test moves it. All clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Lets so many nanoseconds pass.
    pub fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.0.load(SeqCst)
    }
}

impl RecordingActuator {
    /// Everything applied so far, in order. Refused clamps aren't in it.
    pub fn applied(&self) -> Vec<(DomainId, Clamp)> {
        locked(&self.applied).clone()
    }

    /// From now on, every clamp fails with `error`; `None` ends that.
    pub fn fail_with(&self, error: Option<ActuateError>) {
        *locked(&self.failing) = error;
    }
}

impl Actuator for RecordingActuator {
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        if let Some(error) = *locked(&self.failing) {
            return Err(error);
        }
        locked(&self.applied).push((domain, clamp));
        Ok(())
    }

    fn serves_any_vcpu(&self) -> bool {
        true
    }
}

impl Actuator for NullActuator {
    fn apply(&self, _domain: DomainId, _clamp: Clamp) -> Result<(), ActuateError> {
        Ok(())
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

impl FixedSource {
    /// A source that shows `perf`.
    #[must_use]
    pub fn new(perf: PcpuPerf) -> Self {
        Self(Mutex::new(Some(perf)))
    }

    /// From now on shows `perf`; `None` makes it fail.
    pub fn set(&self, perf: Option<PcpuPerf>) {
        *locked(&self.0) = perf;
    }
}

impl Source for FixedSource {
    fn sample(&self, vcpu: VcpuId) -> Result<PcpuPerf, SourceError> {
        locked(&self.0).ok_or(SourceError::NoThread { vcpu })
    }
}

impl RecordingEvents {
    /// Everything recorded so far, in order.
    pub fn all(&self) -> Vec<Event> {
        locked(&self.events).clone()
    }

    /// Stops remembering.
    pub fn pause(&self) {
        self.paused.store(true, SeqCst);
    }
}

impl Events for RecordingEvents {
    fn record(&self, event: &Event) {
        if !self.paused.load(SeqCst) {
            locked(&self.events).push(*event);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}
