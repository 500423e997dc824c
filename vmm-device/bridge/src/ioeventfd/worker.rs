// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The worker: one thread that carries out the requests of all vCPUs and keeps
//! cur_perf in their pages true.
//!
//! Requests take at most a twentieth of the time ([`Budget`]), looks at cur_perf another one. A turn
//! that only the time begins, and that finds no request in a guest's RAM, doesn't count: there is one
//! a ms at most. The worker is not in the vCPUs' cgroups. Its own clamp is 0, so that it neither lifts
//! nor holds a pCPU's frequency. It stays off the pCPUs that vCPUs are pinned to, if there are others.

use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vcpufreq_device::{Actuator, Device, Events, Source, VcpuId};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::timerfd::TimerFd;

use super::perf_watch::CHANGED;
use super::refresh_timer::RefreshTimer;
use super::run_watch::{self, Rest, RunWatch};
use crate::budget::Budget;
use crate::embedder::{BridgeThread, Embedder};
use crate::error::{Context, PathError};

/// Requests may take one part in this many of the time.
const SHARE: u32 = 20;
/// When to go on with a domain that was left unfinished.
const FINISH: Duration = Duration::from_millis(1);
/// Events of one turn; further ones are the next turn's.
const TURN: usize = 64;

/// Where a worker finds the requests of a guest, for a device `D`.
pub trait RequestQueue<D>: Send + Sync {
    /// What is readable when requests wait, by index.
    fn fds(&self) -> Vec<RawFd>;

    /// Carries out what waits behind file `index`.
    fn drain_one(&self, index: usize, device: &D);

    /// Goes on where requests were left, and looks for those that no file announces. Whether one was
    /// left or found; the seldom look for requests without a doorbell doesn't count.
    fn finish(&self, device: &D) -> bool;

    /// Whether requests were left.
    fn is_unfinished(&self) -> bool;
}

/// What the worker is made of.
pub struct WorkerParts<A, S, E> {
    /// Where requests come from.
    pub requests: Arc<dyn RequestQueue<Device<A, S, E>>>,
    /// Where they go.
    pub device: Arc<Device<A, S, E>>,
    /// Which vCPUs have a thread: their cur_perf is known.
    pub vcpus: Arc<[AtomicBool]>,
    /// pCPUs that it avoids.
    pub avoid: Vec<u32>,
    /// What starts the thread.
    pub embedder: Arc<dyn Embedder>,
    /// What wakes it when a vCPU runs: then it sleeps while none does.
    pub run_watch: Option<Arc<RunWatch>>,
}

/// The running worker; stopped when dropped.
pub struct Worker {
    stop: Arc<EventFd>,
    lost: Arc<EventFd>,
    epoll: Arc<Epoll>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts it.
    ///
    /// # Errors
    /// [`PathError::Refused`] with `EMFILE` or `ENFILE` (no more open files) or `EAGAIN` (no more
    /// threads). No thread is left then.
    pub fn start(
        plan: WorkerParts<impl Actuator + 'static, impl Source + 'static, impl Events + 'static>,
    ) -> Result<Self, PathError> {
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let stop = Arc::new(event().context("can't make an eventfd")?);
        let lost = Arc::new(event().context("can't make an eventfd")?);
        let turns = Turns::new(plan, &stop).context("can't watch the guest's requests")?;
        let epoll = turns.epoll.clone();
        let last_words = SignalLost(Some(lost.clone()));
        let embedder = turns.plan.embedder.clone();
        let body = Box::new(move || last_words.unless_stopped(|| turns.run()));
        let thread = embedder
            .spawn(BridgeThread::Requests, body)
            .context("can't start the thread that carries out requests")?;
        Ok(Self {
            stop,
            lost,
            epoll,
            thread: Some(thread),
        })
    }

    /// What wakes it, for [`super::PerfWatch`].
    pub fn epoll(&self) -> &Arc<Epoll> {
        &self.epoll
    }

