// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long a guest's requests hold the lock of the kernel's that all clamps share (`uclamp_mutex` in
//! kernel/sched/core.c), by the time that the function takes which holds it for most of its time.
//! The probes' own time is in it.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::{Instance, events};

use crate::harness::trace::probe::Probe;

const HOLDS: &str = "cpu_uclamp_min_write";
const WATCHED: Duration = Duration::from_secs(2);

/// Of the clamps that are written within [`WATCHED`].
pub fn watch() -> Result<Value> {
    let _probes = [
        Probe::set('p', "begin", HOLDS)?,
        Probe::set('r', "end", HOLDS)?,
    ];
    let trace = Instance::create("holds", 2048)?;
    trace.enable(&["lab/begin", "lab/end"])?;
    trace.start()?;
    std::thread::sleep(WATCHED);
    trace.stop()?;
    let text = trace.text()?;
    trace.remove()?;
    let mut took = durations(&text);
    took.sort_unstable();
    let longest = took.last().context("no clamp was written")?;
    let (count, sum) = (u64::try_from(took.len())?, took.iter().sum::<u64>());
    Ok(json!({
        "holds": count, "mean_us": sum / count, "longest_us": longest,
        "share_percent": sum as f64 / WATCHED.as_micros() as f64 * 100.0,
    }))
}

/// In µs, of each thread's call.
fn durations(text: &str) -> Vec<u64> {
    let (mut begun, mut took) = (HashMap::new(), Vec::new());
    for line in events(text) {
        if line.event == "begin" {
            begun.insert(line.thread, line.time_us);
        } else if let Some(begin) = begun.remove(line.thread) {
            took.push(line.time_us - begin);
        }
    }
    took
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_two_threads_are_kept_apart() {
        let text = " a-1 [0] . 1.000010: begin: (f)\n b-2 [1] . 1.000012: begin: (f)\n \
                    a-1 [2] . 1.000030: end: (f)\n b-2 [1] . 1.000020: end: (f)\n \
                    c-3 [1] . 1.000040: end: (f)\n";
        assert_eq!(durations(text), [20, 8]);
    }
}
