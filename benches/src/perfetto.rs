// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A repeat as a trace that Perfetto's viewer opens: the Chrome JSON format.
//!
//! Each variant of a scenario is a process with a track for each of the load's
//! threads, for each thread that carried it on the host (the vCPUs'), and for
//! each cluster's frequency. Its times start at the load's; the scenarios
//! follow each other.

use serde_json::{Value, json};

use crate::machine::Machine;
use crate::observed::Observed;

/// Before the load's start, what is shown, in µs.
const LEAD_US: u64 = 20_000;
/// Between two scenarios, in µs.
const GAP_US: u64 = 100_000;
/// Numbers of the tracks: the load's threads, the host's, the requests'.
const TASKS: usize = 1;
const THREADS: usize = 100;

/// The events of all repeats that were added.
#[derive(Debug, Default)]
pub struct Tracks {
    events: Vec<Value>,
    processes: usize,
    /// Where each scenario's variants begin.
    starts: Vec<(String, u64)>,
    /// Where the next one does.
    end_us: u64,
}

/// A repeat that is being added: its process, and where its times begin.
struct Place<'a> {
    observed: &'a Observed,
    process: usize,
    from: u64,
    to: u64,
    shift: u64,
}

impl Tracks {
    /// Adds a repeat of a scenario's variant.
    pub fn add(
        &mut self,
        machine: &Machine,
        (scenario, variant): (&str, &str),
        observed: &Observed,
    ) {
        let (Some(start), Some(last)) = (observed.start(), observed.marks.last()) else {
            return;
        };
        let known = self.starts.iter().find(|(name, _)| name == scenario);
        let shift = match known {
            Some((_, at)) => *at,
            None => {
                let at = self.end_us;
                self.starts.push((scenario.to_owned(), at));
                at
            }
        };
        self.processes += 1;
        let place = Place {
            observed,
            process: self.processes,
            from: start.us.saturating_sub(LEAD_US),
            to: last.us,
            shift,
        };
        self.end_us = self.end_us.max(shift + place.to - place.from + GAP_US);
        let name = format!("{scenario} · {variant}");
        self.events.push(json!({
            "ph": "M", "name": "process_name", "pid": place.process, "args": { "name": name },
        }));
        self.events.extend(place.frequencies(machine));
        self.events.extend(place.tasks());
        self.events.extend(place.threads());
    }

    /// The file's content.
    pub fn json(&self) -> Value {
        json!({ "displayTimeUnit": "ms", "traceEvents": self.events })
    }
}

impl Place<'_> {
    fn event(&self, us: u64, more: Value) -> Value {
        let mut event = more;
        event["pid"] = self.process.into();
        event["ts"] = (us.clamp(self.from, self.to) - self.from + self.shift).into();
        event
    }

    fn name_of(&self, track: usize, name: &str) -> Value {
        json!({
            "ph": "M", "name": "thread_name", "pid": self.process, "tid": track,
            "args": { "name": name },
        })
    }

    /// A counter for each cluster, in MHz.
    fn frequencies(&self, machine: &Machine) -> Vec<Value> {
        let mut events = Vec::new();
        for cluster in &machine.clusters {
            let cpus: Vec<String> = cluster.cpus.iter().map(u32::to_string).collect();
            let name = format!("pCPU {} MHz", cpus.join(","));
            let counter = |us, khz: u32| {
                let args = json!({ "MHz": f64::from(khz) / 1000.0 });
                self.event(us, json!({ "ph": "C", "name": name, "args": args }))
            };
            let first = self.observed.khz_at(machine, cluster, self.from);
            events.extend(first.map(|khz| counter(self.from, khz)));
            let changes = self.observed.seen.changes.iter();
            let own = changes.filter(|one| one.cpu == cluster.first() && self.shows(one.us));
            events.extend(own.map(|one| counter(one.us, one.khz)));
        }
        events
    }

    /// The load's threads: their bursts, and the first one's marks.
    fn tasks(&self) -> Vec<Value> {
        let mut events = Vec::new();
        for (number, runs) in self.observed.runs.iter().enumerate() {
            let track = TASKS + number;
            events.push(self.name_of(track, &format!("task {number}")));
            for run in runs.iter().filter(|run| self.shows(run.us)) {
                let name = format!("on CPU {}", run.cpu);
                events.push(self.event(
                    run.us,
                    json!({ "ph": "X", "name": name, "tid": track, "dur": run.lasted_us }),
                ));
            }
        }
        for mark in self.observed.marks.iter().filter(|one| self.shows(one.us)) {
            let name = format!("{} (CPU {})", mark.name, mark.cpu);
            let instant = json!({ "ph": "i", "s": "t", "name": name, "tid": TASKS });
            events.push(self.event(mark.us, instant));
        }
        events
    }

    /// Threads on the host: when they had which pCPU; and their requests.
    fn threads(&self) -> Vec<Value> {
        let mut events = Vec::new();
        let seen = &self.observed.seen;
        for (number, &tid) in self.observed.threads.iter().enumerate() {
            let track = THREADS + number;
            let name = match self.observed.in_guest {
                true => format!("vCPU {number}"),
                false => format!("task {number} on the host"),
            };
            events.push(self.name_of(track, &name));
            events.extend(self.had_pcpu(tid).into_iter().map(|(from, to, cpu)| {
                let name = format!("pCPU {cpu}");
                let slice = json!({ "ph": "X", "name": name, "tid": track, "dur": to - from });
                self.event(from, slice)
            }));
        }
        for one in seen.requests.iter().filter(|one| self.shows(one.us)) {
            let track = THREADS + usize::try_from(one.vcpu).unwrap_or_default();
            let name = format!("asks for {} MHz", one.khz / 1000);
            let instant = json!({ "ph": "i", "s": "t", "name": name, "tid": track });
            events.push(self.event(one.us, instant));
        }
        events
    }

    /// When a thread had a pCPU: from, to, which.
    fn had_pcpu(&self, tid: i32) -> Vec<(u64, u64, u32)> {
        let mut spans = Vec::new();
        let mut since = None;
        for switch in &self.observed.seen.switches {
            if switch.next == tid {
                since = Some((switch.us, switch.cpu));
            } else if switch.prev == tid
                && let Some((from, cpu)) = since.take()
            {
                spans.push((from, switch.us, cpu));
            }
        }
        spans.extend(since.map(|(from, cpu)| (from, self.to, cpu)));
        spans.retain(|(from, to, _)| *to >= self.from && *from < self.to);
        let within = |us: u64| us.clamp(self.from, self.to);
        let spans = spans.into_iter();
        spans
            .map(|(from, to, cpu)| (within(from), within(to), cpu))
            .collect()
    }

    fn shows(&self, us: u64) -> bool {
        (self.from..=self.to).contains(&us)
    }
}
