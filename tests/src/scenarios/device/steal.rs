// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process of the host's runs where one of two vCPUs is. By the driver the guest's scheduler learns
//! how much of that vCPU is left; once the process has ended, it has all of its capacity again. How
//! three tasks fare beside it, with and without the driver, is reported.
//!
//! All emulated CPUs share one stream of instructions: what a CPU doesn't do, others do faster. So no
//! throughput is compared here, but how the tasks share what there is.

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use vcpufreq_load::work::pin_thread;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::trace::TRACING;
use crate::harness::vm::Vm;

const TASKS: [&str; 3] = ["one", "two", "three"];
/// 10 ms of work at full speed, then 1 ms of sleep.
const TASK: &str = "roaming 1000000 1000";
/// For the schedulers to act, and then to be watched.
const SETTLE: Duration = Duration::from_millis(1_500);
const WATCH: Duration = Duration::from_secs(6);
/// Of a CPU's capacity: the process takes two thirds. To the host it weighs as much as all vCPUs.
const TAKEN: std::ops::RangeInclusive<u32> = 600..=760;

/// What the tasks do beside the process.
#[derive(Debug, serde::Serialize)]
struct Shares {
    turns: Vec<u64>,
    /// What 99 of 100 bursts of each take at most.
    burst_p99_us: Vec<u64>,
    /// Of the least and the most turns.
    fairness: f64,
    /// Of all tasks' time, on the vCPU that has the process beside it.
    there: f64,
    /// What the scheduler took from each vCPU's capacity, in order.
    pressures: [Vec<u32>; 2],
}

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let [first, second, ..] = policies.last().context("no policy")?.cpus[..] else {
        bail!("this scenario is for a host with two big CPUs")
    };
    let untold = in_guest(Vm::boot(&plan.mirroring(&[first, second]))?, first)?;
    let told = in_guest(plan.guest(&plan.mirroring(&[first, second]))?, first)?;
    let [there, elsewhere] = &told.pressures;
    let mut taken = there.clone();
    taken.sort_unstable();
    let median = taken.get(taken.len() / 2).copied().unwrap_or_default();
    let given_back = there.last() == Some(&0);
    let nothing = untold.pressures.iter().all(Vec::is_empty);
    let figures = json!({ "untold": untold, "told": told });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "the share that the host takes is taken",
            TAKEN.contains(&median),
            &told,
        )
        .check("it is given back", given_back, there)
        .check("nothing of the other vCPU", elsewhere.is_empty(), elsewhere)
        .check("untold, nothing is taken", nothing, &untold))
}

fn in_guest(mut vm: Vm, first: u32) -> Result<Shares> {
    vm.ask(format!("write {TRACING}/events/hw_pressure/enable 1"))?;
    for task in TASKS {
        vm.ask(format!("start {task} {TASK}"))?;
    }
    let mut hog = Command::new("/init").arg("burn").spawn()?;
    let beside = beside(&mut vm, &hog, first);
    hog.kill()?;
    hog.wait()?;
    let mut shares = beside?;
    sleep(SETTLE);
    shares.pressures = pressures(&mut vm)?;
    for task in TASKS {
        vm.ask(format!("stop {task}"))?;
    }
    vm.quit()?;
    Ok(shares)
}

fn beside(vm: &mut Vm, hog: &Child, pcpu: u32) -> Result<Shares> {
    pin_thread(i32::try_from(hog.id())?, &[pcpu])?;
    sleep(SETTLE);
    let before = so_far(vm)?;
    sleep(WATCH);
    let after = so_far(vm)?;
    let turns: Vec<u64> = after
        .iter()
        .zip(&before)
        .map(|(now, then)| now.0 - then.0)
        .collect();
    let spent = |vcpu: usize| -> u64 {
        let tasks = after.iter().zip(&before);
        tasks.map(|(now, then)| now.1[vcpu] - then.1[vcpu]).sum()
    };
    let [there, elsewhere] = [0, 1].map(|vcpu| spent(vcpu) as f64);
    let least = turns.iter().min().copied().unwrap_or_default();
    let most = turns.iter().max().copied().unwrap_or_default();
    let p99 = |task| anyhow::Ok(vm.number(format!("burst-p99 {task}"))? / 1000);
    Ok(Shares {
        burst_p99_us: TASKS.into_iter().map(p99).collect::<Result<_>>()?,
        fairness: least as f64 / most as f64,
        there: there / (there + elsewhere),
        turns,
        pressures: Default::default(),
    })
}

/// The turns of each task, and its nanoseconds on each vCPU.
fn so_far(vm: &mut Vm) -> Result<Vec<(u64, [u64; 2])>> {
    let of_task = |task: &str| {
        let turns = vm.number(format!("turns {task}"))?;
        let places = vm.ask(format!("places {task}"))?;
        let mut places = places.split(' ').map(str::parse);
        let mut next = || places.next().context("two CPUs").and_then(|ns| Ok(ns?));
        Ok::<_, anyhow::Error>((turns, [next()?, next()?]))
    };
    TASKS.into_iter().map(of_task).collect()
}

/// From the trace of each vCPU.
fn pressures(vm: &mut Vm) -> Result<[Vec<u32>; 2]> {
    let trace = vm.ask(format!("read {TRACING}/trace"))?;
    let mut found = [Vec::new(), Vec::new()];
    for line in trace.split("\\n") {
        let Some((_, event)) = line.split_once("hw_pressure_update: cpu=") else {
            continue;
        };
        let (vcpu, pressure) = event
            .split_once(" hw_pressure=")
            .context(event.to_owned())?;
        let of_vcpu = found.get_mut(vcpu.parse::<usize>()?).context("two vCPUs")?;
        of_vcpu.push(pressure.trim().parse()?);
    }
    Ok(found)
}
