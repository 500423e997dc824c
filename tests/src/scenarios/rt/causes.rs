// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `vcpufreq rt report --trace` says was in the way of the longest latencies, on a real trace:
//! each cause is made to be there, and has to be named. A guest's exits are in `latency`.

use std::fs;
use std::process::ExitStatus;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_load::work::{CHUNK, spin};

use super::latency::{command, printed};
use crate::harness::console_commands::{insmod, rmmod};
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::{load, sys, sysfs, uclamp};

const HOLD: &str = "/sys/module/lab_hold/parameters/hold";
/// Longer than any wake-up takes without: the deepest idle state is left in 0.9 ms.
const HELD: Duration = Duration::from_millis(5);
/// Less than any wake-up from the deepest state takes: the usual may be above them all.
const SLEPT_US: &str = "500";
/// All of them.
const EACH: &str = "1";
/// Above cyclictest's.
const ABOVE: i32 = 95;
const INTRUDER: &str = "intruder";

pub fn run(_plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let cpu = *policy.cpus.last().context("no CPU")?;
    let rows = json!({
        "idle_exit": idle_exit(cpu)?,
        "interrupt": interrupt(cpu)?,
        "other_thread": other_thread(cpu)?,
        "frequency_ramp": frequency_ramp(policy, cpu)?,
        "migration": migration(cpu)?,
    });
    let held = rows.as_object().context("no rows")?;
    let held = held.values().all(|row| row["held"] == true);
    Ok(json!({ "held": held, "emulated": true, "cpu": cpu, "causes": rows }))
}

/// Without a bound a CPU sleeps deeply between wake-ups 10 ms apart: that has to be among what most of
/// the longest latencies are put down to.
fn idle_exit(cpu: u32) -> Result<Value> {
    let line = [
        "--interval-us",
        "10000",
        "--loops",
        "200",
        "--spike-us",
        SLEPT_US,
    ];
    let report = beside(cpu, &line, (0, || Ok(())))?;
    let left = |one: &Value| has(one, "idle-exit", |_| true);
    Ok(named(&report, |all| all / 2, left))
}

/// An interrupt that is handled for 5 ms.
fn interrupt(cpu: u32) -> Result<Value> {
    insmod("lab_hold", "")?;
    let text = format!("{cpu} {}", HELD.as_micros());
    let line = ["--loops", "300", "--spike-us", SLEPT_US];
    let report = beside(cpu, &line, (0, || sysfs::write(HOLD, &text)))?;
    rmmod("lab_hold")?;
    let held = |one: &Value| lasted(one, "interrupt", "Function call interrupts");
    Ok(named(&report, |all| all / 2, held))
}

/// A thread of a higher priority that is busy for 5 ms.
fn other_thread(cpu: u32) -> Result<Value> {
    let busy = || {
        sys::set_fifo_priority(ABOVE)?;
        let end = Instant::now() + HELD;
        while Instant::now() < end {
            spin(CHUNK);
        }
        Ok(())
    };
    let line = ["--loops", "300", "--spike-us", SLEPT_US];
    let report = beside(cpu, &line, (cpu, busy))?;
    let ran = |one: &Value| lasted(one, "other-thread", INTRUDER);
    Ok(named(&report, |all| all / 2, ran))
}

/// Real-time threads ask for the maximum, as they do by default, and schedutil follows at once: down
/// when it sleeps, up when it wakes. How far down it has come by then is the kernel's business.
fn frequency_ramp(policy: &Policy, cpu: u32) -> Result<Value> {
    let limit = format!("{}/schedutil/rate_limit_us", policy.path);
    let before = (sysfs::text(&limit)?, sysfs::text(uclamp::RT_DEFAULT)?);
    sysfs::write(&limit, 0)?;
    sysfs::write(uclamp::RT_DEFAULT, 1024)?;
    let line = [
        "--interval-us",
        "20000",
        "--loops",
        "20",
        "--spike-us",
        EACH,
    ];
    let report = beside(cpu, &line, (0, || Ok(())));
    sysfs::write(&limit, before.0)?;
    sysfs::write(uclamp::RT_DEFAULT, before.1)?;
    let to_max = format!(" → {} kHz", policy.max());
    let ramp = |one: &Value| has(one, "frequency-ramp", |what| what.ends_with(&to_max));
    Ok(named(&report?, |_| 0, ramp))
}

