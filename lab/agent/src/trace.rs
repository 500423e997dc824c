// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's own trace of its frequencies: what a scenario claims is
//! checked against it.

use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::time::TimeSpec;

use crate::sysfs;

const TRACING: &str = "/sys/kernel/tracing";

/// A frequency change of a pCPU, from the tracepoint `power:cpu_frequency`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrequencyEvent {
    /// CLOCK_MONOTONIC in µs.
    pub time_us: u64,
    /// The pCPU.
    pub cpu: u32,
    /// The new frequency in kHz.
    pub khz: u32,
}

/// A thread's time on a CPU, from the tracepoint `sched:sched_switch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// CLOCK_MONOTONIC in µs.
    pub from_us: u64,
    /// The same.
    pub to_us: u64,
}

/// What was seen, in order of time.
#[derive(Debug)]
pub struct Seen {
    /// All frequency changes.
    pub frequencies: Vec<FrequencyEvent>,
    /// When the watched thread ran, if one was.
    pub runs: Vec<Run>,
}

/// Tracing, on until it is stopped.
#[derive(Debug)]
pub struct Trace {
    thread: Option<i32>,
}

impl Trace {
    /// Of frequencies alone.
    pub fn frequencies() -> Result<Self> {
        Self::start(None)
    }

    /// Of frequencies, and of when a thread runs.
    pub fn with_thread(tid: i32) -> Result<Self> {
        Self::start(Some(tid))
    }

    fn start(thread: Option<i32>) -> Result<Self> {
        let set = |file: &str, value: &str| sysfs::write(format!("{TRACING}/{file}"), value);
        set("trace_clock", "mono")?;
        set("buffer_size_kb", "4096")?;
        set("trace", "")?;
        if let Some(tid) = thread {
            let filter = format!("prev_pid == {tid} || next_pid == {tid}");
            set("events/sched/sched_switch/filter", &filter)?;
            set("events/sched/sched_switch/enable", "1")?;
        }
        set("events/power/cpu_frequency/enable", "1")?;
        set("tracing_on", "1")?;
        Ok(Self { thread })
    }

    /// What was seen since the start.
    pub fn stop(self) -> Result<Seen> {
        for file in [
            "tracing_on",
            "events/power/cpu_frequency/enable",
            "events/sched/sched_switch/enable",
        ] {
            sysfs::write(format!("{TRACING}/{file}"), 0)?;
        }
        let text = sysfs::text(format!("{TRACING}/trace"))?;
        let named = |name: &'static str| text.lines().filter(move |line| line.contains(name));
        let frequencies = named(": cpu_frequency: ")
            .map(parse)
            .collect::<Result<_>>()?;
        let mut runs = Vec::new();
        let mut since = None;
        for line in named(": sched_switch: ").filter(|_| self.thread.is_some()) {
            let time = time_us(line.split(": sched_switch: ").next().unwrap_or_default())?;
            let next = self
                .thread
                .map(|tid| format!("next_pid={tid} "))
                .unwrap_or_default();
            if line.contains(&next) {
                since = Some(time);
            } else if let Some(from_us) = since.take() {
                runs.push(Run {
                    from_us,
                    to_us: time,
                });
            }
        }
        Ok(Seen { frequencies, runs })
    }
}

/// CLOCK_MONOTONIC in µs, which the trace's times are in.
pub fn now_us() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .unwrap_or_else(|_| TimeSpec::new(0, 0));
    let now = Duration::from(now);
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// `  vcpu0-99  [000] d.h2.  12.345678: cpu_frequency: state=1800000 cpu_id=0`
fn parse(line: &str) -> Result<FrequencyEvent> {
    let wrong = || format!("trace line '{line}'");
    let (head, tail) = line.split_once(": cpu_frequency: ").with_context(wrong)?;
    let value = |name: &str| {
        tail.split_whitespace()
            .find_map(|word| word.strip_prefix(name))
            .with_context(wrong)
    };
    Ok(FrequencyEvent {
        time_us: time_us(head)?,
        cpu: value("cpu_id=")?.parse()?,
        khz: value("state=")?.parse()?,
    })
}

/// The time stamp that ends a line's head, in µs.
fn time_us(head: &str) -> Result<u64> {
    let stamp = head
        .split_whitespace()
        .last()
        .context("a trace line without a time")?;
    let (seconds, micros) = stamp
        .split_once('.')
        .with_context(|| format!("time '{stamp}'"))?;
    Ok(seconds.parse::<u64>()? * 1_000_000 + micros.parse::<u64>()?)
}

#[cfg(test)]
mod tests {
    //! Promise: a trace line is read as the kernel prints it.
    use super::*;

    #[test]
    fn a_line_of_the_trace() {
        let line = "           vcpu0-99      [000] d.h2.    12.345678: cpu_frequency: state=1800000 cpu_id=3";
        let event = FrequencyEvent {
            time_us: 12_345_678,
            cpu: 3,
            khz: 1_800_000,
        };
        assert_eq!(parse(line).unwrap(), event);
    }
}
