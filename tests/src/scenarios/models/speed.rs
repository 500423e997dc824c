// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lab's own models, checked on the host. With the speed model on, the time of a fixed amount
//! of work is inversely proportional to the frequency. The energy counter equals power times time.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::{insmod, rmmod};
use crate::harness::plan::{Plan, let_load_decay};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm};
use crate::harness::{load, sys, sysfs};

pub const SPEED_MODEL: &str = "/sys/module/lab_cpufreq/parameters/speed_model";
/// About 50 ms at full speed.
const TURNS: u64 = 5_000_000;
/// Runs at each OPP; the median counts. Other work of the host adds to a run. If it happens while
/// the CPU spins, the next run is as much shorter: the model counts the lost time as paid.
const RUNS: usize = 9;
/// What a result may be off by.
const TOLERANCE: f64 = 0.03;

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut rows = Vec::new();
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "userspace")?;
    }
    // A CPU that leaves a deep idle state spends its exit latency in the one
    // stream of instructions that all emulated CPUs share.
    rmmod("lab_cpuidle")?;
    // Measured as a real-time task: what the host does by the way waits, or
    // is done elsewhere.
    sysfs::write("/proc/sys/kernel/sched_rt_runtime_us", -1)?;
    sys::set_fifo_priority(50)?;
    wait_until_quiet()?;
    sysfs::write(SPEED_MODEL, 1)?;
    for policy in &policies {
        for &khz in &policy.opps {
            rows.push(measure(policy, khz)?);
        }
    }
    sysfs::write(SPEED_MODEL, 0)?;
    sys::set_fifo_priority(0)?;
    insmod("lab_cpuidle", "")?;
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "schedutil")?;
    }
    // The largest CPU at its maximum is the measure of full speed.
    let full = rows.last().context("no OPP")?.work();
    let json = |row: &SpeedRow| row.json(full);
    let wrong = rows.iter().filter(|row| !row.right(full));
    let wrong: Vec<Value> = wrong.map(json).collect();
    let rows: Vec<Value> = rows.iter().map(json).collect();
    let figures = json!({ "opps": rows.len(), "rows": rows });
    Ok(LabVerdict::with_figures(figures).check_none("no OPP's speed is wrong", &wrong))
}

/// The same work in a guest without the bridge, on a vCPU that is pinned to a CPU of each
/// policy in turn. A guest has ticks and exits that the model must not slow as if
/// they were work, or everything that runs in one would look too slow.
pub fn guest(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    // As above.
    rmmod("lab_cpuidle")?;
    let mut rows = Vec::new();
    for policy in &policies {
        let setup = Setup::mirroring(&[policy.cpu()]).with(&["--no-bridge"]);
        let mut vm = Vm::boot(&setup)?;
        let governor = format!("{}/scaling_governor", policy.path);
        sysfs::write(&governor, "userspace")?;
        sysfs::write(SPEED_MODEL, 1)?;
        for &khz in &policy.opps {
            sysfs::write(format!("{}/scaling_setspeed", policy.path), khz)?;
            let_load_decay();
            let mut times = (0..=RUNS)
                .map(|_| vm.number(format!("work 0 {TURNS}")))
                .collect::<Result<Vec<_>>>()?;
            // As above: the first pays what the CPU owed.
            times.remove(0);
            times.sort_unstable();
            rows.push((policy.cpu(), khz, share(policy, khz), times[RUNS / 2]));
        }
        sysfs::write(SPEED_MODEL, 0)?;
        sysfs::write(&governor, "schedutil")?;
        vm.quit()?;
    }
    insmod("lab_cpuidle", "")?;
    let work = |row: &(u32, u32, f64, u64)| row.3 as f64 * row.2;
    let full = rows.last().map(work).context("no OPP")?;
    let right = |row: &(u32, u32, f64, u64)| (work(row) / full - 1.0).abs() <= TOLERANCE;
    let each = rows.iter().map(|row| {
        json!({
            "cpu": row.0, "khz": row.1, "work_ns": row.3,
            "time_against_inverse_speed": work(row) / full,
        })
    });
    let each: Vec<Value> = each.collect();
    let right = rows.iter().all(right);
    let figures = json!({ "opps": rows.len(), "rows": each });
    Ok(LabVerdict::with_figures(figures).check("times are as the speeds", right, &each))
}