/// The measuring thread is moved to and fro while it sleeps; the kernel moves it when it wakes.
fn migration(cpu: u32) -> Result<Value> {
    let other = cpu - 1;
    let to_and_fro = || {
        let Some((pid, tid)) = measuring()? else {
            return Ok(());
        };
        let Ok(on) = last_on(pid, tid) else {
            // It has just ended.
            return Ok(());
        };
        let mut set = CpuSet::new();
        set.set(usize::try_from(if on == cpu { other } else { cpu })?)?;
        let _ended = sched_setaffinity(Pid::from_raw(tid), &set);
        Ok(())
    };
    let line = [
        "--interval-us",
        "200000",
        "--loops",
        "10",
        "--spike-us",
        EACH,
    ];
    let report = beside(cpu, &line, (0, to_and_fro))?;
    let moves = [(cpu, other), (other, cpu)];
    let moves = moves.map(|(from, to)| format!("cyclictest from CPU {from} to {to}"));
    let moved = |one: &Value| has(one, "migration", |what| moves.iter().any(|to| to == what));
    Ok(named(&report, |_| 0, moved))
}

/// Of how many of the wake-ups that were looked up this is said; whether of more than so many.
fn named(report: &Value, more_than: impl Fn(usize) -> usize, is: impl Fn(&Value) -> bool) -> Value {
    let none = Vec::new();
    let worst = report["runs"][0]["worst"].as_array().unwrap_or(&none);
    let named = worst.iter().filter(|one| is(one)).count();
    json!({
        "held": named > more_than(worst.len()), "looked_up": worst.len(), "named": named,
        "worst": longest(report),
    })
}

/// `vcpufreq rt report` of a CPU, and beside it a deed again and again on the other CPU given.
fn beside<F>(cpu: u32, line: &[&str], (on, deed): (u32, F)) -> Result<Value>
where
    F: Fn() -> Result<()> + Send,
{
    let (cpu, others) = (cpu.to_string(), format!("0-{}", cpu - 1));
    let always = [
        "--cpus", &cpu, "--others", &others, "--loads", "idle", "--bins", "10000", "--trace",
    ];
    let mut child = command(&[&always[..], line].concat())?.spawn()?;
    let go_on = move || -> Result<ExitStatus> {
        load::pin(on)?;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            deed()?;
            sleep(Duration::from_millis(20));
        }
    };
    let status = thread::scope(|scope| {
        let thread = thread::Builder::new().name(INTRUDER.to_owned());
        let thread = thread.spawn_scoped(scope, go_on)?;
        thread.join().map_err(|_| anyhow!("a thread panicked"))?
    })?;
    printed(status.code())
}

fn longest(report: &Value) -> Value {
    report["runs"][0]["worst"][0].clone()
}

/// Whether this is named, for more than half of the time for which it is made to be there: it may
/// have begun before the wake-up was due.
fn lasted(worst: &Value, kind: &str, what: &str) -> bool {
    let causes = worst["causes"].as_array().into_iter().flatten();
    let mut causes = causes.filter(|one| one["kind"] == kind && one["what"] == what);
    causes.any(|one| {
        one["us"]
            .as_u64()
            .is_some_and(|us| u128::from(us) * 2 > HELD.as_micros())
    })
}

fn has(worst: &Value, kind: &str, is: impl Fn(&str) -> bool) -> bool {
    let causes = worst["causes"].as_array().into_iter().flatten();
    let mut causes = causes.filter(|one| one["kind"] == kind);
    causes.any(|one| one["what"].as_str().is_some_and(&is))
}

/// cyclictest's real-time thread.
fn measuring() -> Result<Option<(i32, i32)>> {
    for entry in fs::read_dir("/proc")?.flatten() {
        let name = sysfs::text(entry.path().join("comm")).unwrap_or_default();
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        if name.trim() != "cyclictest" {
            continue;
        }
        for task in fs::read_dir(entry.path().join("task"))
            .into_iter()
            .flatten()
        {
            let tid = task?.file_name().to_string_lossy().parse()?;
            // SCHED_FIFO is 1.
            if field(pid, tid, 41).is_ok_and(|policy| policy == 1) {
                return Ok(Some((pid, tid)));
            }
        }
    }
    Ok(None)
}

fn last_on(pid: i32, tid: i32) -> Result<u32> {
    field(pid, tid, 39)
}

/// A field of proc_pid_stat(5), by its number there.
fn field(pid: i32, tid: i32, number: usize) -> Result<u32> {
    let stat = sysfs::text(format!("/proc/{pid}/task/{tid}/stat"))?;
    let rest = stat.rsplit_once(')').context("no name in stat")?.1;
    // The name's is the second.
    let field = rest.split_whitespace().nth(number - 3);
    Ok(field.context("a short stat")?.parse()?)
}
