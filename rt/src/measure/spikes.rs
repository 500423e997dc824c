// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Single latencies above a bound, as `cyclictest --spike` records them: when, how long, on which
//! CPU. It records the first ones of each part; of all parts the longest are kept, so that a part
//! with many hides no longer one of another.

use std::cmp::Reverse;

use serde::Serialize;

use super::cyclictest::{SPIKES_MAX, Test};

/// One long latency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Spike {
    /// When the thread woke, in µs of `CLOCK_MONOTONIC` of the machine that was measured.
    pub at_us: u64,
    /// The CPU, of the host or of the guest.
    pub cpu: u32,
    /// How long.
    pub latency_us: u64,
}

/// The latencies of a test above a bound.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Spikes {
    /// The bound.
    pub above_us: u64,
    /// How many were above it.
    pub count: u64,
    /// The longest of those that were recorded, in order of time.
    pub recorded: Vec<Spike>,
}

impl Spikes {
    /// Those that cyclictest printed for a test with such a bound. A guest may print anything: what
    /// is no spike of the test is none.
    #[must_use]
    pub fn parse(text: &str, test: &Test) -> Option<Self> {
        let above_us = test.spike_us?;
        let cpus: Vec<u32> = test.cpus.iter().collect();
        let lines = text.lines().map(str::trim);
        let recorded = lines.clone().filter_map(|line| spike(line, &cpus));
        let recorded: Vec<Spike> = recorded.take(SPIKES_MAX).collect();
        let mut counted = lines.filter_map(|line| line.strip_prefix("spikes = ")?.parse().ok());
        let at_least = u64::try_from(recorded.len()).unwrap_or(u64::MAX);
        Some(Self {
            above_us,
            count: counted.next_back().unwrap_or(0).max(at_least),
            recorded,
        })
    }

    /// Adds those of another part of the test.
    pub fn add(&mut self, part: Self) {
        self.count = self.count.saturating_add(part.count);
        let mut all = std::mem::take(&mut self.recorded);
        all.extend(part.recorded);
        self.recorded = longest(all, SPIKES_MAX);
    }

    /// A line for people, with the longest ones.
    #[must_use]
    pub fn line(&self) -> String {
        const SHOWN: usize = 5;
        let Self {
            above_us, count, ..
        } = self;
        let shown: Vec<String> = (longest(self.recorded.clone(), SHOWN).iter())
            .map(|one| {
                let (s, us) = (one.at_us / 1_000_000, one.at_us % 1_000_000);
                format!("{} µs on CPU {} at {s}.{us:06} s", one.latency_us, one.cpu)
            })
            .collect();
        let lead = match (shown.is_empty(), self.recorded.len() > SHOWN) {
            (true, _) => "",
            (false, true) => ", the longest: ",
            (false, false) => ": ",
        };
        format!("{count} above {above_us} µs{lead}{}", shown.join(", "))
    }
}

/// So many of them at most, the longest, in order of time.
fn longest(mut spikes: Vec<Spike>, most: usize) -> Vec<Spike> {
    spikes.sort_by_key(|one| Reverse(one.latency_us));
    spikes.truncate(most);
    spikes.sort_by_key(|one| one.at_us);
    spikes
}

/// `T: 0 Spike:     105: TS:   1234567890`, of one of these CPUs' threads.
fn spike(line: &str, cpus: &[u32]) -> Option<Spike> {
    let (thread, rest) = line.strip_prefix("T:")?.split_once("Spike:")?;
    let (latency, at) = rest.split_once(": TS:")?;
    let thread: usize = thread.trim().parse().ok()?;
    Some(Spike {
        at_us: at.trim().parse().ok()?,
        cpu: *cpus.get(thread)?,
        latency_us: latency.trim().parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    //! Promise: each latency above the bound has its time, CPU and length, and those beyond what is
    //! recorded count.
    use super::*;
    use crate::measure::Length;

    fn test() -> Test {
        Test {
            cpus: "3,7".parse().unwrap(),
            main: None,
            length: Length::Seconds(10),
            interval_us: 1000,
            priority: 99,
            bins_us: 100,
            break_us: None,
            spike_us: Some(100),
        }
    }

    const TEXT: &str = "\nT: 1 Spike:     105: TS:   1234567890\nT: 0 Spike:     220: TS:   \
                        1300000000\nspikes = 2\n\n# Histogram\n000001 5 5\n";

    #[test]
    fn each_has_time_cpu_and_length() {
        let spikes = Spikes::parse(TEXT, &test()).unwrap();
        let spike = |at_us, cpu, latency_us| Spike {
            at_us,
            cpu,
            latency_us,
        };
        assert_eq!(
            spikes.recorded,
            [spike(1_234_567_890, 7, 105), spike(1_300_000_000, 3, 220)]
        );
        assert_eq!((spikes.count, spikes.above_us), (2, 100));
        let line =
            "2 above 100 µs: 105 µs on CPU 7 at 1234.567890 s, 220 µs on CPU 3 at 1300.000000 s";
        assert_eq!(spikes.line(), line);
        let without = Test {
            spike_us: None,
            ..test()
        };
        assert_eq!(Spikes::parse(TEXT, &without), None);
        assert_eq!(Spikes::parse("", &test()).unwrap().line(), "0 above 100 µs");
    }

    #[test]
    fn what_no_test_prints_is_no_spike() {
        let text =
            "T: 2 Spike: 105: TS: 1\nT: 0 Spike: x: TS: 1\nT: Spike: 1: TS: 1\nspikes = -1\n";
        let spikes = Spikes::parse(text, &test()).unwrap();
        assert_eq!((spikes.count, spikes.recorded.len()), (0, 0));
        let cut = Spikes::parse("T: 0 Spike: 105: TS: 1\n", &test()).unwrap();
        assert_eq!(cut.count, 1);
        let many = "T: 0 Spike: 105: TS: 1\n".repeat(5000);
        let mut spikes = Spikes::parse(&format!("{many}spikes = 6000"), &test()).unwrap();
        assert_eq!((spikes.count, spikes.recorded.len()), (6000, 1024));
        spikes.add(Spikes::parse(TEXT, &test()).unwrap());
        assert_eq!((spikes.count, spikes.recorded.len()), (6002, 1024));
        // A later one that is longer takes the place of an early one.
        let last = spikes.recorded.last().unwrap();
        assert_eq!((last.latency_us, last.at_us), (220, 1_300_000_000));
        let line = spikes.line();
        assert!(line.starts_with("6002 above 100 µs, the longest: 105 µs on CPU 3 at 0.000001 s"));
        assert!(
            line.ends_with(", 220 µs on CPU 3 at 1300.000000 s"),
            "{line}"
        );
    }
}
