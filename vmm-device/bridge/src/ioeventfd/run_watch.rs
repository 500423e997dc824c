// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lets a worker sleep that reads requests from memory: no request comes while no vCPU runs. Each
//! vCPU's thread has a perf event that wakes the worker once the thread has run for 250 µs (task-clock).
//! It fires once, and is armed again before the worker sleeps again.
//!
//! A vCPU that runs all the time without a request costs one interrupt each time the worker finds that
//! out: ten at most in the first second, and then one a second. Needs CAP_PERFMON; without, the worker
//! never sleeps.

#![forbid(unsafe_code)]

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use vcpufreq_device::VcpuId;
use vcpufreq_host::Tid;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::perf::PerfEvent;

/// The data of its events in the worker's epoll set: this, and the vCPU.
const RAN: u64 = 1 << 62;

/// The events of all vCPUs.
#[derive(Debug)]
pub struct RunWatch {
    vcpus: Box<[WatchedRun]>,
    /// vCPUs that have a thread.
    registered: AtomicUsize,
}

#[derive(Debug, Default)]
struct WatchedRun {
    event: OnceLock<PerfEvent>,
    /// It will wake the worker.
    armed: AtomicBool,
}

impl RunWatch {
    /// Of so many vCPUs, which have no thread yet.
    pub(crate) fn new(vcpus: u16) -> Self {
        Self {
            vcpus: (0..vcpus).map(|_| WatchedRun::default()).collect(),
            registered: AtomicUsize::new(0),
        }
    }

    /// Watches thread `tid` of `vcpu`; `epoll` hears of it.
    ///
    /// # Errors
    /// As [`PerfEvent::run_time`], and epoll_ctl(2): `ENOSPC`. The worker never sleeps then.
    pub(crate) fn register_thread(&self, epoll: &Epoll, vcpu: VcpuId, tid: Tid) -> io::Result<()> {
        self.registered.fetch_add(1, Relaxed);
        let Some(watched) = self.vcpus.get(vcpu.index()) else {
            return Ok(());
        };
        let event = PerfEvent::run_time(tid)?;
        let when = EpollEvent::new(EventSet::IN, RAN | u64::from(vcpu.0));
        epoll.ctl(ControlOperation::Add, event.fd(), when)?;
        // The worker may sleep already, by what the threads before this one will do.
        watched.armed.store(true, Relaxed);
        event.fire_once()?;
        // A vCPU has one thread.
        let _ = watched.event.set(event);
        Ok(())
    }

    /// Has each vCPU that runs from now on wake the worker; whether all will.
    pub(super) fn arm(&self) -> bool {
        let events = self.vcpus.iter().filter_map(|watched| {
            let event = watched.event.get()?;
            // One that has not fired since is armed still.
            let armed = watched.armed.swap(true, Relaxed) || event.fire_once().is_ok();
            watched.armed.store(armed, Relaxed);
            Some(armed)
        });
        let armed: Vec<_> = events.collect();
        let registered = self.registered.load(Relaxed);
        registered > 0 && armed.len() == registered && !armed.contains(&false)
    }

    /// Whether an event of the worker's epoll set with this data is of a vCPU that has run.
    pub(super) fn hears(&self, data: u64) -> bool {
        let vcpu = data
            .checked_sub(RAN)
            .and_then(|vcpu| usize::try_from(vcpu).ok());
        let watched = vcpu.and_then(|vcpu| self.vcpus.get(vcpu));
        if let Some(watched) = watched {
            watched.armed.store(false, Relaxed);
        }
        watched.is_some()
    }
}

/// When a worker stops to read, and sleeps until a vCPU runs.
#[derive(Debug)]
pub(super) struct Rest {
    /// Turns without a request.
    quiet: u32,
    /// How many of them it takes to sleep.
    needed: u32,
    /// Since when it sleeps.
    since: Option<Instant>,
    /// A vCPU has run meanwhile.
    vcpu_runs: AtomicBool,
}

/// Longest time between two turns of a worker that reads.
pub(super) const TURN: Duration = Duration::from_millis(1);
/// Turns without a request before the worker sleeps: 25 ms after a request. A vCPU that has run
/// without one costs one turn, since the event comes after each 250 µs that it runs. Where vCPUs run on,
/// each time costs twice the turns of the time before, up to 1 s.
const QUIET: u32 = 25;
const LEAST_QUIET: u32 = 1;
const MOST_QUIET: u32 = 1000;
/// If the event comes within this time after the worker has begun to sleep, the vCPU counts as busy: it
/// runs for a hundredth of the time or more.
const SOON: Duration = Duration::from_millis(25);

