// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a run had to report: the events as they happen, and their sum in the end.

use std::{
    fmt,
    sync::{
        OnceLock,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread::Thread,
};

use vcpufreq_device::{
    ActuateError, Actuator, CounterSnapshot, Device, Event, Events, Histogram, HistogramSnapshot,
    Source, VcpuId,
};

use crate::{events::EventQueue, run::warn, sys, vm::RunReport, watch::HostChange};

/// Sees every event on the thread on which it happens; on a vCPU's it takes no
/// lock and calls nothing but the clock.
#[derive(Debug, Default)]
pub struct Observer {
    queue: Option<EventQueue>,
    latencies: Box<[Latency]>,
    source_failed: AtomicBool,
    limited: AtomicBool,
    housekeeper: OnceLock<Thread>,
    first_refusal: OnceLock<ActuateError>,
    governors_lost: AtomicU64,
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
            0 => sys::monotonic_ns(),
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
    (then_ns > 0).then(|| sys::monotonic_ns().saturating_sub(then_ns))
}

impl Observer {
    /// One for a VM of so many vCPUs, that may also write to an events file.
    pub fn new(vcpus: usize, queue: Option<EventQueue>) -> Self {
        Self {
            queue,
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
    pub fn told(&self, events: &[Event], t_ns: u64, tid: i32) {
        if let Some(queue) = &self.queue {
            for event in events {
                queue.record_at(event, t_ns, tid);
            }
        }
    }

    /// Whether events are written to a file.
    pub fn writes_events(&self) -> bool {
        self.queue.is_some()
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
    pub fn take_source_failed(&self) -> bool {
        self.source_failed.swap(false, Relaxed)
    }

    /// Whether requests have had to wait since the last call; the next one
    /// wakes the housekeeper again.
    pub fn take_limited(&self) -> bool {
        self.limited.swap(false, SeqCst)
    }

    /// From now on, `thread` is woken when a request has to wait.
    pub fn wake_when_limited(&self, thread: Thread) {
        // There is one housekeeper.
        let _ = self.housekeeper.set(thread);
    }

    fn wake_housekeeper(&self) {
        if !self.limited.swap(true, SeqCst)
            && let Some(thread) = self.housekeeper.get()
        {
            thread.unpark();
        }
    }

    /// Something has changed on the host, which `text` says to the user.
    pub fn host_changed(&self, change: HostChange, text: &str) {
        match change {
            HostChange::Governor {
                schedutil: false, ..
            } => _ = self.governors_lost.fetch_add(1, Relaxed),
            HostChange::Pin { pinned: false, .. } => _ = self.pins_lost.fetch_add(1, Relaxed),
            _ => {}
        }
        if let Some(queue) = &self.queue {
            queue.record_change(change);
        }
        warn(text);
    }

    /// How often a policy was found to have left schedutil, and a vCPU's thread
    /// its pCPUs.
    pub fn lost_on_host(&self) -> [u64; 2] {
        [&self.governors_lost, &self.pins_lost].map(|count| count.load(Relaxed))
    }

    /// The first thing that the host refused.
    pub fn first_refusal(&self) -> Option<&ActuateError> {
        self.first_refusal.get()
    }
}

impl Events for Observer {
    fn record(&self, event: &Event) {
        self.time(event);
        match event {
            Event::Limited { .. } => self.wake_housekeeper(),
            Event::SourceFailed { .. } => self.source_failed.store(true, Relaxed),
            Event::Refused { error, .. } => {
                // Only the first one is kept.
                let _ = self.first_refusal.set(*error);
            }
            // The file is about requests.
            Event::Moved { .. } | Event::Written { .. } => return,
            _ => {}
        }
        if let Some(queue) = &self.queue {
            queue.record(event);
        }
    }
}

/// The counters of all vCPUs together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    sum: CounterSnapshot,
    outside: u64,
    unclaimed: u64,
    resets: u64,
    lost_on_host: [u64; 2],
}

impl Summary {
    /// Sums up a device's counters.
    pub fn of<A: Actuator, S: Source, E: Events>(device: &Device<A, S, E>) -> Self {
        let vcpus = (0..u16::MAX).map_while(|vcpu| device.counters(VcpuId(vcpu)));
        Self {
            sum: vcpus.fold(CounterSnapshot::default(), add),
            outside: device.accesses_outside(),
            ..Self::default()
        }
    }

    /// The same with what was counted elsewhere.
    #[must_use]
    pub fn with(self, counted: CounterSnapshot) -> Self {
        Self {
            sum: add(self.sum, counted),
            ..self
        }
    }

    /// The same with what has changed on the host.
    #[must_use]
    pub fn on_host(self, observer: &Observer) -> Self {
        Self {
            lost_on_host: observer.lost_on_host(),
            ..self
        }
    }

    /// The same with what the virtual machine counted: resets, and accesses that no device
    /// claimed.
    #[must_use]
    pub fn with_guest(self, report: &RunReport) -> Self {
        Self {
            unclaimed: report.unclaimed,
            resets: report.resets,
            ..self
        }
    }

    /// Requests that the host refused.
    pub fn refused(&self) -> u64 {
        self.sum.refused
    }
}

/// The sum of two.
pub fn add(a: CounterSnapshot, b: CounterSnapshot) -> CounterSnapshot {
    CounterSnapshot {
        requests: a.requests + b.requests,
        applied: a.applied + b.applied,
        unchanged: a.unchanged + b.unchanged,
        superseded: a.superseded + b.superseded,
        coalesced: a.coalesced + b.coalesced,
        limited: a.limited + b.limited,
        refused: a.refused + b.refused,
        not_applicable: a.not_applicable + b.not_applicable,
        illegal: a.illegal + b.illegal,
        source_failures: a.source_failures + b.source_failures,
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = &self.sum;
        write!(
            f,
            "requests {}: applied {}, unchanged {}, superseded {}, coalesced {}, refused {}, \
             not applicable {}, delayed by the limit {}; illegal accesses {}, accesses of no device {}, \
             unreadable frequencies {}, resets {}, governors lost {}, pinnings lost {}",
            sum.requests,
            sum.applied,
            sum.unchanged,
            sum.superseded,
            sum.coalesced,
            sum.refused,
            sum.not_applicable,
            sum.limited,
            sum.illegal + self.outside,
            self.unclaimed,
            sum.source_failures,
            self.resets,
            self.lost_on_host[0],
            self.lost_on_host[1],
        )
    }
}

#[cfg(test)]
mod tests {
    //! The sum is over all vCPUs; the observer keeps the first refusal and
    //! remembers a failed read once.

    use std::sync::Arc;

    use vcpufreq_device::{
        ClampMode, DeviceConfig, DomainId, Headroom, Khz, PerfTable, Report, Util, VcpuSpec,
        WriteReg, fakes,
    };

    use super::*;
    use crate::vm::ExitReason;

    fn device(observer: &Arc<Observer>) -> Device<impl Actuator, impl Source, Arc<Observer>> {
        let spec = |domain| VcpuSpec {
            table: PerfTable::try_from(vec![Khz(1000), Khz(2000)]).unwrap(),
            capacity: Util::MAX,
            domain: DomainId(domain),
        };
        let config = DeviceConfig {
            vcpus: vec![spec(0), spec(1)],
            mode: ClampMode::Floor,
            headroom: Headroom::None,
            report: Report::Exact,
            rate_limit: None,
        };
        let actuator = fakes::RecordingActuator::default();
        let source = fakes::FixedSource::default();
        Device::new(config, actuator, source, observer.clone()).unwrap()
    }

    #[test]
    fn the_summary_is_over_all_vcpus() {
        let observer = Arc::default();
        let device = device(&observer);
        for (vcpu, khz) in [(0, 1000), (1, 2000), (1, 2000)] {
            device.write(VcpuId(vcpu), WriteReg::SetPerf, khz);
        }
        let summary = Summary::of(&device);
        let text = summary.to_string();
        assert!(
            text.starts_with("requests 3: applied 2, unchanged 1, "),
            "{text}"
        );
        assert_eq!(summary.refused(), 0);
    }

    #[test]
    fn the_first_refusal_is_kept() {
        let observer = Observer::default();
        let refusal = |errno| Event::Refused {
            vcpu: VcpuId(0),
            domain: DomainId(0),
            demand: vcpufreq_device::Demand::NONE,
            error: ActuateError::Refused {
                domain: DomainId(0),
                call: "write",
                errno,
            },
        };
        observer.record(&refusal(16));
        observer.record(&refusal(2));
        let first = observer.first_refusal().unwrap();
        assert!(matches!(first, ActuateError::Refused { errno: 16, .. }));
    }

    #[test]
    fn what_is_lost_on_the_host_is_counted_and_what_comes_back_is_not() {
        let observer = Observer::default();
        for schedutil in [false, true, false] {
            let policy = 2;
            observer.host_changed(HostChange::Governor { policy, schedutil }, "a governor");
        }
        for pinned in [false, true] {
            let vcpu = VcpuId(0);
            observer.host_changed(HostChange::Pin { vcpu, pinned }, "a pinning");
        }
        let report = RunReport {
            reason: ExitReason::PowerOff,
            resets: 3,
            unclaimed: 7,
            console_dropped: 0,
        };
        let summary = Summary::default().on_host(&observer).with_guest(&report);
        let text = summary.to_string();
        assert!(text.contains("accesses of no device 7, "), "{text}");
        assert!(text.contains(", resets 3, "), "{text}");
        assert!(
            text.ends_with("governors lost 2, pinnings lost 1"),
            "{text}"
        );
    }

    #[test]
    fn a_failed_read_is_taken_once() {
        let observer = Observer::default();
        let error = vcpufreq_device::SourceError::NoThread { vcpu: VcpuId(0) };
        observer.record(&Event::SourceFailed {
            vcpu: VcpuId(0),
            error,
        });
        assert!(observer.take_source_failed());
        assert!(!observer.take_source_failed());
    }
}
