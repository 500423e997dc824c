// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end of the events: requests that the kernel didn't put into force by itself.

#![forbid(unsafe_code)]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};
use vcpufreq_device::VcpuId;

use crate::error::BpfError;
use crate::layout::EVENT_SIZE;
use crate::object::refused;

/// A request waits for the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Whose register was written.
    pub vcpu: VcpuId,
    /// Index of its domain.
    pub domain: u32,
    /// Over the rate limit: not before this time, in ns of CLOCK_MONOTONIC.
    pub not_before_ns: Option<u64>,
}

/// Receives events. One for a VM.
#[derive(Debug)]
pub struct Worker {
    ring: RingBuffer<'static>,
    received: Receiver<Event>,
}

impl Worker {
    pub(crate) fn new(map: &dyn MapCore) -> Result<Self, BpfError> {
        let (sender, received) = channel();
        let mut builder = RingBufferBuilder::new();
        let callback = move |bytes: &[u8]| pass_on(&sender, bytes);
        builder
            .add(map, callback)
            .map_err(refused("opening the events"))?;
        let ring = builder.build().map_err(refused("opening the events"))?;
        Ok(Self { ring, received })
    }

    /// Waits for events, for that long at most; `Duration::MAX` is for ever.
    ///
    /// # Errors
    /// What the kernel said. A signal is none: then there are no events.
    pub fn wait(&self, timeout: Duration) -> Result<impl Iterator<Item = Event> + '_, BpfError> {
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

fn pass_on(sender: &Sender<Event>, bytes: &[u8]) -> i32 {
    if let Some(event) = parse(bytes) {
        // Fails when nobody receives any more.
        let _ = sender.send(event);
    }
    0
}

/// `struct vcpufreq_bpf_event`.
fn parse(bytes: &[u8]) -> Option<Event> {
    let bytes: &[u8; EVENT_SIZE] = bytes.try_into().ok()?;
    let word = |at: usize| {
        let end = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*end))
    };
    let due_ns = u64::from_ne_bytes(*bytes.last_chunk()?);
    Some(Event {
        vcpu: VcpuId(u16::try_from(word(0)?).ok()?),
        domain: word(4)?,
        not_before_ns: (word(8)? != 0).then_some(due_ns),
    })
}

#[cfg(test)]
mod tests {
    //! Promise: an event is read as the programs write it.
    use super::*;

    #[test]
    fn an_event() {
        let mut bytes = Vec::new();
        for word in [3_u32, 2, 1, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(77_u64.to_ne_bytes());
        let event = Event {
            vcpu: VcpuId(3),
            domain: 2,
            not_before_ns: Some(77),
        };
        assert_eq!(parse(&bytes), Some(event));
        assert_eq!(parse(&bytes[1..]), None);
    }
}
