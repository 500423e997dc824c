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

use super::{
    cause::cause,
    exits::reason_of,
    guest::GuestTrace,
    offset::{ClockOffset, KhzAt},
};
use crate::{path::Path, stats::Stats};
use vcpufreq_vm::layout::CPUFREQ_BASE;

/// Groups of tracks, in the order in which they are shown.
const THREADS: u32 = 1;
const EXITS: u32 = 2;
const CLAMPS: u32 = 3;
const HOST: u32 = 4;
const GUEST: u32 = 5;
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
    /// What vCPUs asked for, and when.
    asked: BTreeMap<u16, Vec<KhzAt>>,
    /// A guest's clock, if its trace is in it.
    guest: Option<ClockOffset>,
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
            asked: BTreeMap::new(),
            guest: None,
            changes: BTreeMap::new(),
            sampled: BTreeMap::new(),
            pcpus: BTreeSet::new(),
            tuned: Vec::new(),
            last_us: 0,
        };
        for (group, name) in GROUPS {
            timeline.name_group(group, name);
        }
        for of in &stats.vcpus {
            for group in [THREADS, EXITS] {
                let name = format!("vCPU {}", of.vcpu);
                timeline.name("thread_name", (group, track(of.vcpu)), &name);
            }
        }
        timeline
    }

    fn name_group(&mut self, group: u32, name: &str) {
        self.name("process_name", (group, 0), name);
        let order = json!({ "sort_index": group });
        self.events.push(json!({
            "name": "process_sort_index", "ph": "M", "pid": group, "args": order,
        }));
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
        // Without a request there is no frequency that the guest would see.
        if khz != 0 {
            let asked = self.asked.entry(vcpu).or_default();
            asked.push((write.time_us, khz));
        }
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

    /// Adds what the guest has recorded itself. Whether its clock could be told.
    pub fn join(&mut self, guest: &GuestTrace) -> bool {
        let Some(offset) = guest.offset(&self.asked) else {
            return false;
        };
        self.guest = Some(offset);
        self.name_group(GUEST, "guest");
        let shown = (self.recording.since_us, self.last_us);
        let mut cpus = BTreeSet::new();
        for (cpu, (us, khz)) in guest.frequencies(offset, shown) {
            cpus.insert(cpu);
            let name = format!("CPU {cpu}");
            self.counter((GUEST, us), &name, json!({ "MHz": mhz(khz) }));
        }
        for slice in guest.slices(offset, shown) {
            cpus.insert(slice.cpu);
            let name = format!("{} ({})", slice.name, slice.tid);
            self.slice((GUEST, slice.cpu), &name, slice.ran_us);
        }
        for cpu in cpus {
            self.name("thread_name", (GUEST, track(cpu)), &format!("CPU {cpu}"));
        }
        true
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
        let mut other = json!({
            "process": self.pid, "clock": "CLOCK_MONOTONIC",
            "lost_events": self.recording.lost, "requests_by_vcpu": requests,
        });
        if let Some(offset) = self.guest {
            other["guest_clock"] = json!({
                "ahead_us": offset.us, "within_us": offset.within_us, "pairs": offset.pairs,
            });
        }
        json!({
            "traceEvents": self.events, "displayTimeUnit": "ms", "otherData": other,
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
#[path = "timeline_tests.rs"]
mod tests;
