// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The unit of work, the clock, and where a thread may run.

use std::hint::black_box;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// Turns between two looks at the clock or the stop flag.
pub const CHUNK: u64 = 2_000;

/// A dependent chain that the compiler can't shorten.
pub fn spin(turns: u64) {
    let mut value = 1_u64;
    for turn in 0..turns {
        value = black_box(
            value
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(turn),
        );
    }
    black_box(value);
}

/// CLOCK_MONOTONIC in ns; 0 if there were none, which Linux excludes.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Lets the calling thread run on these CPUs alone.
pub fn pin_to(cpus: &[u32]) -> Result<()> {
    pin_thread(0, cpus)
}

/// Lets a thread run on these CPUs alone; 0 is the calling one.
pub fn pin_thread(tid: i32, cpus: &[u32]) -> Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(usize::try_from(cpu)?)?;
    }
    sched_setaffinity(Pid::from_raw(tid), &set)
        .with_context(|| format!("binding thread {tid} to CPUs {cpus:?}"))
}
