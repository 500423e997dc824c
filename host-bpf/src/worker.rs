// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end of the events: requests that the kernel didn't put into force by itself.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};
use vcpufreq_device::{Demand, Khz, VcpuId};

use crate::error::BpfError;
use crate::host::unpack;
use crate::layout::{self, EVENT_SIZE};
use crate::object::refused;

/// Events of one wait, at most.
const AT_ONCE: usize = 1024;

/// What the programs say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request waits for the worker.
    Waiting(Waiting),
    /// A request was made; only where the policy wants that told.
    Told(Told),
}

/// A request that waits for the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Whose register was written.
    pub vcpu: VcpuId,
    /// Index of its domain.
    pub domain: u32,
    /// Over the rate limit: not before this time, in ns of CLOCK_MONOTONIC.
    pub not_before_ns: Option<u64>,
}

/// A request, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// Whose register was written.
    pub vcpu: VcpuId,
    /// Index of its domain.
    pub domain: u32,
    /// What was asked for, unchecked.
    pub khz: Khz,
    /// When, in ns of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// What that stands for.
    pub demand: Demand,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The kernel module puts it into force before the guest goes on.
    InKernel,
    /// It was in force.
    Unchanged,
    /// It is over the rate limit, and waits.
    Limited,
    /// It waits for the worker.
    LeftToWorker,
    /// The kernel module could not put it into force.
    Refused,
    /// No clamp serves it.
    NotApplicable,
}

/// Receives events. One for a VM.
#[derive(Debug)]
pub struct Worker {
    ring: RingBuffer<'static>,
    received: Receiver<Event>,
    /// How many events this wait has taken.
    taken: Arc<AtomicUsize>,
}

impl Worker {
    pub(crate) fn new(map: &dyn MapCore) -> Result<Self, BpfError> {
        let (sender, received) = channel();
        let mut builder = RingBufferBuilder::new();
        let taken = Arc::new(AtomicUsize::new(0));
        let counted = taken.clone();
        let callback = move |bytes: &[u8]| {
            pass_on(&sender, bytes);
            // Ends the wait; what is left makes the next one return at once.
            match counted.fetch_add(1, Relaxed) + 1 < AT_ONCE {
                true => 0,
                false => -libc::EINTR,
            }
        };
        builder
            .add(map, callback)
            .map_err(refused("opening the events"))?;
        let ring = builder.build().map_err(refused("opening the events"))?;
        Ok(Self {
            ring,
            received,
            taken,
        })
    }

    /// Waits for events, for that long at most, in ms rounded up; `Duration::MAX` is for ever.
    /// There are 1,024 of them at most, however fast new ones come.
    ///
    /// # Errors
    /// What the kernel said. A signal is none: then there are no events.
    pub fn wait(&self, timeout: Duration) -> Result<impl Iterator<Item = Event> + '_, BpfError> {
        self.taken.store(0, Relaxed);
        // libbpf rounds down, so that the last ms would be a busy loop.
        let timeout = match u64::try_from(timeout.as_nanos().div_ceil(1_000_000)) {
            Ok(ms) => Duration::from_millis(ms),
            Err(_) => Duration::MAX,
        };
        let result = self.ring.poll_raw(timeout);
        if result < 0 && result != -libc::EINTR {
            let error = std::io::Error::from_raw_os_error(-result);
            return Err(BpfError::Refused {
                what: "waiting for events",
                why: error.to_string(),
            });
        }
        Ok(self.received.try_iter())
    }

    /// A file to wait on beside others: readable when there are events.
    #[must_use]
    pub fn epoll_fd(&self) -> i32 {
        self.ring.epoll_fd()
    }
}

fn pass_on(sender: &Sender<Event>, bytes: &[u8]) {
    if let Some(event) = parse(bytes) {
        // Fails when nobody receives any more.
        let _ = sender.send(event);
    }
}

/// `struct vcpufreq_bpf_event`.
fn parse(bytes: &[u8]) -> Option<Event> {
    let bytes: &[u8; EVENT_SIZE] = bytes.try_into().ok()?;
    let word = |at: usize| {
        let end = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*end))
    };
    let ns = u64::from_ne_bytes(*bytes.get(16..)?.first_chunk()?);
    let vcpu = VcpuId(u16::try_from(word(0)?).ok()?);
    let domain = word(4)?;
    let waiting = |not_before_ns| {
        Event::Waiting(Waiting {
            vcpu,
            domain,
            not_before_ns,
        })
    };
    Some(match word(8)? {
        layout::APPLY => waiting(None),
        layout::DEFERRED => waiting(Some(ns)),
        layout::TOLD => Event::Told(Told {
            vcpu,
            domain,
            khz: Khz(word(12)?),
            at_ns: ns,
            demand: unpack(word(24)?),
            outcome: *OUTCOMES.get(usize::try_from(word(28)?).ok()?)?,
        }),
        _ => return None,
    })
}

/// In the order of `enum vcpufreq_bpf_outcome`.
const OUTCOMES: [Outcome; 6] = [
    Outcome::InKernel,
    Outcome::Unchanged,
    Outcome::Limited,
    Outcome::LeftToWorker,
    Outcome::Refused,
    Outcome::NotApplicable,
];

#[cfg(test)]
mod tests {
    //! Promise: an event is read as the programs write it.
    use vcpufreq_device::Util;

    use super::*;

    fn event(words: [u32; 4], ns: u64, demand: u32, outcome: u32) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.map(u32::to_ne_bytes).concat();
        bytes.extend(ns.to_ne_bytes());
        bytes.extend([demand, outcome].map(u32::to_ne_bytes).concat());
        bytes
    }

    #[test]
    fn requests_that_wait() {
        let waiting = |not_before_ns| {
            Some(Event::Waiting(Waiting {
                vcpu: VcpuId(3),
                domain: 2,
                not_before_ns,
            }))
        };
        let bytes = event([3, 2, 1, 600_000], 77, 0, 0);
        assert_eq!(parse(&bytes), waiting(Some(77)));
        assert_eq!(parse(&bytes[1..]), None);
        assert_eq!(parse(&event([3, 2, 0, 0], 77, 0, 0)), waiting(None));
        assert_eq!(parse(&event([3, 2, 9, 0], 77, 0, 0)), None);
    }

    #[test]
    fn a_request_that_is_told() {
        let bytes = event([3, 2, 2, 600_000], 77, 109 | 1024 << 16, 3);
        let Some(Event::Told(told)) = parse(&bytes) else {
            panic!("not told")
        };
        assert_eq!((told.khz, told.at_ns), (Khz(600_000), 77));
        assert_eq!(told.demand.min, Util::saturating(109));
        assert_eq!(told.demand.max, Util::MAX);
        assert_eq!(told.outcome, Outcome::LeftToWorker);
        assert_eq!(parse(&event([3, 2, 2, 1], 77, 0, 6)), None);
    }
}