impl Default for Rest {
    fn default() -> Self {
        Self {
            quiet: 0,
            needed: QUIET,
            since: None,
            vcpu_runs: AtomicBool::default(),
        }
    }
}

impl Rest {
    /// Whether the worker sleeps.
    pub(super) fn is_asleep(&self) -> bool {
        self.since.is_some()
    }

    /// A vCPU has run.
    pub(super) fn vcpu_runs(&self) {
        self.vcpu_runs.store(true, Relaxed);
    }

    /// After a turn, at `now`: whether the worker may begin to sleep.
    pub(super) fn after_turn(&mut self, had_request: bool, now: Instant) -> bool {
        let ran = self.vcpu_runs.swap(false, Relaxed);
        if had_request {
            (self.quiet, self.needed, self.since) = (0, QUIET, None);
            return false;
        }
        if let Some(since) = self.since {
            if !ran {
                return false;
            }
            self.needed = match now.duration_since(since) < SOON {
                true => (2 * self.needed).min(MOST_QUIET),
                false => LEAST_QUIET,
            };
            self.since = None;
        }
        self.quiet = (self.quiet + 1).min(MOST_QUIET);
        self.quiet >= self.needed
    }

    /// It begins to sleep at `now`, unless there was another request.
    pub(super) fn sleep_unless(&mut self, had_request: bool, now: Instant) {
        self.quiet = 0;
        self.since = (!had_request).then_some(now);
        if had_request {
            self.needed = QUIET;
        }
    }
}

#[cfg(test)]
mod tests {
    //! A worker sleeps when there was no request for a while; beside busy vCPUs rarely. It wakes when
    //! a vCPU runs.
    use super::*;

    fn turns_until_sleep(rest: &mut Rest, now: Instant) -> u32 {
        let turns = (1..).find(|_| rest.after_turn(false, now)).unwrap();
        rest.sleep_unless(false, now);
        assert!(rest.is_asleep());
        turns
    }

    #[test]
    fn it_sleeps_after_a_while_without_a_request() {
        let (mut rest, now) = (Rest::default(), Instant::now());
        assert_eq!(turns_until_sleep(&mut rest, now), QUIET);
        assert!(!rest.after_turn(false, now), "a frequency has changed");
        assert!(rest.is_asleep());
        assert!(!rest.after_turn(true, now));
        assert!(!rest.is_asleep());
        assert_eq!(turns_until_sleep(&mut rest, now), QUIET);
    }

    #[test]
    fn beside_an_idle_guest_it_looks_once_each_time_a_vcpu_has_run() {
        let (mut rest, mut now) = (Rest::default(), Instant::now());
        turns_until_sleep(&mut rest, now);
        for _ in 0..3 {
            now += SOON;
            rest.vcpu_runs();
            assert_eq!(turns_until_sleep(&mut rest, now), 1);
        }
    }

    #[test]
    fn a_request_of_the_last_moment_keeps_it_awake() {
        let (mut rest, now) = (Rest::default(), Instant::now());
        while !rest.after_turn(false, now) {}
        rest.sleep_unless(true, now);
        assert!(!rest.is_asleep());
        assert_eq!(turns_until_sleep(&mut rest, now), QUIET);
    }

    #[test]
    fn beside_a_busy_vcpu_it_tries_once_a_second() {
        let (mut rest, mut now) = (Rest::default(), Instant::now());
        turns_until_sleep(&mut rest, now);
        let mut turns_after = |passed| {
            now += passed;
            rest.vcpu_runs();
            turns_until_sleep(&mut rest, now)
        };
        let soon = [(); 7].map(|()| turns_after(SOON / 2));
        assert_eq!(soon, [50, 100, 200, 400, 800, 1000, 1000]);
        assert_eq!(turns_after(SOON), 1);
        let soon = [(); 4].map(|()| turns_after(SOON / 2));
        assert_eq!(soon, [2, 4, 8, 16]);
    }

    #[test]
    fn a_worker_that_may_never_sleep_counts_no_further() {
        let (mut rest, now) = (Rest::default(), Instant::now());
        (0..2 * MOST_QUIET).for_each(|_| {
            rest.after_turn(false, now);
        });
        assert_eq!(rest.quiet, MOST_QUIET);
    }

    #[test]
    fn it_hears_of_its_own_events_alone() {
        let watch = RunWatch::new(2);
        assert!([0, 1].iter().all(|vcpu| watch.hears(RAN | vcpu)));
        let others = [RAN | 2, 0, 1, u64::MAX, u64::MAX - 1];
        assert!(!others.iter().any(|data| watch.hears(*data)));
        assert!(!watch.arm(), "without a thread none wakes it");
    }
}
