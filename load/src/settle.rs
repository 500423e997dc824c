// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! To bring a machine's governors down: a CPU that idles keeps the frequency
//! that it had, because a governor decides at scheduler events alone. So each
//! CPU wakes briefly a number of times, which is also what makes utilization
//! that a thread's sleep preserves (util_est) decay.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::work::{cpu_list, pin_to};

const CPU: &str = "/sys/devices/system/cpu";

/// Each online CPU wakes `wakes` times, `gap` apart, one after the other.
pub fn wake_all(wakes: u32, gap: Duration) -> Result<()> {
    let online =
        fs::read_to_string(format!("{CPU}/online")).context("reading which CPUs are online")?;
    let cpus = cpu_list(&online)?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = cpus
            .iter()
            .map(|&cpu| {
                scope.spawn(move || {
                    pin_to(&[cpu])?;
                    (0..wakes).for_each(|_| sleep(gap));
                    Ok::<_, anyhow::Error>(())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
    })
}

/// The policies that aren't at their minimum, as `policy0:1800000>600000`;
/// empty when all are, or there are none.
pub fn above_minimum() -> Result<String> {
    let Ok(entries) = fs::read_dir(format!("{CPU}/cpufreq")) else {
        return Ok(String::new());
    };
    let mut above = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let khz = |file: &str| -> Option<u32> {
            fs::read_to_string(path.join(file))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        // A policy without a CPU online tells nothing.
        if let (Some(now), Some(min)) = (khz("scaling_cur_freq"), khz("scaling_min_freq"))
            && now > min
        {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            above.push(format!("{name}:{now}>{min}"));
        }
    }
    above.sort();
    Ok(above.join(" "))
}
