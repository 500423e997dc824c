// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loads, the same on host and guest: a busy loop, a periodic one, a fixed
//! amount of work, one that goes from CPU to CPU, and a flood of register writes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
pub use vcpufreq_load::work::pin_to;
use vcpufreq_load::work::{CHUNK, spin};

/// A load that runs until it is dropped.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    turns: Arc<AtomicU64>,
    /// Nanoseconds on each CPU, of a load that may be on any.
    places: Arc<Places>,
    /// How long each of its bursts took, in ns, of such a load.
    bursts: Arc<Mutex<Vec<u64>>>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// By CPU number.
type Places = [AtomicU64; 64];

impl Load {
    /// Keeps a CPU busy.
    pub fn busy(cpu: u32) -> Self {
        Self::start(cpu, spin_until)
    }

    /// The same, as a member of the cgroup of this cgroup.threads file.
    pub fn busy_in(cpu: u32, threads: &str) -> Self {
        let threads = threads.to_owned();
        Self::start_with(
            cpu,
            move || crate::harness::sysfs::write(threads, nix::unistd::gettid()),
            spin_until,
        )
    }

    /// Busy for `busy` of each `period`.
    pub fn periodic(cpu: u32, period: Duration, busy: Duration) -> Self {
        Self::start(cpu, move |stop, turns| {
            let mut next = Instant::now();
            while !stop.load(Ordering::Relaxed) {
                let end = Instant::now() + busy;
                while Instant::now() < end {
                    spin(CHUNK);
                    turns.fetch_add(CHUNK, Ordering::Relaxed);
                }
                next += period;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
        })
    }

    /// Idle for 100 ms, busy for 8, in the middle of which it calls `change`:
    /// a request that comes while the host sees little utilization.
    pub fn changes(cpu: u32, mut change: impl FnMut() + Send + 'static) -> Self {
        let busy = || busy_for(Duration::from_millis(4));
        Self::repeat(cpu, move || {
            std::thread::sleep(Duration::from_millis(100));
            busy();
            change();
            busy();
        })
    }

    /// Works off `turns`, sleeps for `nap`, and again, wherever the scheduler has it.
    pub fn roaming(turns: u64, nap: Duration) -> Self {
        let places: Arc<Places> = Arc::new([const { AtomicU64::new(0) }; 64]);
        let its_places = Arc::clone(&places);
        let bursts: Arc<Mutex<Vec<u64>>> = Arc::default();
        let its_bursts = Arc::clone(&bursts);
        let work = move |stop: &AtomicBool, all: &AtomicU64| {
            let ns_since = |start: Instant| u64::try_from(start.elapsed().as_nanos());
            while !stop.load(Ordering::Relaxed) {
                let burst = Instant::now();
                for _ in 0..turns / CHUNK {
                    let start = Instant::now();
                    spin(CHUNK);
                    let ns = ns_since(start).unwrap_or(u64::MAX);
                    let place = sched_getcpu().ok().and_then(|cpu| its_places.get(cpu));
                    place
                        .into_iter()
                        .for_each(|place| _ = place.fetch_add(ns, Ordering::Relaxed));
                    all.fetch_add(CHUNK, Ordering::Relaxed);
                }
                if let Ok(mut bursts) = its_bursts.lock() {
                    bursts.extend(ns_since(burst));
                }
                std::thread::sleep(nap);
            }
        };
        let mut load = Self::start_first(unpin, work);
        load.places = places;
        load.bursts = bursts;
        load
    }

    /// What 99 of 100 bursts took at most since this was asked last, in ns; 0 without any.
    pub fn burst_p99(&self) -> u64 {
        let Ok(mut bursts) = self.bursts.lock() else {
            return 0;
        };
        let mut bursts = std::mem::take(&mut *bursts);
        bursts.sort_unstable();
        let at = (bursts.len() * 99).div_ceil(100).saturating_sub(1);
        bursts.get(at).copied().unwrap_or_default()
    }

    /// Nanoseconds on each CPU so far.
    pub fn places(&self) -> Vec<u64> {
        let places = self.places.iter();
        places.map(|ns| ns.load(Ordering::Relaxed)).collect()
    }

    /// Calls `turn` as fast as it goes; the one that disturbs.
    pub fn repeat(cpu: u32, mut turn: impl FnMut() + Send + 'static) -> Self {
        Self::start(cpu, move |stop, turns| {
            while !stop.load(Ordering::Relaxed) {
                turn();
                turns.fetch_add(1, Ordering::Relaxed);
            }
        })
    }

    fn start(cpu: u32, work: impl FnOnce(&AtomicBool, &AtomicU64) + Send + 'static) -> Self {
        Self::start_with(cpu, || Ok(()), work)
    }

    fn start_with(
        cpu: u32,
        first: impl FnOnce() -> Result<()> + Send + 'static,
        work: impl FnOnce(&AtomicBool, &AtomicU64) + Send + 'static,
    ) -> Self {
        let first = move || {
            pin(cpu)?;
            first()
        };
        Self::start_first(first, work)
    }

    fn start_first(
        first: impl FnOnce() -> Result<()> + Send + 'static,
        work: impl FnOnce(&AtomicBool, &AtomicU64) + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let turns = Arc::new(AtomicU64::new(0));
        let (its_stop, its_turns) = (Arc::clone(&stop), Arc::clone(&turns));
        let thread = std::thread::spawn(move || {
            first()?;
            work(&its_stop, &its_turns);
            Ok(())
        });
        Self {
            stop,
            turns,
            places: Arc::new([const { AtomicU64::new(0) }; 64]),
            bursts: Arc::default(),
            thread: Some(thread),
        }
    }

    /// Turns of its loop so far.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Ends it; an error when it never ran as asked.
    pub fn stop(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("already stopped")?;
        thread
            .join()
            .map_err(|_| anyhow!("the load's thread panicked"))??;
        Ok(self.turns())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its result matters to `stop` alone.
            let _ = thread.join();
        }
    }
}

