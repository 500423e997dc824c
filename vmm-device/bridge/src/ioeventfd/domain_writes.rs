// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The requests of a domain that KVM has finished and the worker has not carried out. Finds the
//! value that was written last.
//!
//! Each (vCPU, value) has an eventfd. All eventfds of a domain are in one edge-triggered epoll set.
//! A signal puts the eventfd at the tail of the set's ready list, unless it is on the list already.
//! `epoll_wait` returns the list in that order and takes each off it (`fs/eventpoll.c`:
//! `ep_poll_callback`, `ep_send_events`). So the list has the order of *first* signals: A, B, A
//! reads A, B. The eventfd's counter shows the repeat: A has been signalled twice, and handed out
//! once. The last value is then
//! - the one handed out last, if no other one was signalled more often than
//!   handed out;
//! - else that one or one of those others. [`WriteOrder`] then returns the last, if the host
//!   permits the recording. Otherwise the highest is taken: until the next request, the host never
//!   runs below the last value.
//!
//! The kernel changes count and list under the eventfd's lock, so each signal handed out has been
//! counted. A signal that was counted and not handed out yet looks like a repeat. Repeats are
//! therefore evaluated only when the list is empty.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use vcpufreq_device::{Actuator, Device, Events, Source, VcpuId, WriteReg};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::{TraceProgress, WriteOrder};

/// Looks at the ready list in one go. A guest that writes faster than this
/// gets one of its values, and the next go looks again.
const LOOKS: u32 = 4;

/// The unanswered requests of one domain.
pub struct DomainWrites {
    epoll: Epoll,
    write_order: Arc<dyn WriteOrder>,
    /// What [`WriteOrder`] returned the last time.
    known: TraceProgress,
    vcpus: Vec<VcpuId>,
    bells: Vec<CountedBell>,
    events: Vec<EpollEvent>,
    /// The bell handed out last, since the list was last found empty.
    last: Option<usize>,
    /// What was carried out since then.
    carried_out: Option<SignalledWrite>,
    /// What was taken and isn't carried out yet; stays when that panics.
    in_hand: Option<SignalledWrite>,
    /// Whether a signal of it was reported to the device as one that is carried out.
    is_reported: bool,
}

/// What a write of one entry of a table to the set_perf of one vCPU signals.
#[derive(Clone, Debug)]
pub struct EntryBell {
    /// The vCPU.
    pub vcpu: VcpuId,
    /// The entry, in kHz.
    pub khz: u32,
    /// What it signals.
    pub event: Arc<EventFd>,
}

struct CountedBell {
    vcpu: VcpuId,
    khz: u32,
    event: Arc<EventFd>,
    /// Signals since the list was last found empty.
    signals: u64,
    /// How many of them were handed out.
    handed_out: u64,
    /// Signals that have not been reported to the device.
    unreported: u64,
}

/// What the guest wrote last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalledWrite {
    /// Whose register.
    pub vcpu: VcpuId,
    /// The value in kHz: an entry of the vCPU's table.
    pub khz: u32,
    /// No more than one of the values can have been the last.
    pub certain: bool,
}

