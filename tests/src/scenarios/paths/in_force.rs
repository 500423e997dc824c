// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `ioeventfd`: how long after a guest's write its clamp is in force,
//! with the worker's CPU idle. From the host's trace of the write to the VMM's
//! event of the clamp, both in CLOCK_MONOTONIC.
//!
//! The emulator runs one CPU at a time, and goes to the next when that one sleeps or its turn ends.
//! So the worker's CPU, which the write has sent an interrupt, runs its first instruction when the
//! vCPU's CPU goes idle. The bound is on the time from there. The vCPU sleeps after its write, and
//! the host uses its first idle state only, which is free to leave. Writes after which the emulator
//! switched CPUs before the vCPU's CPU was idle are left out, and counted: their times contain that
//! CPU's turns, in which it may wait for a lock that the worker holds. What deeper states add is
//! theirs, and what a vCPU adds that stays busy is the emulator's: both are shown beside it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::Switch;
use vcpufreq_tests::LabVerdict;

use crate::harness::access_cost::NAP_MS;
use crate::harness::plan::{Plan, registers};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::trace::{TRACING, Trace};
use crate::harness::vm::{Setup, Vm, events};

/// Writes of each kind, each with a new clamp.
const WRITES: usize = 100;
/// The median of those that count, in µs.
const BOUND_US: u64 = 50;
/// Writes that have to count, at least: the emulator decides how many, 2 to 35 of a hundred
/// in seven builds; their times differ by a few µs.
const COUNTED: usize = 3;
/// So many are made for them.
const MOST_WRITES: usize = 5 * WRITES;
/// Of a hundred, those that have to have their clamp before the next one comes, 20 ms on. The
/// emulator's turns are charged to the worker. With 5 ms between writes it reached its bound, a
/// twentieth of the time, and paused: then 79 to 100 had it, by build.
const IN_FORCE: usize = 90;
const HALT_POLL: &str = "/sys/module/kvm/parameters/halt_poll_ns";

/// What the vCPU does between its writes.
#[derive(Clone, Copy)]
enum Between {
    Sleeps,
    StaysBusy,
}

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let setup = Setup::mirroring(&[policy.cpu()]).with(&["--path", "ioeventfd"]);
    // Without a driver, which would make requests, too.
    let mut vm = Vm::boot(&setup)?;
    let mut changed = Changed::default();
    changed.filters(policy.cpu())?;
    let deep = measure(&mut vm, policy, Between::Sleeps)?;
    changed.no_deep_idle()?;
    // A pCPU that polls for its vCPU's wake-up is busy.
    changed.set(HALT_POLL.to_owned(), "0", &sysfs::text(HALT_POLL)?)?;
    let mut shallow = measure(&mut vm, policy, Between::Sleeps)?;
    while shallow.own_us.len() < COUNTED && shallow.writes < MOST_WRITES {
        shallow.add(measure(&mut vm, policy, Between::Sleeps)?);
    }
    let busy = measure(&mut vm, policy, Between::StaysBusy)?;
    drop(changed);
    let said = vm.quit()?;
    let figures = json!({
        "bound_us": BOUND_US, "vcpu_sleeps": shallow.json(),
        "vcpu_sleeps_host_in_deep_idle": deep.json(), "vcpu_stays_busy": busy.json(),
        "vmm_said": said,
    });
    let in_time = shallow.in_time();
    Ok(LabVerdict::with_figures(figures).check("requests in time", in_time, shallow.json()))
}

/// Files and the values to restore when this is dropped: changes that stay would affect later
/// scenarios.
#[derive(Default)]
struct Changed(Vec<(String, String)>);

impl Changed {
    fn set(&mut self, path: String, value: &str, after: &str) -> Result<()> {
        sysfs::write(&path, value)?;
        self.0.push((path, after.to_owned()));
        Ok(())
    }

    /// Has the host trace no more than is asked: it takes the worker's CPU time too.
    fn filters(&mut self, pcpu: u32) -> Result<()> {
        let idle = format!("{TRACING}/events/power/cpu_idle");
        // Switched on by the trace, for this scenario alone.
        self.set(format!("{idle}/enable"), "0", "0")?;
        self.set(format!("{idle}/filter"), &format!("cpu_id == {pcpu}"), "0")?;
        let switches = "prev_comm == \"vcpu0\" || next_comm == \"requests\"";
        let filter = |event: &str| format!("{TRACING}/events/{event}/filter");
        self.set(filter("sched/sched_switch"), switches, "0")?;
        self.set(filter("power/cpu_frequency"), "cpu_id > 1000", "0")
    }

