// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The worker: one thread that carries out the requests of all vCPUs and keeps
//! cur_perf in their pages true.
//!
//! Requests take at most a twentieth of the time: after a turn it sleeps 20 times
//! as long as the turn took of its CPU, unless it had been idle for as long
//! before, up to a reserve. A turn that was charged for more than it did (an
//! interrupt, a hypervisor below) doesn't keep the next request waiting for
//! longer than [`NAP`]: what is left of its debt is paid by later naps. It has no part in the vCPUs' cgroups, its own clamp
//! is 0 so that it neither lifts nor holds a pCPU's frequency, and it stays off
//! the pCPUs that vCPUs are pinned to where there are others.

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use vcpufreq_device::{VcpuId, host};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::changes::CHANGED;
use super::{Inboxes, Requests};
use crate::vm::sys;

/// How often cur_perf is looked after, at most; a tick of a host with HZ = 250,
/// which is how often its frequency changes.
const REFRESH: Duration = Duration::from_millis(4);
/// How soon after a look the next one comes, when there was a change.
const REFRESH_AGAIN: Duration = Duration::from_micros(250);
/// Part of the time that the worker may run: one in this many.
const SHARE: u32 = 20;
/// What it may run at once after it has been idle.
const RESERVE: Duration = Duration::from_millis(2);
/// The longest that a request waits for the worker's share.
const NAP: Duration = Duration::from_millis(10);
/// Debt that is remembered, in time of the CPU.
const DEBT: Duration = Duration::from_millis(10);
/// When to go on with an inbox that was left unfinished.
const FINISH: Duration = Duration::from_millis(1);
/// Events of one turn; further ones are the next turn's.
const TURN: usize = 64;

/// What the worker is made of.
pub struct Plan {
    /// Where requests come from.
    pub inboxes: Arc<Inboxes>,
    /// Where they go.
    pub device: Arc<dyn Requests>,
    /// How many vCPUs there are threads of: the cur_perf of these is known.
    pub vcpus: Arc<AtomicU16>,
    /// pCPUs that it had better not run on.
    pub avoid: Vec<u32>,
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
    /// What the host said: no more threads or open files.
    pub fn start(plan: Plan) -> anyhow::Result<Self> {
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let stop = Arc::new(event().context("can't make an eventfd")?);
        let lost = Arc::new(event().context("can't make an eventfd")?);
        let turns = Turns::new(plan, &stop).context("can't watch the guest's requests")?;
        let epoll = turns.epoll.clone();
        let last_words = LastWords(lost.clone());
        let thread = Builder::new().name("requests".to_owned());
        let thread = thread
            .spawn(move || last_words.unless_stopped(|| turns.run()))
            .context("can't start the thread that carries out requests")?;
        Ok(Self {
            stop,
            lost,
            epoll,
            thread: Some(thread),
        })
    }

    /// What wakes it, for [`super::Changes`].
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

/// Says so when the worker ends without having been told to.
struct LastWords(Arc<EventFd>);

impl LastWords {
    fn unless_stopped(&self, run: impl FnOnce() -> std::io::Result<()>) {
        let ended = catch_unwind(AssertUnwindSafe(run));
        if !matches!(ended, Ok(Ok(()))) {
            // As above.
            let _ = self.0.write(1);
        }
    }
}

struct Turns {
    plan: Plan,
    epoll: Arc<Epoll>,
    budget: Budget,
    /// When cur_perf is to be looked after again, and from when on it may be.
    refresh_at: Instant,
    refresh_not_before: Instant,
    stopped: AtomicBool,
    /// Something that cur_perf depends on has changed since the last look.
    changed: AtomicBool,
}

const STOP: u64 = u64::MAX;

impl Turns {
    fn new(plan: Plan, stop: &EventFd) -> std::io::Result<Self> {
        let epoll = Arc::new(Epoll::new()?);
        let add = |fd, data| {
            epoll.ctl(
                ControlOperation::Add,
                fd,
                EpollEvent::new(EventSet::IN, data),
            )
        };
        add(stop.as_raw_fd(), STOP)?;
        for (index, inbox) in (0..).zip(plan.inboxes.fds()) {
            add(inbox, index)?;
        }
        let now = Instant::now();
        Ok(Self {
            plan,
            epoll,
            budget: Budget::new(now),
            refresh_at: now,
            refresh_not_before: now,
            stopped: AtomicBool::new(false),
            changed: AtomicBool::new(false),
        })
    }

