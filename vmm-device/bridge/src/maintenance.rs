// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The maintenance thread. It opens the source's files anew after a read has failed (pCPUs and
//! cpufreq drivers come and go), puts rate-limited requests into force when they have a token, ends
//! ceilings that the guest no longer writes and tunings whose time is over, and checks for host
//! changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{JoinHandle, park_timeout};
use std::time::{Duration, Instant};

use vcpufreq_device::{Actuator, Device};
use vcpufreq_host::SysfsSource;

use crate::embedder::{BridgeThread, Embedder};
use crate::error::{Context, PathError};
use crate::event_stats::EventStats;

/// How often the source's files are looked after, when a read has failed, and
/// the host for what it has changed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Shortest and longest sleep between attempts to apply deferred requests.
pub const TURNS: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(50)];

/// The running thread.
pub struct MaintenanceThread {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl MaintenanceThread {
    /// Starts it for `device`. It calls `look` now and every second, and `end_tunings` when the time
    /// of the next one is over, which that returns.
    ///
    /// # Errors
    /// [`PathError::Refused`] with `EAGAIN`: the host has no more threads.
    pub fn start<A: Actuator + 'static>(
        device: Arc<Device<A, Arc<SysfsSource>, Arc<EventStats>>>,
        embedder: &Arc<dyn Embedder>,
        mut look: impl FnMut() + Send + 'static,
        end_tunings: impl Fn() -> Option<Duration> + Send + 'static,
    ) -> Result<Self, PathError> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let stats = device.events().clone();
        let watched = stats.clone();
        let on_start = embedder.clone();
        let keep = move || {
            // Without uclamp it is a thread like any other.
            let _ = vcpufreq_host::clamp_current_thread_to_zero();
            on_start.on_thread(BridgeThread::Maintenance);
            let (mut next_look, mut turn_at) = (Instant::now(), Instant::now());
            while !stopped.load(Relaxed) {
                if Instant::now() >= next_look {
                    look();
                    next_look = Instant::now() + LOOK_EVERY;
                }
                if watched.take_source_failed() {
                    device.source().refresh();
                }
                let ends = [device.lift_ceilings(), end_tunings(), Some(LOOK_EVERY)];
                let mut wait = ends.into_iter().flatten().min().unwrap_or_default();
                if Instant::now() >= turn_at {
                    // Of the limited requests until the next turn, one wakes this thread.
                    let limited = watched.take_limited();
                    let turn = device.apply_deferred().or(limited.then_some(TURNS[0]));
                    let turn = turn.map(|turn| turn.clamp(TURNS[0], TURNS[1]));
                    turn_at = Instant::now() + turn.unwrap_or_default();
                    wait = turn.unwrap_or(wait).min(wait);
                } else {
                    wait = turn_at.saturating_duration_since(Instant::now()).min(wait);
                }
                park_timeout(wait);
            }
        };
        let thread = embedder.spawn(BridgeThread::Maintenance, Box::new(keep));
        let thread = thread.context("can't start a thread")?;
        stats.wake_when_limited(thread.thread().clone());
        Ok(Self { stop, thread })
    }

    /// Ends it.
    pub fn stop(self) {
        self.stop.store(true, Relaxed);
        self.thread.thread().unpark();
        // A panic of that thread was reported when it happened.
        let _ = self.thread.join();
    }
}
