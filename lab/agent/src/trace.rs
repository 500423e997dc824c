// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's own trace of its frequencies: what a scenario claims is
//! checked against it.

use anyhow::{Context, Result};

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

/// Tracing of frequencies, on until it is stopped.
#[derive(Debug)]
pub struct FrequencyTrace(());

impl FrequencyTrace {
    /// Starts with an empty buffer.
    pub fn start() -> Result<Self> {
        let set = |file: &str, value: &str| sysfs::write(format!("{TRACING}/{file}"), value);
        set("trace_clock", "mono")?;
        set("buffer_size_kb", "4096")?;
        set("trace", "")?;
        set("events/power/cpu_frequency/enable", "1")?;
        set("tracing_on", "1")?;
        Ok(Self(()))
    }

    /// What was seen since the start, in order of time.
    pub fn stop(self) -> Result<Vec<FrequencyEvent>> {
        sysfs::write(format!("{TRACING}/tracing_on"), 0)?;
        sysfs::write(format!("{TRACING}/events/power/cpu_frequency/enable"), 0)?;
        let text = sysfs::text(format!("{TRACING}/trace"))?;
        text.lines()
            .filter(|line| line.contains(": cpu_frequency: "))
            .map(parse)
            .collect()
    }
}

/// `  vcpu0-99  [000] d.h2.  12.345678: cpu_frequency: state=1800000 cpu_id=0`
fn parse(line: &str) -> Result<FrequencyEvent> {
    let wrong = || format!("trace line '{line}'");
    let (head, tail) = line.split_once(": cpu_frequency: ").with_context(wrong)?;
    let stamp = head.split_whitespace().last().with_context(wrong)?;
    let (seconds, micros) = stamp.split_once('.').with_context(wrong)?;
    let value = |name: &str| {
        tail.split_whitespace()
            .find_map(|word| word.strip_prefix(name))
            .with_context(wrong)
    };
    Ok(FrequencyEvent {
        time_us: seconds.parse::<u64>()? * 1_000_000 + micros.parse::<u64>()?,
        cpu: value("cpu_id=")?.parse()?,
        khz: value("state=")?.parse()?,
    })
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