impl DomainWrites {
    /// For these eventfds of (vCPU, value). `write_order` decides where the eventfds don't.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` (no more open files), `ENOSPC` (over `fs.epoll.max_user_watches`),
    /// `ENOMEM`.
    pub fn new(bells: Vec<EntryBell>, write_order: Arc<dyn WriteOrder>) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        for (index, bell) in (0..).zip(&bells) {
            let when = EventSet::IN | EventSet::EDGE_TRIGGERED;
            let fd = bell.event.as_raw_fd();
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(when, index))?;
        }
        let bells: Vec<_> = bells.into_iter().map(CountedBell::from).collect();
        let mut vcpus: Vec<_> = bells.iter().map(|bell| bell.vcpu).collect();
        vcpus.dedup();
        Ok(Self {
            epoll,
            write_order,
            known: TraceProgress::new(),
            vcpus,
            events: vec![EpollEvent::default(); bells.len().max(1)],
            bells,
            last: None,
            carried_out: None,
            in_hand: None,
            is_reported: false,
        })
    }

    /// Readable when there is something in it.
    pub fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Whether KVM signals any request of this domain.
    pub fn can_be_used(&self) -> bool {
        !self.bells.is_empty()
    }

    /// Takes what the guest wrote last; `None` when it wrote nothing.
    pub fn take(&mut self) -> Option<SignalledWrite> {
        for _ in 0..LOOKS {
            // Fails when interrupted, which it isn't without a timeout.
            let count = self.epoll.wait(0, &mut self.events).unwrap_or(0);
            if count == 0 {
                return self.conclude();
            }
            self.count(count);
        }
        let bell = &self.bells[self.last?];
        let certain = false;
        Some(SignalledWrite {
            vcpu: bell.vcpu,
            khz: bell.khz,
            certain,
        })
    }

    fn count(&mut self, count: usize) {
        for event in &self.events[..count] {
            let Ok(index) = usize::try_from(event.data()) else {
                continue;
            };
            let Some(bell) = self.bells.get_mut(index) else {
                continue;
            };
            bell.handed_out += 1;
            bell.read();
            self.last = Some(index);
        }
    }

    /// The list is empty: all that was signalled has been handed out.
    fn conclude(&mut self) -> Option<SignalledWrite> {
        let last = self.last.take()?;
        let repeated = |(index, bell): &(usize, &CountedBell)| {
            *index != last && bell.signals > bell.handed_out
        };
        let others = self.bells.iter().enumerate().filter(repeated);
        let other = others.max_by_key(|(_, bell)| bell.khz);
        let other = other.map(|(index, _)| index);
        let recorded = other.and_then(|_| self.recorded());
        let chosen = match (recorded, other) {
            (Some(recorded), _) => recorded,
            (None, Some(other)) if self.bells[other].khz > self.bells[last].khz => other,
            (None, _) => last,
        };
        for bell in &mut self.bells {
            (bell.signals, bell.handed_out) = (0, 0);
        }
        let bell = &self.bells[chosen];
        Some(SignalledWrite {
            vcpu: bell.vcpu,
            khz: bell.khz,
            certain: other.is_none() || recorded.is_some(),
        })
    }

    /// The bell of the last recorded write. Its signal may come only now: KVM records a write
    /// before it signals it.
    fn recorded(&mut self) -> Option<usize> {
        let last = self.write_order.newest(&self.vcpus, &mut self.known)?;
        let is_it =
            |bell: &CountedBell| bell.signals > 0 && (bell.vcpu, bell.khz) == (last.vcpu, last.khz);
        self.bells.iter().position(is_it)
    }

    /// Carries out the guest's last write and counts those before; returns whether nothing is left.
    /// At most two requests.
    ///
    /// A request that a thread was carrying out when it panicked comes first: the list doesn't have
    /// it any more. It is tried once, so that it doesn't end each later thread, too.
    pub fn drain(&mut self, device: &Device<impl Actuator, impl Source, impl Events>) -> bool {
        if let Some(again) = self.in_hand.take() {
            let mut bells = self.bells.iter_mut();
            let bell = bells.find(|bell| (bell.vcpu, bell.khz) == (again.vcpu, again.khz));
            let bell = bell.filter(|bell| bell.unreported > 0 && !self.is_reported);
            if let Some(bell) = bell {
                bell.unreported -= 1;
                device.count_in_kernel(again.vcpu, 1);
            }
            // Until it is: this may panic, too.
            self.carried_out = None;
            device.write(again.vcpu, WriteReg::SetPerf, again.khz);
            self.carried_out = self.last.map(|_| again);
        }
        let Some(latest) = self.take() else {
            self.tell_rest(device);
            return true;
        };
        self.carry_out(latest, device)
    }

    /// Carries out `latest` and reports the signals; returns whether nothing is left.
    fn carry_out(
        &mut self,
        latest: SignalledWrite,
        device: &Device<impl Actuator, impl Source, impl Events>,
    ) -> bool {
        (self.in_hand, self.is_reported) = (Some(latest), false);
        let more = self.last.is_some();
        let news = self.tell(latest, more, device);
        let before = self.carried_out.take();
        let same = before.is_some_and(|b| (b.vcpu, b.khz) == (latest.vcpu, latest.khz));
        if news || !same {
            let last = self.write_order.newest(&self.vcpus, &mut self.known);
            if let Some(last) = last.filter(|l| (l.vcpu, l.khz) == (latest.vcpu, latest.khz)) {
                device.written_at(latest.vcpu, last.at_ns);
            }
            // An eventfd doesn't tell which vCPU has written.
            device.write(latest.vcpu, WriteReg::SetPerf, latest.khz);
        }
        self.in_hand = None;
        self.carried_out = Some(latest).filter(|_| more);
        !more
    }

    /// Reports what a thread that panicked had read and not reported.
    fn tell_rest(&mut self, device: &Device<impl Actuator, impl Source, impl Events>) {
        for bell in &mut self.bells {
            let coalesced = std::mem::take(&mut bell.unreported);
            if coalesced > 0 {
                device.count_in_kernel(bell.vcpu, coalesced);
                device.count_coalesced(bell.vcpu, coalesced);
            }
        }
    }

    /// Reports the unreported signals; returns whether `latest` is one of them. While there may be
    /// `more`, only `latest` is reported: another one may turn out to be the last.
    fn tell(
        &mut self,
        latest: SignalledWrite,
        more: bool,
        device: &Device<impl Actuator, impl Source, impl Events>,
    ) -> bool {
        let mut news = false;
        for bell in &mut self.bells {
            let is_it = (bell.vcpu, bell.khz) == (latest.vcpu, latest.khz) && bell.unreported > 0;
            news |= is_it;
            // The one that is carried out counts there.
            let carried_out = u64::from(is_it);
            let coalesced = match more {
                true => 0,
                false => bell.unreported - carried_out,
            };
            bell.unreported -= carried_out + coalesced;
            self.is_reported |= is_it;
            if carried_out + coalesced > 0 {
                device.count_in_kernel(bell.vcpu, carried_out + coalesced);
                device.count_coalesced(bell.vcpu, coalesced);
            }
        }
        news
    }
}

impl From<EntryBell> for CountedBell {
    fn from(EntryBell { vcpu, khz, event }: EntryBell) -> Self {
        Self {
            vcpu,
            khz,
            event,
            signals: 0,
            handed_out: 0,
            unreported: 0,
        }
    }
}

impl CountedBell {
    fn read(&mut self) {
        // Nothing to read means that an earlier look has counted it.
        let signals = self.event.read().unwrap_or(0);
        self.signals += signals;
        self.unreported += signals;
    }
}

#[cfg(test)]
#[path = "domain_writes_tests.rs"]
mod tests;
