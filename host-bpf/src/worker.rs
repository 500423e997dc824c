// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end of the [events](BpfEvent).

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};

use crate::error::BpfError;
use crate::event::{BpfEvent, parse};
use crate::libbpf_log::refused;

/// Events of one wait, at most.
const AT_ONCE: usize = 1024;

/// Receives events, each of which goes to one receiver.
#[derive(Debug)]
pub struct WorkerEvents {
    ring: RingBuffer<'static>,
    received: Receiver<BpfEvent>,
    /// How many events this wait has taken.
    taken: Arc<AtomicUsize>,
}

impl WorkerEvents {
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
    /// [`BpfError::Refused`] with the errno of epoll_wait(2). A signal is none: it ends the wait
    /// with the events that there are.
    pub fn wait(&self, timeout: Duration) -> Result<impl Iterator<Item = BpfEvent> + '_, BpfError> {
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
}

fn pass_on(sender: &Sender<BpfEvent>, bytes: &[u8]) {
    if let Some(event) = parse(bytes) {
        // Fails when the receiver has gone.
        let _ = sender.send(event);
    }
}