/// The share of full speed that a policy's CPUs deliver at an OPP.
fn share(policy: &Policy, khz: u32) -> f64 {
    f64::from(policy.capacity) * f64::from(khz) / (1024.0 * f64::from(policy.reference))
}

/// Waits until no CPU has been seen busy for 3 s: the boot leaves work behind.
fn wait_until_quiet() -> Result<()> {
    let mut quiet = 0;
    for _ in 0..60 {
        let before = busy_ticks()?;
        sleep(Duration::from_secs(1));
        quiet = if busy_ticks()? == before {
            quiet + 1
        } else {
            0
        };
        if quiet == 3 {
            return Ok(());
        }
    }
    anyhow::bail!("the host does not get quiet")
}

/// Ticks that found a CPU in user or kernel mode, over all CPUs.
fn busy_ticks() -> Result<u64> {
    let text = sysfs::text("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    // cpu, user, nice, system, idle ... of proc_stat(5).
    line.split_whitespace()
        .skip(1)
        .take(3)
        .try_fold(0, |sum, word| Ok(sum + word.parse::<u64>()?))
}

/// One OPP.
struct SpeedRow {
    cpu: u32,
    khz: u32,
    /// Share of full speed that the CPU delivers at it.
    share: f64,
    /// Time of the fixed work.
    ns: u64,
    /// Counted energy, and busy time that it was counted over.
    uj: u64,
    busy_ns: u64,
    /// Power at this OPP, from the device tree.
    uw: u64,
}

fn measure(policy: &Policy, khz: u32) -> Result<SpeedRow> {
    sysfs::write(format!("{}/scaling_setspeed", policy.path), khz)?;
    let_load_decay();
    let cpu = policy.cpu();
    load::pin(cpu)?;
    // What waited for this CPU is done, what the CPU owed is paid.
    load::cpu_time_of_work(TURNS)?;
    let before = energy_uj(policy)?;
    let mut busy_ns = 0;
    let mut times = Vec::new();
    for _ in 0..RUNS {
        let ns = load::cpu_time_of_work(TURNS)?;
        busy_ns += ns;
        times.push(ns);
        sleep(Duration::from_millis(20));
    }
    let uj = energy_uj(policy)?.saturating_sub(before);
    times.sort_unstable();
    Ok(SpeedRow {
        cpu,
        khz,
        share: share(policy, khz),
        ns: times[RUNS / 2],
        uj,
        busy_ns,
        uw: power_uw(policy, khz)?,
    })
}

impl SpeedRow {
    /// Work that was done in the time, in ns at full speed.
    fn work(&self) -> f64 {
        self.ns as f64 * self.share
    }

    fn right(&self, full: f64) -> bool {
        let near = |value: f64, wanted: f64| (value / wanted - 1.0).abs() <= TOLERANCE;
        near(self.work(), full) && near(self.uj as f64, self.expected_uj())
    }

    fn expected_uj(&self) -> f64 {
        self.uw as f64 * self.busy_ns as f64 / 1e9
    }

    fn json(&self, full: f64) -> Value {
        json!({
            "cpu": self.cpu, "khz": self.khz, "work_ns": self.ns,
            "time_against_inverse_speed": self.work() / full,
            "energy_uj": self.uj, "energy_against_power_times_time": self.uj as f64 / self.expected_uj(),
        })
    }
}

/// Energy that the lab's driver counted for a policy.
pub fn energy_uj(policy: &Policy) -> Result<u64> {
    sysfs::number(format!("{}/lab_energy_uj", policy.path))
}

/// Power of an OPP, from the host's device tree.
pub fn power_uw(policy: &Policy, khz: u32) -> Result<u64> {
    let cpu = policy.cpu();
    let tables = "/proc/device-tree";
    let handle = std::fs::read(format!("{tables}/cpus/cpu@{cpu:x}/operating-points-v2"))?;
    for entry in std::fs::read_dir(tables)?.flatten() {
        if std::fs::read(entry.path().join("phandle")).is_ok_and(|own| own == handle) {
            let opp = entry.path().join(format!("opp-{}", u64::from(khz) * 1000));
            let bytes = std::fs::read(opp.join("opp-microwatt"))?;
            return Ok(u32::from_be_bytes(*bytes.first_chunk().context("opp-microwatt")?).into());
        }
    }
    anyhow::bail!("no OPP table of CPU {cpu} in the device tree")
}
