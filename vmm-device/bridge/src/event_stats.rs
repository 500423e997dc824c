// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What became of a guest's requests and how long they took, from the device's events.

use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::thread::Thread;

use vcpufreq_device::{
    ActuateError, Clamp, Event, Events, Histogram, HistogramSnapshot, Khz, VcpuId,
};
use vcpufreq_host::monotonic_ns;

use crate::pcpu_load::{PcpuLoad, PcpuTarget};
use crate::tune::{TuneEnd, Tuning};

/// What has changed on the host under a running guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// A policy has another governor than schedutil, or that one again.
    Governor {
        /// Number of the policy, as in `policy4`.
        policy: u32,
        /// Whether it is schedutil.
        schedutil: bool,
    },
    /// A vCPU's thread may run where it isn't pinned to, or no longer.
    Pin {
        /// Whose.
        vcpu: VcpuId,
        /// Whether it is pinned.
        pinned: bool,
    },
    /// What a vCPU's pCPU has to do, after a request of the vCPU's or a change of other load.
    Load {
        /// Whose.
        vcpu: VcpuId,
        /// The pCPU and its frequency, if that is known.
        pcpu: Option<(u32, Khz)>,
        /// The clamp of the vCPU's domain, with what is added to it.
        clamp: Clamp,
        /// The utilization.
        load: Option<PcpuLoad>,
        /// The target, with an actuator that sets targets.
        target: Option<PcpuTarget>,
    },
    /// A program has set a floor or a ceiling, or has extended it.
    Tuned(Tuning),
    /// It holds no longer.
    Untuned(Tuning, TuneEnd),
}

/// Gets each event as it happens, such as for a file. Like the device's [`Events`], it neither
/// blocks nor panics, and it calls no [`BridgeHandle`](crate::BridgeHandle).
pub trait EventSink: Events + Debug {
    /// `event` has happened at `t_ns` (CLOCK_MONOTONIC) on thread `tid`.
    fn record_at(&self, event: &Event, t_ns: u64, tid: i32);
    /// A change of the host was found now.
    fn record_change(&self, change: HostEvent);
}

/// Sees every event on the thread on which it happens; on a vCPU's it takes no
/// lock and calls nothing but the clock.
#[derive(Debug, Default)]
pub struct EventStats {
    sink: Option<Box<dyn EventSink>>,
    latencies: Box<[Latency]>,
    source_failed: AtomicBool,
    limited: AtomicBool,
    maintenance: OnceLock<Thread>,
    first_refusal: OnceLock<ActuateError>,
    governors_lost: AtomicU64,
    governors_off: AtomicU64,
    pins_lost: AtomicU64,
}

/// How long a vCPU's requests take.
#[derive(Debug, Default)]
struct Latency {
    /// When the next one was made, where that is known; 0 otherwise.
    written_ns: AtomicU64,
    /// When the newest one that nothing has become of yet arrived,
    /// CLOCK_MONOTONIC in ns; 0 when there is none.
    arrived_ns: AtomicU64,
    /// From there to its clamp being in force.
    clamp_after: Histogram,
    /// When the newest request arrived whose clamp no other frequency has
    /// followed yet; 0 when there is none.
    moving_ns: AtomicU64,
    /// From there to another frequency.
    freq_after: Histogram,
}

impl Latency {
    fn arrived(&self) {
        let at_ns = match self.written_ns.swap(0, Relaxed) {
            0 => monotonic_ns(),
            written_ns => written_ns,
        };
        self.arrived_ns.store(at_ns, Relaxed);
    }

    fn applied(&self) {
        let arrived_ns = self.arrived_ns.swap(0, Relaxed);
        if let Some(ns) = since(arrived_ns) {
            self.clamp_after.record(ns);
            self.moving_ns.store(arrived_ns, Relaxed);
        }
    }

    fn moved(&self) {
        if let Some(ns) = since(self.moving_ns.swap(0, Relaxed)) {
            self.freq_after.record(ns);
        }
    }
}

fn since(then_ns: u64) -> Option<u64> {
    (then_ns > 0).then(|| monotonic_ns().saturating_sub(then_ns))
}

impl EventStats {
    /// One for a VM of so many vCPUs, whose events `sink` gets, too.
    pub fn new(vcpus: usize, sink: Option<Box<dyn EventSink>>) -> Self {
        Self {
            sink,
            latencies: (0..vcpus).map(|_| Latency::default()).collect(),
            ..Self::default()
        }
    }

    /// How long requests of a vCPU took from their arrival in the VMM until
    /// their clamp was in force: from the event `request` to `applied`.
    pub fn clamp_after(&self, vcpu: VcpuId) -> HistogramSnapshot {
        let latency = self.latencies.get(vcpu.index());
        latency.map_or_else(HistogramSnapshot::default, |latency| {
            latency.clamp_after.snapshot()
        })
    }

    /// How long it took from a request's arrival until the vCPU's frequency was
    /// seen to have changed, which is at a look or a read of cur_perf.
    pub fn freq_after(&self, vcpu: VcpuId) -> HistogramSnapshot {
        let latency = self.latencies.get(vcpu.index());
        latency.map_or_else(HistogramSnapshot::default, |latency| {
            latency.freq_after.snapshot()
        })
    }

    /// A request that arrived at `t_ns` elsewhere, on thread `tid`, and what
    /// became of it.
    pub fn record_all_at(&self, events: &[Event], t_ns: u64, tid: i32) {
        if let Some(sink) = &self.sink {
            for event in events {
                sink.record_at(event, t_ns, tid);
            }
        }
    }

