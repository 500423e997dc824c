// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host lowers the maximum of its big CPUs below what the little ones give, and takes that back.
//! The guest's policy follows within a bound, and heavy tasks leave the big CPUs and come back as
//! they do on the host.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::Deeds;
use crate::harness::plan::{Plan, set_governor};
use crate::harness::policy::Policy;
use crate::harness::sysfs::{self, CPUFREQ};
use crate::harness::vm::Vm;
use crate::harness::wait::settled;
use crate::scenarios::models::speed::SPEED_MODEL;

/// The host is looked at each second, by the guest four times a second.
const WITHIN: Duration = Duration::from_millis(1_500);
/// As many as there are big CPUs. Each wakes every 11 ms, or later on a slower CPU: it fits none.
const TASKS: [&str; 2] = ["one", "two"];
/// About 10 ms at full speed, then 1 ms.
const TASK: &str = "roaming 1000000 1000";
/// For the scheduler to act, and then to be watched.
const SETTLE: Duration = Duration::from_secs(1);
const WATCH: Duration = Duration::from_secs(4);
/// Under the cap tasks move seldom: in two draws a share of 4 s was 0 and 0.23 on the host.
const WATCH_CAPPED: Duration = Duration::from_secs(20);
/// What a share of the guest may differ from the host's.
const TOLERANCE: f64 = 0.2;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let [little, big] = &policies[..] else {
        anyhow::bail!("this scenario is for a host with two policies")
    };
    let capped = big.min();
    ensure!(big.util(capped) < little.capacity, "no cap is low enough");
    sysfs::write(SPEED_MODEL, 1)?;
    let host = on_host(big, capped)?;
    let guest = in_guest(plan, [little, big], capped)?;
    sysfs::write(SPEED_MODEL, 0)?;
    let phases = ["free", "capped", "free_again"];
    let rows = phases.iter().zip(host.iter().zip(&guest.shares));
    let rows: Vec<_> = rows
        .map(|(phase, (host, guest))| json!({ "phase": phase, "host": host, "guest": guest }))
        .collect();
    let close = |(host, guest): (&f64, &f64)| (host - guest).abs() <= TOLERANCE;
    let alike = host.iter().zip(&guest.shares).all(close);
    let leaves = host[0].min(host[2]) - host[1] > 0.5;
    let maxima = [capped, big.max()] == guest.maxima && guest.others == [little.max(); 2];
    let soon = guest.followed_after.iter().all(|after| *after <= WITHIN);
    let figures = json!({
        "share_on_big_cpus": rows, "capped_khz": capped,
        "guest_maxima_khz": guest.maxima, "of_the_little_cpus_khz": guest.others,
        "followed_after_ms": guest.followed_after.map(|after| after.as_millis()),
        "within_ms": WITHIN.as_millis(),
    });
    Ok(LabVerdict::with_figures(figures)
        .check("shares as on the host", alike, &rows)
        .check("tasks leave the big CPUs", leaves, &rows)
        .check("maxima follow", maxima, (guest.maxima, guest.others))
        .check("they follow soon", soon, guest.followed_after))
}

fn set_max(policy: &Policy, khz: u32) -> Result<()> {
    sysfs::write(format!("{}/scaling_max_freq", policy.path), khz)
}

/// The tasks' share on the big CPUs: before, during and after the cap.
fn on_host(big: &Policy, capped: u32) -> Result<Vec<f64>> {
    let mut deeds = Deeds::default();
    let mut ask = |line: &str| deeds.carry_out(line);
    for task in TASKS {
        ask(&format!("start {task} {TASK}"))?;
    }
    let mut shares = Vec::new();
    for khz in [big.max(), capped, big.max()] {
        set_max(big, khz)?;
        shares.push(share((big, khz), &mut ask)?);
    }
    for task in TASKS {
        ask(&format!("stop {task}"))?;
    }
    Ok(shares)
}

/// The same in a guest, and how it saw the cap.
struct InGuest {
    shares: Vec<f64>,
    /// Of the big CPUs' policy under the cap and after it.
    maxima: [u32; 2],
    /// Of the little CPUs' policy.
    others: [u32; 2],
    followed_after: [Duration; 2],
}

fn in_guest(plan: &Plan, [little, big]: [&Policy; 2], capped: u32) -> Result<InGuest> {
    // vCPU n is on pCPU n: what is a big CPU is one in both.
    let pcpus = [&little.cpus[..], &big.cpus].concat();
    let in_order = (0..).zip(&pcpus).all(|(vcpu, pcpu)| vcpu == *pcpu);
    ensure!(in_order, "CPUs out of order");
    let mut vm = plan.guest(&plan.mirroring(&pcpus))?;
    let policy = |policy: &Policy| format!("{CPUFREQ}/policy{}/scaling_max_freq", policy.cpu());
    let (of_little, of_big) = (policy(little), policy(big));
    for first in [little, big] {
        set_governor(&mut vm, usize::try_from(first.cpu())?, "schedutil")?;
    }
    for task in TASKS {
        vm.ask(format!("start {task} {TASK}"))?;
    }
    let mut shares = vec![share((big, big.max()), |line| vm.ask(line))?];
    let (mut maxima, mut others) = ([0; 2], [0; 2]);
    let mut followed_after = [Duration::ZERO; 2];
    for (step, khz) in [capped, big.max()].into_iter().enumerate() {
        set_max(big, khz)?;
        let start = Instant::now();
        let seen = settled(2 * WITHIN, || number(&mut vm, &of_big), |max| *max == khz)?;
        (maxima[step], followed_after[step]) = (seen, start.elapsed());
        others[step] = number(&mut vm, &of_little)?;
        shares.push(share((big, khz), |line| vm.ask(line))?);
    }
    for task in TASKS {
        vm.ask(format!("stop {task}"))?;
    }
    vm.quit()?;
    Ok(InGuest {
        shares,
        maxima,
        others,
        followed_after,
    })
}

fn number(vm: &mut Vm, path: &str) -> Result<u32> {
    Ok(u32::try_from(vm.number(format!("read {path}"))?)?)
}

/// The share of the tasks' time that they spend on the CPUs of a policy with this maximum.
fn share(
    (policy, max): (&Policy, u32),
    mut ask: impl FnMut(&str) -> Result<String>,
) -> Result<f64> {
    let mut watched = [0_u64; 2];
    sleep(SETTLE);
    let before = places(&mut ask)?;
    let capped = max < policy.max();
    sleep(if capped { WATCH_CAPPED } else { WATCH });
    let spent = places(&mut ask)?.into_iter().zip(before);
    for (cpu, (now, before)) in (0..).zip(spent) {
        let there = usize::from(policy.cpus.contains(&cpu));
        watched[there] += now - before;
    }
    let [elsewhere, there] = watched.map(|ns| ns as f64);
    Ok(there / (there + elsewhere))
}

/// Nanoseconds of all tasks on each CPU.
fn places(mut ask: impl FnMut(&str) -> Result<String>) -> Result<Vec<u64>> {
    let mut sums = Vec::new();
    for task in TASKS {
        let answer = ask(&format!("places {task}"))?;
        let numbers = answer.split(' ').map(str::parse::<u64>);
        let numbers = numbers
            .collect::<Result<Vec<_>, _>>()
            .context(answer.clone())?;
        sums.resize(numbers.len(), 0);
        sums.iter_mut()
            .zip(numbers)
            .for_each(|(sum, ns)| *sum += ns);
    }
    Ok(sums)
}