fn spin_until(stop: &AtomicBool, turns: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        spin(CHUNK);
        turns.fetch_add(CHUNK, Ordering::Relaxed);
    }
}

/// Nanoseconds that `turns` of the loop take on this thread.
pub fn timed_work(turns: u64) -> u64 {
    let start = Instant::now();
    spin(turns);
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds that calling `turn` so many times takes on this thread.
#[inline(always)]
pub fn timed(turns: usize, mut turn: impl FnMut(usize)) -> u64 {
    let start = Instant::now();
    for number in 0..turns {
        turn(number);
    }
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Works for so long.
pub fn busy_for(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        spin(CHUNK);
    }
}

/// Median and 99th percentile, in ns, of so many turns, each after 2 ms of
/// plain work: what a turn sets off elsewhere has ended then.
pub fn times(turns: usize, mut turn: impl FnMut(usize)) -> String {
    let timed = |n| {
        let start = Instant::now();
        turn(n);
        start.elapsed().as_nanos()
    };
    apart(turns, timed)
}

/// The same of turns that return how long they took.
pub fn apart(turns: usize, mut turn: impl FnMut(usize) -> u128) -> String {
    let mut times: Vec<u128> = (0..turns)
        .map(|n| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(2) {
                spin(CHUNK);
            }
            turn(n)
        })
        .collect();
    times.sort_unstable();
    let at = |percent: usize| times.get(turns * percent / 100).copied().unwrap_or(0);
    format!("{} {}", at(50), at(99))
}

/// Nanoseconds of its own time that `turns` of the loop cost this thread:
/// interrupts are in it, other tasks aren't.
pub fn cpu_time_of_work(turns: u64) -> Result<u64> {
    let own_time = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let start = own_time()?;
    spin(turns);
    Ok(u64::try_from((own_time()? - start).as_nanos())?)
}

/// Binds the calling thread to a CPU.
pub fn pin(cpu: u32) -> Result<()> {
    pin_to(&[cpu])
}

/// Lets the calling thread run on every CPU.
pub fn unpin() -> Result<()> {
    let mut set = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        set.set(cpu)?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).context("leaving a CPU")
}

/// Never returns: a load in a process of its own.
pub fn burn_forever() {
    loop {
        spin(CHUNK);
    }
}
