// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events as the Trace Event Format has them: slices of vCPUs' threads and exits, counters, and marks.
//! Times are CLOCK_MONOTONIC, in µs.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use serde_json::{Value, json};
use vcpufreq_bench::{
    requesting_vcpu,
    tracefs::{FrequencyEvent, Mmio, Switch, TraceLine, events},
};
use vcpufreq_device::SET_PERF_KHZ;

use super::{cause::cause, exits::reason_of};
use crate::{path::Path, stats::Stats};
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

/// How the host's trace was recorded.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    /// Since when; its first sample is taken then, too.
    pub since_us: u64,
    /// Events that are missing.
    pub lost: u64,
    /// Whether it has guests' accesses that exit.
    pub accesses: bool,
}

/// What a vCPU's thread does.
#[derive(Clone, Debug, Default)]
struct VcpuTrack {
    /// An event was about it.
    seen: bool,
    /// Since when it runs, and where.
    runs: Option<(u64, u32)>,
    /// Since when it waits for a pCPU.
    waits: Option<u64>,
    /// Since when it is out of its guest, and why.
    out: Option<(u64, String)>,
    /// The clamp that was shown last, and its cause.
    clamp: Option<((u16, u16), &'static str)>,
}

/// A pCPU's frequency at one moment.
type KhzAt = (u64, u32);

/// What has happened, in the order in which it was added.
pub struct Timeline {
    pid: u32,
    recording: Recording,
    /// By number of its thread.
    vcpus: BTreeMap<i32, u16>,
    states: BTreeMap<u16, VcpuTrack>,
    events: Vec<Value>,
    /// Requests by vCPU; `None` of one whose requests the trace doesn't have.
    requests: BTreeMap<u16, Option<u64>>,
    /// By pCPU, of any VM.
    changes: BTreeMap<u32, Vec<KhzAt>>,
    /// Of the VM's pCPUs the first one that the VMM has seen.
    sampled: BTreeMap<u32, KhzAt>,
    /// Where its vCPUs ran.
    pcpus: BTreeSet<u32>,
    tuned: Vec<u64>,
    last_us: u64,
}

impl Timeline {
    /// An empty one of the VM that has these stats.
    pub fn new(stats: &Stats, recording: Recording) -> Self {
        let requests = recording.accesses.then_some(0);
        let mut timeline = Self {
            pid: stats.pid,
            recording,
            vcpus: stats
                .vcpus
                .iter()
                .filter_map(|of| Some((of.tid?, of.vcpu)))
                .collect(),
            states: BTreeMap::new(),
            events: Vec::new(),
            requests: stats.vcpus.iter().map(|of| (of.vcpu, requests)).collect(),
            changes: BTreeMap::new(),
            sampled: BTreeMap::new(),
            pcpus: BTreeSet::new(),
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
            self.see_thread(&line);
            match line.event {
                "cpu_frequency" => {
                    let event = FrequencyEvent::read(&line)?;
                    let changes = self.changes.entry(event.cpu).or_default();
                    changes.push((event.time_us, event.khz));
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

    /// A thread whose first event is on its own time has run since the trace began: what brought it
    /// onto the pCPU would be an event too.
    fn see_thread(&mut self, line: &TraceLine) {
        let Some(vcpu) = self.own(line.tid()) else {
            return;
        };
        self.pcpus.insert(line.cpu);
        let Recording { since_us, lost, .. } = self.recording;
        let state = self.state(vcpu);
        let first = !std::mem::replace(&mut state.seen, true);
        if first && lost == 0 {
            state.runs = Some((since_us.min(line.time_us), line.cpu));
        }
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
            self.pcpus.insert(switch.cpu);
            let state = self.state(vcpu);
            (state.seen, state.runs) = (true, Some((us, switch.cpu)));
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
            state.seen = true;
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
        let Some(vcpu) = requesting_vcpu(&write, CPUFREQ_BASE) else {
            return Ok(());
        };
        // Behind the last vCPU's page it is none, as in the stats.
        let Some(requests) = self.requests.get_mut(&vcpu) else {
            return Ok(());
        };
        *requests = requests.map(|requests| requests + 1);
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
            if let (Some(pcpu), Some(khz)) = (of.pcpu, of.pcpu_khz) {
                self.sampled.entry(pcpu).or_insert((us, khz));
            }
            // Its guest stores into memory, which no trace sees.
            if matches!(of.path, Path::Shm | Path::Ram) {
                self.requests.insert(of.vcpu, None);
            }
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

    /// The counters of the VM's pCPUs.
    fn add_frequencies(&mut self) {
        let first_us = self.sampled.values().map(|(us, _)| *us).min();
        let sampled = std::mem::take(&mut self.sampled);
        self.pcpus.extend(sampled.keys());
        for pcpu in std::mem::take(&mut self.pcpus) {
            let changes = self.changes.remove(&pcpu).unwrap_or_default();
            let unchanged = |(us, _): &KhzAt| changes.first().is_none_or(|first| *us < first.0);
            let sampled = sampled.get(&pcpu).copied().filter(unchanged);
            let at_first = sampled.map(|(us, khz)| match Some(us) == first_us {
                // The first sample is taken as the trace begins.
                true => (us.min(self.recording.since_us), khz),
                false => (us, khz),
            });
            let name = format!("pCPU {pcpu}");
            for (us, khz) in at_first.into_iter().chain(changes) {
                self.counter((HOST, us), &name, json!({ "MHz": mhz(khz) }));
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

    /// All of it. What goes on ends with the trace.
    pub fn finish(mut self) -> Value {
        self.add_frequencies();
        let (vcpus, end): (Vec<u16>, _) = (self.states.keys().copied().collect(), self.last_us);
        for vcpu in vcpus {
            self.stopped(vcpu, end);
            self.entered(vcpu, end);
            if let Some(since) = self.state(vcpu).waits.take() {
                self.slice((THREADS, vcpu), "waiting", (since, end));
            }
        }
        let requests = self.requests.iter();
        let requests: BTreeMap<String, Option<u64>> =
            requests.map(|(vcpu, n)| (vcpu.to_string(), *n)).collect();
        json!({
            "traceEvents": self.events,
            "displayTimeUnit": "ms",
            "otherData": {
                "process": self.pid, "clock": "CLOCK_MONOTONIC",
                "lost_events": self.recording.lost,
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
    //! have it, also from the start; other threads, other VMs' requests and other pCPUs aren't there;
    //! requests are counted by vCPU as the stats count them, or not at all; a clamp has its cause; what
    //! is lost is named.

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

    const WHOLE: Recording = Recording {
        since_us: 999_000,
        lost: 0,
        accesses: true,
    };

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
        let mut timeline = Timeline::new(&stats(), WHOLE);
        timeline.read(TEXT).unwrap();
        let trace = timeline.finish();
        let threads = [
            ("on pCPU 2", 1_000_000, 300),
            ("waiting", 1_000_300, 200),
            ("on pCPU 2", 1_000_500, 100),
            ("waiting", 1_000_900, 100),
        ];
        assert_eq!(slices(&trace, THREADS), threads);
        assert_eq!(slices(&trace, EXITS), [("DABT_LOW", 1_000_100, 50)]);
        let other = &trace["otherData"];
        assert_eq!(other["requests_by_vcpu"], json!({ "0": 0, "1": 1 }));
        assert_eq!(other["lost_events"], 0);
        assert_eq!(marks(&trace), [(2, "requests 1800 MHz")]);
        let text = trace.to_string();
        assert_eq!(text.matches("\"name\":\"pCPU 2\"").count(), 2, "{text}");
    }

    #[test]
    fn what_stats_count_as_no_request_is_none() {
        let write = |offset: &str, len| {
            format!(
                " vcpu1-99 [002] ..... 1.000110: kvm_mmio: mmio write len {len} gpa 0xa00{offset} val 0x1b7740\n"
            )
        };
        // Too narrow and too wide; another register; behind the last vCPU's page.
        let others = [
            ("1004", 1),
            ("1004", 8),
            ("1000", 4),
            ("2004", 4),
            ("7004", 4),
        ];
        let mut timeline = Timeline::new(&stats(), WHOLE);
        for (offset, len) in others {
            timeline.read(&write(offset, len)).unwrap();
        }
        timeline.read(&write("0004", 4)).unwrap();
        let trace = timeline.finish();
        assert_eq!(marks(&trace), [(1, "requests 1800 MHz")]);
        let counted = &trace["otherData"]["requests_by_vcpu"];
        assert_eq!(counted, &json!({ "0": 1, "1": 0 }));
    }

    #[test]
    fn requests_that_no_trace_has_are_not_counted_as_none() {
        let mut shared = stats();
        shared.vcpus[0].path = Path::Shm;
        let mut timeline = Timeline::new(&stats(), WHOLE);
        timeline.read(TEXT).unwrap();
        timeline.sample(&shared);
        let trace = timeline.finish();
        let counted = &trace["otherData"]["requests_by_vcpu"];
        assert_eq!(counted, &json!({ "0": null, "1": 1 }));
        // Of a kernel without KVM's events, of no vCPU.
        let without = Recording {
            accesses: false,
            ..WHOLE
        };
        let trace = Timeline::new(&stats(), without).finish();
        let counted = &trace["otherData"]["requests_by_vcpu"];
        assert_eq!(counted, &json!({ "0": null, "1": null }));
    }

    #[test]
    fn a_vcpu_that_runs_at_the_start_has_a_slice_from_there() {
        let out = " vcpu0-98 [001] d..2. 1.000300: sched_switch: prev_comm=vcpu0 prev_pid=98 prev_prio=120 prev_state=S ==> next_comm=x next_pid=7 next_prio=120\n";
        let exit =
            " vcpu0-98 [001] d.... 1.000400: kvm_exit: IRQ: HSR_EC: 0x0000 (UNKNOWN), PC: 0x8\n";
        let wake =
            " x-7 [002] d..2. 1.000200: sched_wakeup: comm=vcpu0 pid=98 prio=120 target_cpu=001\n";
        let ran = [("on pCPU 1", 999_000, 1300)];
        let rows = [
            (out.to_owned(), 0, &ran[..]),
            // It is never switched out.
            (exit.to_owned(), 0, &[("on pCPU 1", 999_000, 1400)]),
            // Once it is away, it is.
            (format!("{out}{out}"), 0, &ran),
            (format!("{wake}{out}"), 0, &[]),
            // What brought it there may be lost.
            (out.to_owned(), 1, &[]),
        ];
        for (text, lost, expected) in rows {
            let mut timeline = Timeline::new(&stats(), Recording { lost, ..WHOLE });
            timeline.read(&text).unwrap();
            let trace = timeline.finish();
            let slices = slices(&trace, THREADS);
            let ran: Vec<_> = slices.iter().filter(|of| of.0 != "waiting").collect();
            assert_eq!(ran, Vec::from_iter(expected), "{text} {lost}");
            assert_eq!(trace["otherData"]["lost_events"], lost);
        }
    }

    /// Track, time and frequency of each counter of a pCPU.
    fn frequencies(trace: &Value) -> Vec<(&str, u64, f64)> {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        let counters = events.filter(|one| one["ph"] == "C" && one["pid"] == HOST);
        let counters = counters.map(|one| {
            let (name, us) = (one["name"].as_str().unwrap(), one["ts"].as_u64().unwrap());
            (name, us, one["args"]["MHz"].as_f64().unwrap())
        });
        counters.collect()
    }

    #[test]
    fn each_pcpu_of_the_vm_has_its_frequency_from_the_start() {
        let at = |us: u64, pcpu, khz| {
            let mut stats = stats();
            stats.at_ns = us * 1000;
            (stats.vcpus[0].pcpu, stats.vcpus[0].pcpu_khz) = (Some(pcpu), Some(khz));
            stats
        };
        let other = " x-7 [002] d..2. 1.000250: cpu_frequency: state=900000 cpu_id=5\n";
        let mut timeline = Timeline::new(&stats(), WHOLE);
        timeline.read(&format!("{TEXT}{other}")).unwrap();
        // pCPU 0 never changes, 3 is the vCPU's later, and 2 was known before.
        for (us, pcpu) in [(999_010, 0), (1_000_300, 3), (1_000_320, 2), (1_000_340, 3)] {
            timeline.sample(&at(us, pcpu, 600_000));
        }
        let expected = [
            ("pCPU 0", 999_000, 600.0),
            ("pCPU 2", 1_000_200, 1800.0),
            ("pCPU 2", 1_001_000, 600.0),
            ("pCPU 3", 1_000_300, 600.0),
        ];
        assert_eq!(frequencies(&timeline.finish()), expected);
    }

    #[test]
    fn a_clamp_has_its_cause() {
        let mut timeline = Timeline::new(&stats(), WHOLE);
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
        let trace = timeline.finish();
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
