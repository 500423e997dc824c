// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's idle states: left alone a CPU enters the deep ones, and a limit
//! to its wake-up latency keeps it out of those that take longer. And what else
//! its drivers tell the kernel: see [`host_driver`].

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::host_driver;
use crate::harness::load;
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::sysfs;

/// Sleeps of 20 ms, each long enough for the deepest state to pay.
const SLEEPS: u32 = 50;
/// Between the exit latencies of the deepest state and of the one above it.
const LIMIT_US: u64 = 200;

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let cpu = policies.last().map_or(0, Policy::cpu);
    load::pin(cpu)?;
    let limit = format!("/sys/devices/system/cpu/cpu{cpu}/power/pm_qos_resume_latency_us");
    let free = entered(cpu)?;
    sysfs::write(&limit, LIMIT_US)?;
    let limited = entered(cpu)?;
    sysfs::write(&limit, 0)?;
    let slow = |states: &[IdleState]| -> u64 {
        states
            .iter()
            .filter(|state| state.latency_us > LIMIT_US)
            .map(|state| state.times)
            .sum()
    };
    let all: u64 = limited.iter().map(|state| state.times).sum();
    let statistics = host_driver::statistics(&policies)?;
    let models = host_driver::energy_models(&policies)?;
    let rows = [&statistics, &models];
    let rows = rows.into_iter().flat_map(Value::as_array).flatten();
    let json = |states: &[IdleState]| states.iter().map(IdleState::json).collect::<Vec<_>>();
    let (free_slow, limited_slow) = (slow(&free), slow(&limited));
    let (free, limited) = (json(&free), json(&limited));
    let figures = json!({
        "statistics": statistics, "energy_models": models,
        "cpu": cpu, "limit_us": LIMIT_US, "free": free, "limited": limited,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("deep states without a limit", free_slow > 0, &free)
        .check("none with it", limited_slow == 0, &limited)
        .check("others with it", all > 0, &limited)
        .check_rows("statistics and energy models", rows))
}

/// How often a state was entered.
struct IdleState {
    latency_us: u64,
    times: u64,
}

impl IdleState {
    fn json(&self) -> Value {
        json!({ "exit_latency_us": self.latency_us, "entered": self.times })
    }
}

/// Sleeps, and counts the states that the CPU went into meanwhile.
fn entered(cpu: u32) -> Result<Vec<IdleState>> {
    // A limit is seen when the CPU next chooses a state.
    sleep(Duration::from_millis(20));
    let before = states(cpu)?;
    for _ in 0..SLEEPS {
        sleep(Duration::from_millis(20));
    }
    let after = states(cpu)?;
    let pairs = before.iter().zip(after);
    Ok(pairs
        .map(|(old, new)| IdleState {
            times: new.times - old.times,
            ..new
        })
        .collect())
}

fn states(cpu: u32) -> Result<Vec<IdleState>> {
    let mut found = Vec::new();
    loop {
        let path = format!(
            "/sys/devices/system/cpu/cpu{cpu}/cpuidle/state{}",
            found.len()
        );
        if !std::path::Path::new(&path).exists() {
            return Ok(found);
        }
        found.push(IdleState {
            latency_us: sysfs::number(format!("{path}/latency"))?,
            times: sysfs::number(format!("{path}/usage"))?,
        });
    }
}