    /// Whether a sink gets the events.
    pub fn has_sink(&self) -> bool {
        self.sink.is_some()
    }

    /// Requests that a reset makes have no arrival, and no time.
    fn time(&self, event: &Event) {
        let of = |vcpu: VcpuId| self.latencies.get(vcpu.index());
        match event {
            Event::Request { vcpu, .. } => {
                if let Some(latency) = of(*vcpu) {
                    latency.arrived();
                }
            }
            Event::Applied { vcpu, .. } => {
                if let Some(latency) = of(*vcpu) {
                    latency.applied();
                }
            }
            Event::Written { vcpu, at_ns } => {
                if let Some(latency) = of(*vcpu) {
                    latency.written_ns.store(*at_ns, Relaxed);
                }
            }
            Event::Moved { vcpu, .. } => {
                if let Some(latency) = of(*vcpu) {
                    latency.moved();
                }
            }
            Event::Unchanged { vcpu, .. }
            | Event::Refused { vcpu, .. }
            | Event::NotApplicable { vcpu, .. } => {
                if let Some(latency) = of(*vcpu) {
                    latency.arrived_ns.store(0, Relaxed);
                }
            }
            _ => {}
        }
    }

    /// Whether a frequency could not be read since the last call.
    pub(crate) fn take_source_failed(&self) -> bool {
        self.source_failed.swap(false, Relaxed)
    }

    /// Whether requests have had to wait since the last call; the next one
    /// wakes the maintenance thread again.
    pub(crate) fn take_limited(&self) -> bool {
        self.limited.swap(false, SeqCst)
    }

    /// From now on, `thread` is woken when a request has to wait.
    pub(crate) fn wake_when_limited(&self, thread: Thread) {
        // There is one such thread.
        let _ = self.maintenance.set(thread);
    }

    fn wake_maintenance(&self) {
        if !self.limited.swap(true, SeqCst) {
            self.wake();
        }
    }

    /// Wakes the maintenance thread.
    pub(crate) fn wake(&self) {
        if let Some(thread) = self.maintenance.get() {
            thread.unpark();
        }
    }

    /// Something has changed on the host.
    pub fn host_changed(&self, change: HostEvent) {
        match change {
            HostEvent::Governor {
                schedutil: false, ..
            } => {
                self.governors_lost.fetch_add(1, Relaxed);
                self.governors_off.fetch_add(1, Relaxed);
            }
            // Each policy is first found to have left it.
            HostEvent::Governor { .. } => _ = self.governors_off.fetch_sub(1, Relaxed),
            HostEvent::Pin { pinned: false, .. } => _ = self.pins_lost.fetch_add(1, Relaxed),
            _ => {}
        }
        if let Some(sink) = &self.sink {
            sink.record_change(change);
        }
    }

    /// How often a policy was found to have left schedutil, and a vCPU's thread
    /// its pCPUs; and how many policies are under another governor than schedutil now.
    pub(crate) fn lost_on_host(&self) -> [u64; 3] {
        let counts = [&self.governors_lost, &self.pins_lost, &self.governors_off];
        counts.map(|count| count.load(Relaxed))
    }

    /// The first thing that the host refused.
    pub fn first_refusal(&self) -> Option<&ActuateError> {
        self.first_refusal.get()
    }
}

impl Events for EventStats {
    fn record(&self, event: &Event) {
        self.time(event);
        match event {
            Event::Limited { .. } => self.wake_maintenance(),
            Event::Ceiling { .. } => return self.wake(),
            Event::SourceFailed { .. } => self.source_failed.store(true, Relaxed),
            Event::Refused { error, .. } => {
                // Only the first one is kept.
                let _ = self.first_refusal.set(*error);
            }
            // A sink is about requests.
            Event::Moved { .. } | Event::Written { .. } => return,
            _ => {}
        }
        if let Some(sink) = &self.sink {
            sink.record(event);
        }
    }
}

#[cfg(test)]
mod tests {
    //! The first refusal is kept, a failed read remembered once, and what is lost on the host is
    //! counted, also what is lost still.

    use vcpufreq_device::{DomainId, SourceError};

    use super::*;

    #[test]
    fn the_first_refusal_is_kept() {
        let stats = EventStats::default();
        let refusal = |errno| Event::Refused {
            vcpu: VcpuId(0),
            domain: DomainId(0),
            clamp: Clamp::NONE,
            error: ActuateError::Refused {
                domain: DomainId(0),
                call: "write",
                errno,
            },
        };
        stats.record(&refusal(16));
        stats.record(&refusal(2));
        let first = stats.first_refusal().unwrap();
        assert!(matches!(first, ActuateError::Refused { errno: 16, .. }));
    }

    #[test]
    fn what_is_lost_on_the_host_is_counted_and_what_comes_back_is_not() {
        let stats = EventStats::default();
        for schedutil in [false, true, false] {
            let policy = 2;
            stats.host_changed(HostEvent::Governor { policy, schedutil });
        }
        for pinned in [false, true] {
            let vcpu = VcpuId(0);
            stats.host_changed(HostEvent::Pin { vcpu, pinned });
        }
        assert_eq!(stats.lost_on_host(), [2, 1, 1]);
    }

    #[test]
    fn a_failed_read_is_taken_once() {
        let stats = EventStats::default();
        let error = SourceError::NoThread { vcpu: VcpuId(0) };
        stats.record(&Event::SourceFailed {
            vcpu: VcpuId(0),
            error,
        });
        assert!(stats.take_source_failed());
        assert!(!stats.take_source_failed());
    }
}