    /// Keeps all CPUs out of all idle states but the first.
    fn no_deep_idle(&mut self) -> Result<()> {
        let before = self.0.len();
        for cpu in std::fs::read_dir("/sys/devices/system/cpu")?.flatten() {
            let states = std::fs::read_dir(cpu.path().join("cpuidle"));
            for state in states.into_iter().flatten() {
                let state = state?.path().join("disable").display().to_string();
                if state.contains("/state") && !state.contains("/state0/") {
                    self.set(state, "1", "0")?;
                }
            }
        }
        ensure!(self.0.len() > before, "the host has one idle state");
        Ok(())
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        for (path, after) in self.0.drain(..).rev() {
            if let Err(error) = sysfs::write(&path, &after) {
                eprintln!("{error:#}");
            }
        }
    }
}

/// How long each write took, in µs, rising.
struct WriteTimes {
    writes: usize,
    /// Until the vCPU slept.
    asleep_us: Vec<u64>,
    /// Until the worker ran.
    worker_us: Vec<u64>,
    /// Until the clamp was in force.
    clamp_us: Vec<u64>,
    /// That from when the vCPU's pCPU was idle, where the worker ran after that only.
    own_us: Vec<u64>,
}

fn measure(vm: &mut Vm, policy: &Policy, between: Between) -> Result<WriteTimes> {
    let set_perf = registers(vm)? + 4;
    let opps: Vec<_> = policy.opps.iter().map(u32::to_string).collect();
    let deed = match between {
        Between::Sleeps => format!("store-naps 0 {NAP_MS}"),
        Between::StaysBusy => "store-times 0".to_owned(),
    };
    let before = events()?.len();
    let trace = Trace::start_with_registers_and_idle()?;
    vm.ask(format!("{deed} {set_perf:#x} {WRITES} {}", opps.join(" ")))?;
    // The file is written behind.
    std::thread::sleep(Duration::from_millis(100));
    let trace = trace.stop()?;
    let applied: Vec<u64> = events()?[before..]
        .iter()
        .filter(|event| event["event"] == "applied")
        .filter_map(|event| Some(event["t_ns"].as_u64()? / 1000))
        .collect();
    let writes = trace
        .writes
        .iter()
        .filter(|write| write.address == set_perf);
    let writes: Vec<u64> = writes.map(|write| write.time_us).collect();
    ensure!(writes.len() == WRITES, "{} writes", writes.len());
    let mut seen = WriteTimes {
        writes: writes.len(),
        asleep_us: Vec::new(),
        worker_us: Vec::new(),
        clamp_us: Vec::new(),
        own_us: Vec::new(),
    };
    let ends = writes.iter().skip(1).copied().chain([u64::MAX]);
    for (&from, to) in writes.iter().zip(ends) {
        let within = |time: &u64| (from..to).contains(time);
        let switched = |found: fn(&Switch) -> bool| {
            let times = trace.switches.iter().filter(|switch| found(switch));
            times.map(|switch| switch.time_us).find(within)
        };
        let asleep = switched(|switch| switch.prev.0 == "vcpu0");
        let own = trace.idles.iter().filter(|idle| idle.cpu == policy.cpu());
        let mut idles = own.map(|idle| idle.time_us);
        let idle = asleep.and_then(|asleep| idles.find(|time| within(time) && *time >= asleep));
        let ran = switched(|switch| switch.next.0 == "requests");
        let clamp = applied.iter().copied().find(within);
        seen.asleep_us.extend(asleep.map(|time| time - from));
        seen.worker_us.extend(ran.map(|time| time - from));
        seen.clamp_us.extend(clamp.map(|time| time - from));
        let in_between =
            |(idle, ran): &(u64, u64)| (*idle..=clamp.unwrap_or(u64::MAX)).contains(ran);
        if let Some((idle, _)) = idle.zip(ran).filter(in_between) {
            // One that came after the next write is late, whatever it is put down to.
            seen.own_us
                .push(clamp.map_or(u64::MAX, |clamp| clamp - idle));
        }
    }
    seen.sort();
    Ok(seen)
}

impl WriteTimes {
    fn add(&mut self, more: Self) {
        self.writes += more.writes;
        self.asleep_us.extend(more.asleep_us);
        self.worker_us.extend(more.worker_us);
        self.clamp_us.extend(more.clamp_us);
        self.own_us.extend(more.own_us);
        self.sort();
    }

    fn sort(&mut self) {
        self.own_us.sort_unstable();
        self.asleep_us.sort_unstable();
        self.worker_us.sort_unstable();
        self.clamp_us.sort_unstable();
    }

    fn in_time(&self) -> bool {
        let in_force = self.clamp_us.len() * 100 >= self.writes * IN_FORCE;
        let enough = self.own_us.len() >= COUNTED && in_force;
        enough && self.own_us[self.own_us.len() / 2] <= BOUND_US
    }

    fn json(&self) -> Value {
        let of =
            |us: &[u64]| json!({ "n": us.len(), "median": us.get(us.len() / 2), "max": us.last() });
        json!({ "vcpu_sleeps_after_us": of(&self.asleep_us), "worker_runs_after_us": of(&self.worker_us), "clamp_after_us": of(&self.clamp_us), "clamp_after_pcpu_idle_us": of(&self.own_us) })
    }
}