    /// Readable when it has died.
    pub fn lost(&self) -> Arc<EventFd> {
        self.lost.clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Fails when the counter is full only, and then it is readable anyway.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// Signals that the worker has ended without a stop, or has never begun.
struct SignalLost(Option<Arc<EventFd>>);

impl SignalLost {
    fn unless_stopped(mut self, run: impl FnOnce() -> std::io::Result<()>) {
        let ended = catch_unwind(AssertUnwindSafe(run));
        if matches!(ended, Ok(Ok(()))) {
            self.0 = None;
        }
    }
}

impl Drop for SignalLost {
    fn drop(&mut self) {
        if let Some(lost) = &self.0 {
            // As above.
            let _ = lost.write(1);
        }
    }
}

struct Turns<A, S, E> {
    plan: WorkerParts<A, S, E>,
    epoll: Arc<Epoll>,
    budget: Budget,
    timer: RefreshTimer,
    stopped: AtomicBool,
    /// A fact that cur_perf depends on has changed since the last look.
    changed: AtomicBool,
    rest: Rest,
    /// Begins a turn each [`run_watch::TURN`], however long one takes.
    clock: Option<TimerFd>,
}

const STOP: u64 = u64::MAX;
const CLOCK: u64 = u64::MAX - 2;

impl<A: Actuator, S: Source, E: Events> Turns<A, S, E> {
    fn new(plan: WorkerParts<A, S, E>, stop: &EventFd) -> std::io::Result<Self> {
        let epoll = Arc::new(Epoll::new()?);
        let add = |fd, data| {
            epoll.ctl(
                ControlOperation::Add,
                fd,
                EpollEvent::new(EventSet::IN, data),
            )
        };
        add(stop.as_raw_fd(), STOP)?;
        for (index, fd) in (0..).zip(plan.requests.fds()) {
            add(fd, index)?;
        }
        let clock = plan
            .run_watch
            .as_ref()
            .map(|_| TimerFd::new())
            .transpose()?;
        if let Some(clock) = &clock {
            add(clock.as_raw_fd(), CLOCK)?;
        }
        let now = Instant::now();
        Ok(Self {
            plan,
            epoll,
            budget: Budget::new(SHARE, now),
            timer: RefreshTimer::new(now),
            stopped: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            rest: Rest::default(),
            clock,
        })
    }

    fn run(mut self) -> std::io::Result<()> {
        self.keep_out_of_the_way();
        self.plan.embedder.on_thread(BridgeThread::Requests);
        self.start_clock()?;
        let mut events = [EpollEvent::default(); TURN];
        // Read between turns, when no request waits.
        let mut cpu_before = vcpufreq_host::thread_cpu_time();
        while !self.stopped.load(Relaxed) {
            let count = self.wait(&mut events)?;
            let events = &events[..count];
            let answered = events.iter().filter(|event| self.answer(event.data()));
            let answered = answered.count();
            let woken = events.iter().any(|event| event.data() != CLOCK);
            let found = self.plan.requests.finish(&self.plan.device);
            let used = vcpufreq_host::thread_cpu_time().saturating_sub(cpu_before);
            let used = charged(woken, found, used);
            self.look_when_due();
            std::thread::sleep(self.budget.after(used, Instant::now()));
            self.rest_after(found || answered > 0)?;
            cpu_before = vcpufreq_host::thread_cpu_time();
        }
        Ok(())
    }

    fn wait(&self, events: &mut [EpollEvent]) -> std::io::Result<usize> {
        let mut wait = self
            .timer
            .due_at()
            .saturating_duration_since(Instant::now());
        if self.plan.requests.is_unfinished() {
            wait = wait.min(FINISH);
        }
        // Up to the next millisecond, or the last one would be spent spinning.
        let wait = match self.rest.is_asleep() {
            true => -1,
            false => i32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(i32::MAX),
        };
        match self.epoll.wait(wait, events) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(0),
            waited => waited,
        }
    }

    /// Whether it may have been a request.
    fn answer(&mut self, what: u64) -> bool {
        let run_watch = self.plan.run_watch.as_ref();
        match what {
            STOP => self.stopped.store(true, Relaxed),
            CHANGED => self.changed.store(true, Relaxed),
            // Starts its next ms.
            CLOCK => drop(self.clock.as_mut().map(TimerFd::wait)),
            ran if run_watch.is_some_and(|watch| watch.hears(ran)) => self.rest.vcpu_runs(),
            _ => {
                if let Ok(index) = usize::try_from(what) {
                    self.plan.requests.drain_one(index, &self.plan.device);
                }
                return true;
            }
        }
        false
    }

    /// Puts the worker to sleep after a while without a request. A vCPU that runs wakes it.
    fn rest_after(&mut self, had_request: bool) -> std::io::Result<()> {
        let Some(watch) = &self.plan.run_watch else {
            return Ok(());
        };
        let slept = self.rest.is_asleep();
        // A request of before the events were armed is found by the last look.
        if self.rest.after_turn(had_request, Instant::now()) && watch.arm() {
            let found = self.plan.requests.finish(&self.plan.device);
            self.rest.sleep_unless(found, Instant::now());
        }
        match (slept, self.rest.is_asleep()) {
            (true, false) => self.start_clock(),
            (false, true) => Ok(self.clock.as_mut().map_or(Ok(()), TimerFd::clear)?),
            _ => Ok(()),
        }
    }

    fn start_clock(&mut self) -> std::io::Result<()> {
        let turn = run_watch::TURN;
        let clock = self.clock.as_mut();
        Ok(clock.map_or(Ok(()), |clock| clock.reset(turn, Some(turn)))?)
    }

    fn look_when_due(&mut self) {
        if self.changed.swap(false, Relaxed) {
            self.timer.hear_of_a_change();
        }
        let started = Instant::now();
        if started < self.timer.due_at() {
            return;
        }
        let cpu_before = vcpufreq_host::thread_cpu_time();
        for (vcpu, has_thread) in (0..=u16::MAX).map(VcpuId).zip(&*self.plan.vcpus) {
            if has_thread.load(Relaxed) {
                self.plan.device.refresh(vcpu);
            }
        }
        let took = vcpufreq_host::thread_cpu_time().saturating_sub(cpu_before);
        self.timer.done(started, took);
    }

    /// Best effort: without these the worker is a thread like any other.
    fn keep_out_of_the_way(&self) {
        let _ = vcpufreq_host::stay_off(&self.plan.avoid);
        let _ = vcpufreq_host::clamp_current_thread_to_zero();
    }
}

/// What of a turn's time requests have used. If the time alone began the turn, there is one a ms at
/// most, whatever a guest does.
fn charged(woken: bool, found: bool, used: Duration) -> Duration {
    match woken || found {
        true => used,
        false => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    //! A worker that never began is lost. A turn counts if something woke it or if it found a request.
    use std::thread;

    use vcpufreq_device::fakes::NullActuator;

    use super::super::PendingWrites;
    use super::super::fake_device::fake_device;
    use super::*;
    use crate::embedder::BridgeWork;

    /// Its threads end before they begin, as one that can't be confined.
    #[derive(Debug)]
    struct Confines;

    impl Embedder for Confines {
        fn warn(&self, _: &str) {}

        fn spawn(&self, _: BridgeThread, body: BridgeWork) -> std::io::Result<JoinHandle<()>> {
            thread::Builder::new().spawn(move || drop(body))
        }
    }

    #[test]
    fn a_look_that_finds_nothing_is_free() {
        let used = Duration::from_micros(50);
        let of = |woken, found| charged(woken, found, used);
        assert_eq!(of(false, false), Duration::ZERO);
        assert_eq!([of(true, false), of(false, true)], [used; 2]);
    }

    #[test]
    fn a_worker_that_never_began_is_lost() {
        let worker = Worker::start(WorkerParts {
            requests: PendingWrites::new(vec![], vec![]),
            device: fake_device(1, NullActuator),
            vcpus: [AtomicBool::new(true)].into(),
            avoid: Vec::new(),
            embedder: Arc::new(Confines),
            run_watch: None,
        });
        let mut worker = worker.unwrap();
        worker.thread.take().unwrap().join().unwrap();
        assert_eq!(worker.lost().read().unwrap(), 1);
    }
}