    fn run(mut self) -> std::io::Result<()> {
        self.keep_out_of_the_way();
        let mut events = [EpollEvent::default(); TURN];
        while !self.stopped.load(Relaxed) {
            let count = self.wait(&mut events)?;
            let cpu_before = sys::thread_cpu_time();
            for event in &events[..count] {
                self.answer(event.data());
            }
            self.plan.inboxes.finish(&*self.plan.device);
            // Looks have a bound of their own.
            let used = sys::thread_cpu_time().saturating_sub(cpu_before);
            self.refresh_when_due();
            std::thread::sleep(self.budget.after(used, Instant::now()));
        }
        Ok(())
    }

    fn wait(&self, events: &mut [EpollEvent]) -> std::io::Result<usize> {
        let mut wait = self.refresh_at.saturating_duration_since(Instant::now());
        if self.plan.inboxes.is_unfinished() {
            wait = wait.min(FINISH);
        }
        // Up to the next millisecond, or the last one would be spent spinning.
        let wait = i32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        match self.epoll.wait(wait, events) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(0),
            waited => waited,
        }
    }

    fn answer(&self, what: u64) {
        match what {
            STOP => return self.stopped.store(true, Relaxed),
            CHANGED => return self.changed.store(true, Relaxed),
            _ => {}
        }
        if let Ok(index) = usize::try_from(what) {
            self.plan.inboxes.drain_one(index, &*self.plan.device);
        }
    }

    /// A look takes a few microseconds for each vCPU; many vCPUs are looked
    /// after less often, so that it stays a twentieth of the time, or a tenth
    /// while something changes.
    fn refresh_when_due(&mut self) {
        let started = Instant::now();
        let cpu_before = sys::thread_cpu_time();
        if self.changed.swap(false, Relaxed) {
            self.refresh_at = self.refresh_at.min(self.refresh_not_before);
        }
        if started < self.refresh_at {
            return;
        }
        for vcpu in (0..self.plan.vcpus.load(Relaxed)).map(VcpuId) {
            self.plan.device.refresh(vcpu);
        }
        let took = sys::thread_cpu_time().saturating_sub(cpu_before);
        self.refresh_at = started + REFRESH.max(took * 20);
        self.refresh_not_before = started + REFRESH_AGAIN.max(took * 10);
    }

    /// Best effort: without these the worker is a thread like any other.
    fn keep_out_of_the_way(&self) {
        let _ = sys::stay_off(&self.plan.avoid);
        let _ = host::clamp_current_thread_to_zero();
    }
}

/// How long the worker may still run now, and what it has run too long.
struct Budget {
    left: Duration,
    debt: Duration,
    since: Instant,
}

impl Budget {
    fn new(since: Instant) -> Self {
        Self {
            left: RESERVE,
            debt: Duration::ZERO,
            since,
        }
    }

    /// After a turn that took `used` of the CPU: how long to sleep before the
    /// next one.
    fn after(&mut self, used: Duration, now: Instant) -> Duration {
        let earned = now.saturating_duration_since(self.since) / SHARE;
        self.since = now;
        let left = (self.left + earned.saturating_sub(self.debt)).min(RESERVE);
        let debt = self.debt.saturating_sub(earned) + used.saturating_sub(left);
        self.left = left.saturating_sub(used);
        self.debt = debt.min(DEBT);
        (self.debt * SHARE).min(NAP)
    }
}

#[cfg(test)]
mod tests {
    //! The worker may run a twentieth of the time, and a reserve at once.
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_budget_is_a_twentieth_of_the_time() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        assert_eq!(budget.after(2 * MS, start), Duration::ZERO);
        assert_eq!(budget.after(MS / 4, start), 5 * MS);
        assert_eq!(budget.after(MS / 4, start + 5 * MS), 5 * MS);
        // A long idle time earns no more than the reserve.
        let later = start + 1000 * MS;
        assert_eq!(budget.after(2 * MS + MS / 4, later), 5 * MS);
    }

    #[test]
    fn a_debt_is_paid_by_naps_that_requests_can_wait_for() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        let mut nap = budget.after(RESERVE + 3 * MS, start);
        let mut slept = Duration::ZERO;
        while nap > Duration::ZERO {
            assert!(nap <= NAP);
            slept += nap;
            nap = budget.after(Duration::ZERO, start + slept);
        }
        assert_eq!(slept, 3 * MS * SHARE);
        // One that was charged for a second doesn't pay for it for ever.
        assert_eq!(budget.after(1000 * MS, start + slept), NAP);
        assert_eq!(budget.debt, DEBT);
    }
}
