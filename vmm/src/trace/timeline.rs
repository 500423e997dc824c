// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events as the Trace Event Format has them: slices of vCPUs' threads and exits, counters, and marks.
//! Times are CLOCK_MONOTONIC, in µs.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde_json::{Value, json};
use vcpufreq_bench::{
    requesting_vcpu,
    tracefs::{FrequencyEvent, Mmio, Switch, TraceLine, events},
};
use vcpufreq_device::SET_PERF_KHZ;

use super::{cause::cause, exits::reason_of};
use crate::stats::Stats;
use vcpufreq_vm::layout::CPUFREQ_BASE;

/// Groups of tracks, in the order in which they are shown.
const THREADS: u32 = 1;
const EXITS: u32 = 2;
const CLAMPS: u32 = 3;
const HOST: u32 = 4;
const GROUPS: [(u32, &str); 4] = [
    (THREADS, "vCPUs: threads and requests"),
    (EXITS, "vCPUs: exits by reason"),
    (CLAMPS, "vCPUs: clamps, sampled each 20 ms"),
    (HOST, "pCPUs"),
];

/// What a vCPU's thread does.
#[derive(Clone, Debug, Default)]
struct VcpuTrack {
    /// Since when it runs, and where.
    runs: Option<(u64, u32)>,
    /// Since when it waits for a pCPU.
    waits: Option<u64>,
    /// Since when it is out of its guest, and why.
    out: Option<(u64, String)>,
    /// The clamp that was shown last, and its cause.
    clamp: Option<((u16, u16), &'static str)>,
}

/// What has happened, in the order in which it was added.
pub struct Timeline {
    pid: u32,
    /// By number of its thread.
    vcpus: BTreeMap<i32, u16>,
    states: BTreeMap<u16, VcpuTrack>,
    events: Vec<Value>,
    /// Requests by vCPU.
    requests: BTreeMap<u16, u64>,
    tuned: Vec<u64>,
    last_us: u64,
}

impl Timeline {
    /// An empty one of the VM that has these stats.
    pub fn new(stats: &Stats) -> Self {
        let mut timeline = Self {
            pid: stats.pid,
            vcpus: stats
                .vcpus
                .iter()
                .filter_map(|of| Some((of.tid?, of.vcpu)))
                .collect(),
            states: BTreeMap::new(),
            events: Vec::new(),
            requests: BTreeMap::new(),
            tuned: Vec::new(),
            last_us: 0,
        };
        for (group, name) in GROUPS {
            timeline.name("process_name", (group, 0), name);
            let order = json!({ "sort_index": group });
            let sort =
                json!({ "name": "process_sort_index", "ph": "M", "pid": group, "args": order });
            timeline.events.push(sort);
        }
        for of in &stats.vcpus {
            for group in [THREADS, EXITS] {
                let name = format!("vCPU {}", of.vcpu);
                timeline.name("thread_name", (group, track(of.vcpu)), &name);
            }
        }
        timeline
    }

    fn name(&mut self, kind: &str, (pid, tid): (u32, u32), name: &str) {
        self.events.push(json!({
            "name": kind, "ph": "M", "pid": pid, "tid": tid, "args": { "name": name },
        }));
    }

    /// Adds what the host's trace has of the VM.
    ///
    /// # Errors
    /// A line that no kernel prints so.
    pub fn read(&mut self, text: &str) -> anyhow::Result<()> {
        for line in events(text) {
            self.last_us = self.last_us.max(line.time_us);
            match line.event {
                "cpu_frequency" => {
                    let event = FrequencyEvent::read(&line)?;
                    let name = format!("pCPU {}", event.cpu);
                    self.counter(
                        (HOST, event.time_us),
                        &name,
                        json!({ "MHz": mhz(event.khz) }),
                    );
                }
                "sched_switch" => self.switched(&line)?,
                "sched_wakeup" => {
                    // Behind the thread's name, which may hold anything.
                    let woken = line.tail.rsplit_once(" pid=");
                    let woken = woken.and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
                    self.woken(woken.context("a wake-up without pid")?, line.time_us);
                }
                "kvm_exit" => {
                    if let Some(vcpu) = self.own(line.tid()) {
                        let reason = reason_of(line.tail).to_owned();
                        self.state(vcpu).out = Some((line.time_us, reason));
                    }
                }
                "kvm_entry" => {
                    if let Some(vcpu) = self.own(line.tid()) {
                        self.entered(vcpu, line.time_us);
                    }
                }
                "kvm_mmio" if line.tail.starts_with("mmio write ") => self.wrote(&line)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn own(&self, tid: Option<i32>) -> Option<u16> {
        self.vcpus.get(&tid?).copied()
    }

    fn state(&mut self, vcpu: u16) -> &mut VcpuTrack {
        self.states.entry(vcpu).or_default()
    }

    fn switched(&mut self, line: &TraceLine) -> anyhow::Result<()> {
        let switch = Switch::read(line)?;
        let us = switch.time_us;
        if let Some(vcpu) = self.own(Some(switch.prev.1)) {
            self.stopped(vcpu, us);
            // Behind a thread's name, which may hold anything.
            let state = line.tail.split(" ==> next_comm=").next();
            let state = state.and_then(|prev| Some(prev.rsplit_once(" prev_state=")?.1));
            // It would go on: another one runs in its place.
            if state.is_some_and(|state| state.starts_with('R')) {
                self.state(vcpu).waits = Some(us);
            }
        }
        if let Some(vcpu) = self.own(Some(switch.next.1)) {
            if let Some(since) = self.state(vcpu).waits.take() {
                self.slice((THREADS, vcpu), "waiting", (since, us));
            }
            self.state(vcpu).runs = Some((us, switch.cpu));
        }
        Ok(())
    }

    fn stopped(&mut self, vcpu: u16, us: u64) {
        if let Some((since, cpu)) = self.state(vcpu).runs.take() {
            let name = format!("on pCPU {cpu}");
            self.slice((THREADS, vcpu), &name, (since, us));
        }
    }

    fn woken(&mut self, tid: i32, us: u64) {
        if let Some(vcpu) = self.own(Some(tid)) {
            let state = self.state(vcpu);
            if state.runs.is_none() {
                state.waits.get_or_insert(us);
            }
        }
    }

    fn entered(&mut self, vcpu: u16, us: u64) {
        if let Some((since, reason)) = self.state(vcpu).out.take() {
            self.slice((EXITS, vcpu), &reason, (since, us));
        }
    }

    fn wrote(&mut self, line: &TraceLine) -> anyhow::Result<()> {
        if self.own(line.tid()).is_none() {
            return Ok(());
        }
        let write = Mmio::read(line)?;
        let vcpu = requesting_vcpu(write.address, CPUFREQ_BASE);
        let Some(vcpu) = vcpu.and_then(|vcpu| u16::try_from(vcpu).ok()) else {
            return Ok(());
        };
        *self.requests.entry(vcpu).or_default() += 1;
        let khz = u32::try_from(write.value).unwrap_or(u32::MAX) & SET_PERF_KHZ;
        let name = format!("requests {} MHz", mhz(khz));
        self.mark(
            (THREADS, vcpu),
            &name,
            (write.time_us, json!({ "by": "guest", "khz": khz })),
        );
        let name = format!("vCPU {vcpu} request");
        self.counter((THREADS, write.time_us), &name, json!({ "MHz": mhz(khz) }));
        Ok(())
    }

    /// Adds what the VMM has counted at one moment.
    pub fn sample(&mut self, stats: &Stats) {
        let us = stats.at_ns / 1000;
        self.last_us = self.last_us.max(us);
        for of in &stats.vcpus {
            let (min, max) = of.uclamp;
            let clamp = json!({ "min": min, "max": max });
            self.counter((CLAMPS, us), &format!("vCPU {} uclamp", of.vcpu), clamp);
            let now = (of.uclamp, cause(stats, of));
            if self.state(of.vcpu).clamp.replace(now) != Some(now) {
                let name = format!("uclamp {min} to {max}, by {}", now.1);
                self.mark((THREADS, of.vcpu), &name, (us, json!({ "by": now.1 })));
            }
        }
        for tuning in &stats.tunings {
            if !self.tuned.contains(&tuning.handle) {
                self.tuned.push(tuning.handle);
                let details = json!({
                    "handle": tuning.handle, "floor_khz": tuning.floor_khz,
                    "ceiling_khz": tuning.ceiling_khz, "user": tuning.user,
                    "process": tuning.client,
                });
                self.mark((THREADS, tuning.vcpu), "tuned", (us, details));
            }
        }
    }

    fn counter(&mut self, (group, us): (u32, u64), name: &str, values: Value) {
        let event = json!({ "name": name, "ph": "C", "ts": us, "pid": group, "args": values });
        self.events.push(event);
    }

    fn slice(&mut self, (group, vcpu): (u32, u16), name: &str, (since, until): (u64, u64)) {
        self.events.push(json!({
            "name": name, "ph": "X", "ts": since, "dur": until.saturating_sub(since),
            "pid": group, "tid": track(vcpu),
        }));
    }

    fn mark(&mut self, (group, vcpu): (u32, u16), name: &str, (us, details): (u64, Value)) {
        self.events.push(json!({
            "name": name, "ph": "i", "s": "t", "ts": us, "pid": group, "tid": track(vcpu),
            "args": details,
        }));
    }

    /// All of it, of which `lost` events are missing. What goes on ends with the trace.
    pub fn finish(mut self, lost: u64) -> Value {
        let (vcpus, end): (Vec<u16>, _) = (self.states.keys().copied().collect(), self.last_us);
        for vcpu in vcpus {
            self.stopped(vcpu, end);
            self.entered(vcpu, end);
            if let Some(since) = self.state(vcpu).waits.take() {
                self.slice((THREADS, vcpu), "waiting", (since, end));
            }
        }
        let requests = self.requests.iter();
        let requests: BTreeMap<String, u64> =
            requests.map(|(vcpu, n)| (vcpu.to_string(), *n)).collect();
        json!({
            "traceEvents": self.events,
            "displayTimeUnit": "ms",
            "otherData": {
                "process": self.pid, "clock": "CLOCK_MONOTONIC", "lost_events": lost,
                "requests_by_vcpu": requests,
            },
        })
    }
}

/// 0 has a meaning of its own.
fn track(vcpu: u16) -> u32 {
    u32::from(vcpu) + 1
}

fn mhz(khz: u32) -> f64 {
    f64::from(khz) / 1000.0
}

#[cfg(test)]
mod tests {
    //! Promises: a vCPU's thread runs, waits and leaves its guest for as long as the kernel's events
    //! have it; other threads and other VMs' requests aren't there; requests are counted by vCPU; a
    //! clamp has its cause; what is lost is named.

    use super::*;
    use crate::stats::{DeciderStats, TuningStats, VcpuStats};

    const TEXT: &str = "# tracer: nop\n\
        \x20 x-7 [002] d..2. 1.000000: sched_switch: prev_comm=x prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=vcpu1 next_pid=99 next_prio=120\n\
        \x20 vcpu1-99 [002] d.... 1.000100: kvm_exit: TRAP: HSR_EC: 0x0024 (DABT_LOW), PC: 0x8\n\
        \x20 vcpu1-99 [002] ..... 1.000110: kvm_mmio: mmio write len 4 gpa 0xa001004 val 0x1b7740\n\
        \x20 vcpu1-99 [002] d.... 1.000150: kvm_entry: PC: 0x8\n\
        \x20 y-8 [001] ..... 1.000160: kvm_mmio: mmio write len 4 gpa 0xa001004 val 0x1b7740\n\
        \x20 x-7 [002] d..2. 1.000200: cpu_frequency: state=1800000 cpu_id=2\n\
        \x20 vcpu1-99 [002] d..2. 1.000300: sched_switch: prev_comm=vcpu1 prev_pid=99 prev_prio=120 prev_state=R+ ==> next_comm=x next_pid=7 next_prio=120\n\
        \x20 x-7 [002] d..2. 1.000500: sched_switch: prev_comm=x prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=vcpu1 next_pid=99 next_prio=120\n\
        \x20 vcpu1-99 [002] d..2. 1.000600: sched_switch: prev_comm=vcpu1 prev_pid=99 prev_prio=120 prev_state=S ==> next_comm=x next_pid=7 next_prio=120\n\
        \x20 x-7 [002] d..2. 1.000900: sched_wakeup: comm=a pid=x pid=99 prio=120 target_cpu=002\n\
        \x20 x-7 [002] d..2. 1.001000: cpu_frequency: state=600000 cpu_id=2\n";

    fn stats() -> Stats {
        let vcpu = |vcpu| VcpuStats {
            vcpu,
            domain: vcpu.into(),
            tid: Some(98 + i32::from(vcpu)),
            asks_khz: Some(1_800_000),
            ..VcpuStats::default()
        };
        Stats {
            pid: 42,
            at_ns: 1_000_400_000,
            vcpus: vec![vcpu(0), vcpu(1)],
            ..Stats::default()
        }
    }

    /// Name, start and length of each slice of a group.
    fn slices(trace: &Value, group: u32) -> Vec<(&str, u64, u64)> {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        let slices = events.filter(|one| one["ph"] == "X" && one["pid"] == group);
        slices
            .map(|one| {
                let number = |name: &str| one[name].as_u64().unwrap();
                (one["name"].as_str().unwrap(), number("ts"), number("dur"))
            })
            .collect()
    }

    /// Track and name of each mark.
    fn marks(trace: &Value) -> Vec<(u64, &str)> {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        let marks = events.filter(|one| one["ph"] == "i");
        let mark = |one: &'_ Value| one["tid"].as_u64().unwrap();
        marks
            .map(|one| (mark(one), one["name"].as_str().unwrap()))
            .collect()
    }

    #[test]
    fn a_thread_runs_waits_and_leaves_its_guest() {
        let mut timeline = Timeline::new(&stats());
        timeline.read(TEXT).unwrap();
        let trace = timeline.finish(3);
        let threads = [
            ("on pCPU 2", 1_000_000, 300),
            ("waiting", 1_000_300, 200),
            ("on pCPU 2", 1_000_500, 100),
            ("waiting", 1_000_900, 100),
        ];
        assert_eq!(slices(&trace, THREADS), threads);
        assert_eq!(slices(&trace, EXITS), [("DABT_LOW", 1_000_100, 50)]);
        let other = &trace["otherData"];
        assert_eq!(other["requests_by_vcpu"], json!({ "1": 1 }));
        assert_eq!(other["lost_events"], 3);
        assert_eq!(marks(&trace), [(2, "requests 1800 MHz")]);
        let text = trace.to_string();
        assert_eq!(text.matches("\"name\":\"pCPU 2\"").count(), 2, "{text}");
    }

    #[test]
    fn a_clamp_has_its_cause() {
        let mut timeline = Timeline::new(&stats());
        let tuned = TuningStats {
            handle: 7,
            vcpu: 1,
            floor_khz: Some(2_000_000),
            ..TuningStats::default()
        };
        let decided = Stats {
            decided_by: Some(DeciderStats::default()),
            ..stats()
        };
        // A tuning counts above a policy's answer.
        let with = Stats {
            tunings: vec![tuned],
            ..decided.clone()
        };
        let moments = [stats(), stats(), decided, with.clone(), with, stats()];
        for moment in moments {
            timeline.sample(&moment);
        }
        let trace = timeline.finish(0);
        let expected = [
            (1, "uclamp 0 to 0, by guest"),
            (2, "uclamp 0 to 0, by guest"),
            (1, "uclamp 0 to 0, by policy"),
            (2, "uclamp 0 to 0, by policy"),
            (2, "uclamp 0 to 0, by tune"),
            (2, "tuned"),
            (1, "uclamp 0 to 0, by guest"),
            (2, "uclamp 0 to 0, by guest"),
        ];
        assert_eq!(marks(&trace), expected);
    }
}
