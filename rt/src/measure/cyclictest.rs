// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! cyclictest, of Debian's rt-tests: its command line and its output.

use std::collections::BTreeMap;

use serde::Serialize;
use thiserror::Error;
use vcpufreq_host::CpuList;

/// How long a test goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// So many wake-ups of each thread.
    Loops(u64),
    /// So many seconds.
    Seconds(u64),
}

impl Length {
    /// Its loops or seconds.
    #[must_use]
    pub const fn amount(self) -> u64 {
        match self {
            Self::Loops(amount) | Self::Seconds(amount) => amount,
        }
    }
}

/// One test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    /// A thread is measured on each of these.
    pub cpus: CpuList,
    /// Where cyclictest's own main thread runs; `None` where the kernel puts it.
    pub main: Option<u32>,
    /// How long.
    pub length: Length,
    /// Time between two wake-ups in µs.
    pub interval_us: u64,
    /// `SCHED_FIFO` priority of the threads.
    pub priority: u8,
    /// The histogram has a bin for each µs below this.
    pub bins_us: u64,
    /// Ends the test at the first latency above this.
    pub break_us: Option<u64>,
    /// Latencies above this are recorded one by one.
    pub spike_us: Option<u64>,
}

impl Test {
    /// Its command line. Idle states and frequencies are left as they are: cyclictest would hold
    /// the whole machine out of its idle states, which no guest does.
    #[must_use]
    pub fn command(&self) -> String {
        let threads = self.cpus.iter().count();
        let (name, length) = match self.length {
            Length::Loops(loops) => ("-l", loops),
            Length::Seconds(seconds) => ("-D", seconds),
        };
        let mut line = format!(
            "cyclictest -q -m --default-system -a {} -t {threads} -p {} -i {} {name} {length} -h {}",
            self.cpus, self.priority, self.interval_us, self.bins_us
        );
        if let Some(main) = self.main {
            line += &format!(" --mainaffinity {main}");
        }
        if let Some(limit) = self.break_us {
            line += &format!(" -b {limit}");
        }
        if let Some(limit) = self.spike_us {
            line += &format!(" --spike={limit} --spike-nodes={SPIKES_MAX}");
        }
        line
    }

    /// How long it takes.
    #[must_use]
    pub fn seconds(&self) -> u64 {
        match self.length {
            Length::Seconds(seconds) => seconds,
            Length::Loops(loops) => loops.saturating_mul(self.interval_us) / 1_000_000,
        }
    }

    /// Whether a latency ended it.
    #[must_use]
    pub fn is_broken_by(&self, longest_us: Option<u64>) -> bool {
        self.break_us.is_some_and(|limit| longest_us > Some(limit))
    }

    /// The loops or seconds of a part of `part_s` seconds.
    fn part(&self, part_s: u64) -> u64 {
        let amount = match self.length {
            Length::Loops(_) => part_s.saturating_mul(1_000_000) / self.interval_us.max(1),
            Length::Seconds(_) => part_s,
        };
        amount.max(1)
    }

    /// What is left of it after `done` loops or seconds, of that at most `part_s` seconds.
    #[must_use]
    pub fn next_part(&self, done: u64, part_s: u64) -> Option<Self> {
        let amount = self.length.amount().saturating_sub(done);
        let amount = amount.min(self.part(part_s));
        let length = match self.length {
            Length::Loops(_) => Length::Loops(amount),
            Length::Seconds(_) => Length::Seconds(amount),
        };
        (amount > 0).then(|| Self {
            length,
            ..self.clone()
        })
    }

    /// How it measures, in parts of `part_s` seconds.
    #[must_use]
    pub fn parameters(&self, part_s: u64) -> TestParameters {
        let (loops, seconds) = match self.length {
            Length::Loops(loops) => (Some(loops), None),
            Length::Seconds(seconds) => (None, Some(seconds)),
        };
        TestParameters {
            loops,
            seconds,
            parts: self.length.amount().div_ceil(self.part(part_s)),
            interval_us: self.interval_us,
            priority: self.priority,
            bins_us: self.bins_us,
            break_us: self.break_us,
        }
    }
}

/// How tests measure: figures of tests that differ in one of these can't be compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TestParameters {
    /// Wake-ups of each thread, or else for a time.
    pub loops: Option<u64>,
    /// That time.
    pub seconds: Option<u64>,
    /// In so many parts: each starts cyclictest and its load anew.
    pub parts: u64,
    /// Time between two wake-ups in µs.
    pub interval_us: u64,
    /// `SCHED_FIFO` priority of the threads.
    pub priority: u8,
    /// Where the histogram ends.
    pub bins_us: u64,
    /// A latency above this ended the test.
    pub break_us: Option<u64>,
}

impl TestParameters {
    /// Its length for people, as `24 h`.
    #[must_use]
    pub fn length(&self) -> String {
        match (self.loops, self.seconds.unwrap_or_default()) {
            (Some(loops), _) => format!("{loops} wake-ups"),
            (None, seconds) if seconds >= 3600 && seconds % 3600 == 0 => {
                format!("{} h", seconds / 3600)
            }
            (None, seconds) if seconds >= 60 && seconds % 60 == 0 => {
                format!("{} min", seconds / 60)
            }
            (None, seconds) => format!("{seconds} s"),
        }
    }
}

/// Single latencies that cyclictest records at most, the first ones of a part; it counts the others.
pub(super) const SPIKES_MAX: usize = 1024;

/// cyclictest's own: each thread is woken by so much more seldom than the one before it.
const DISTANCE_US: u64 = 500;

impl Test {
    /// How many wake-ups thread `index` has at least, when the test isn't cut short: every loop, or
    /// 19 of 20 in the time, because threads start one after the other.
    #[must_use]
    pub fn due(&self, index: u64) -> u64 {
        match (self.break_us, self.length) {
            (Some(_), _) => 1,
            (None, Length::Loops(loops)) => loops,
            (None, Length::Seconds(seconds)) => {
                let interval_us = self
                    .interval_us
                    .saturating_add(DISTANCE_US.saturating_mul(index));
                let all = seconds.saturating_mul(1_000_000) / interval_us.max(1);
                (all - all / 20).max(1)
            }
        }
    }
}

/// What was measured on one CPU. Latencies in µs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Latencies {
    /// The CPU, of the host or of the guest.
    pub cpu: u32,
    /// Wake-ups.
    pub samples: u64,
    /// The shortest.
    pub min_us: u64,
    /// The mean, rounded down.
    pub avg_us: u64,
    /// The longest.
    pub max_us: u64,
    /// Not above this were 9,999 of 10,000; `None` when that is beyond the histogram.
    pub p9999_us: Option<u64>,
    /// Beyond the histogram.
    pub overflows: u64,
    /// How many were that long, without the zeros.
    pub histogram: BTreeMap<u64, u64>,
}

/// Why its output is no result.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParseError {
    /// A line isn't as cyclictest writes it.
    #[error("cyclictest printed '{0}', which this program doesn't know")]
    Line(String),
    /// A thread's figures are missing.
    #[error("cyclictest printed no '{0}' for each of its threads; it ended before its time")]
    Missing(&'static str),
    /// Counts that no test has.
    #[error("cyclictest counted more wake-ups on CPU {0} than there can be")]
    Count(u32),
}

/// Reads what cyclictest printed for a test. A guest may print anything.
///
/// # Errors
/// What isn't as it should be.
pub fn parse(text: &str, test: &Test) -> Result<Vec<Latencies>, ParseError> {
    let mut latencies: Vec<Latencies> = test.cpus.iter().map(of_cpu).collect();
    let mut summaries = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        let wrong = || ParseError::Line(line.to_owned());
        if let Some(comment) = line.strip_prefix('#') {
            if let Some((key, values)) = comment.split_once(':') {
                let values: Option<Vec<u64>> = numbers(values);
                summaries.insert(key.trim().to_owned(), values.unwrap_or_default());
            }
        } else if line.starts_with(|c: char| c.is_ascii_digit()) {
            let mut row = numbers(line).ok_or_else(wrong)?;
            if row.len() != latencies.len() + 1 {
                return Err(wrong());
            }
            let us = row.remove(0);
            if us >= test.bins_us {
                return Err(wrong());
            }
            for (one, count) in latencies.iter_mut().zip(row) {
                if count > 0 {
                    one.histogram.insert(us, count);
                }
            }
        }
    }
    for (index, one) in latencies.iter_mut().enumerate() {
        one.summarize(index, &summaries)?;
    }
    Ok(latencies)
}

fn of_cpu(cpu: u32) -> Latencies {
    Latencies {
        cpu,
        ..Latencies::default()
    }
}

/// Decimal numbers, with zeros before them or without.
fn numbers(text: &str) -> Option<Vec<u64>> {
    let words = text.split_whitespace();
    words.map(|word| word.parse().ok()).collect()
}

impl Latencies {
    /// Adds the lines that cyclictest prints below its histogram, of thread `index`.
    fn summarize(
        &mut self,
        index: usize,
        lines: &BTreeMap<String, Vec<u64>>,
    ) -> Result<(), ParseError> {
        let of = |key: &'static str| {
            let values = lines.get(key).and_then(|values| values.get(index));
            values.copied().ok_or(ParseError::Missing(key))
        };
        self.min_us = of("Min Latencies")?;
        self.avg_us = of("Avg Latencies")?;
        self.max_us = of("Max Latencies")?;
        self.overflows = of("Histogram Overflows")?;
        let counts = self.histogram.values().copied().chain([self.overflows]);
        let samples = counts.reduce(|sum, count| sum.saturating_add(count));
        self.samples = samples
            .filter(|samples| *samples < u64::MAX)
            .ok_or(ParseError::Count(self.cpu))?;
        self.p9999_us = self.percentile(9_999);
        Ok(())
    }

    /// Adds what another part of the test measured on this CPU.
    ///
    /// # Errors
    /// Counts that no test has.
    pub fn add(&mut self, part: &Self) -> Result<(), ParseError> {
        let samples = self.samples.checked_add(part.samples);
        let samples = samples.ok_or(ParseError::Count(self.cpu))?;
        let sum = |one: &Self| u128::from(one.avg_us) * u128::from(one.samples);
        let mean = (sum(self) + sum(part)) / u128::from(samples.max(1));
        self.min_us = match self.samples {
            0 => part.min_us,
            _ => self.min_us.min(part.min_us),
        };
        // Not above the greater of two 64-bit means.
        self.avg_us = u64::try_from(mean).unwrap_or(u64::MAX);
        self.max_us = self.max_us.max(part.max_us);
        self.samples = samples;
        // Neither is above the samples.
        self.overflows = self.overflows.saturating_add(part.overflows);
        for (us, count) in &part.histogram {
            let all = self.histogram.entry(*us).or_default();
            *all = all.saturating_add(*count);
        }
        self.p9999_us = self.percentile(9_999);
        Ok(())
    }

    /// The smallest latency that so many of 10,000 samples aren't above; `None` beyond the
    /// histogram.
    #[must_use]
    pub fn percentile(&self, of_10000: u64) -> Option<u64> {
        let wanted = (u128::from(self.samples) * u128::from(of_10000)).div_ceil(10_000);
        let mut below = 0_u128;
        self.histogram.iter().find_map(|(us, count)| {
            below += u128::from(*count);
            (below >= wanted).then_some(*us)
        })
    }
}

#[cfg(test)]
mod tests {
    //! Promises: the command measures the host as it is; every figure that cyclictest prints comes
    //! out per CPU; what it didn't print is an error and no zero.
    use super::*;

    const TEXT: &str = "# /dev/cpu_dma_latency not set\n# Histogram\n\
        000001 000900\t000000\n000002 000098\t009998\n000007 000001\t000002\n\
        # Min Latencies: 00001 00002\n# Avg Latencies: 00001 00002\n# Max Latencies: 00120 00007\n\
        # Histogram Overflows: 00001 00000\n# Histogram Overflow at cycle number:\n# Thread 0: 00417\n\
        # Thread 1:\n";

    fn test() -> Test {
        Test {
            cpus: "3,7".parse().unwrap(),
            main: Some(6),
            length: Length::Seconds(10),
            interval_us: 1000,
            priority: 99,
            bins_us: 100,
            break_us: None,
            spike_us: None,
        }
    }

    #[test]
    fn parts_are_the_whole_test() {
        let (mut done, mut parts) = (0, Vec::new());
        while let Some(part) = test().next_part(done, 4) {
            done += part.length.amount();
            parts.push(part.length);
        }
        assert_eq!(parts, [4, 4, 2].map(Length::Seconds));
        let loops = Test {
            length: Length::Loops(2_500),
            ..test()
        };
        let part = |done| loops.next_part(done, 1).map(|part| part.length);
        assert_eq!(part(0), Some(Length::Loops(1_000)));
        assert_eq!(part(2_000), Some(Length::Loops(500)));
        assert_eq!(part(2_500), None);
        let of = |test: &Test, part_s| {
            let parameters = test.parameters(part_s);
            (parameters.parts, parameters.length())
        };
        assert_eq!(of(&test(), 4), (3, "10 s".to_owned()));
        assert_eq!(of(&loops, 1), (3, "2500 wake-ups".to_owned()));
        for (seconds, length) in [(86_400, "24 h"), (5_400, "90 min"), (61, "61 s")] {
            let length_s = Length::Seconds(seconds);
            let long = Test {
                length: length_s,
                ..test()
            };
            assert_eq!(of(&long, seconds), (1, length.to_owned()));
        }
    }

    #[test]
    fn figures_of_parts_add_up() {
        let mut all = Latencies {
            cpu: 3,
            ..Latencies::default()
        };
        let [first, second] = [0, 1].map(|at| parse(TEXT, &test()).unwrap()[at].clone());
        for part in [&first, &second] {
            all.add(part).unwrap();
        }
        assert_eq!((all.samples, all.min_us, all.max_us), (11_000, 1, 120));
        // (1,000 × 1 + 10,000 × 2) / 11,000.
        assert_eq!((all.avg_us, all.overflows), (1, 1));
        assert_eq!(all.histogram, [(1, 900), (2, 10_096), (7, 3)].into());
        assert_eq!(all.p9999_us, Some(7));
        all.samples = u64::MAX;
        assert_eq!(all.add(&first), Err(ParseError::Count(3)));
    }

    #[test]
    fn figures_are_per_cpu() {
        let latencies = parse(TEXT, &test()).unwrap();
        let [first, second] = latencies.as_slice() else {
            panic!("{latencies:?}");
        };
        assert_eq!((first.cpu, first.samples, first.max_us), (3, 1_000, 120));
        assert_eq!((first.overflows, first.p9999_us), (1, None));
        assert_eq!((second.cpu, second.min_us, second.avg_us), (7, 2, 2));
        // 2 of 10,000 are longer than 2 µs; one may be.
        assert_eq!((second.samples, second.p9999_us), (10_000, Some(7)));
    }

    #[test]
    fn what_is_missing_is_an_error() {
        let cut = TEXT.replace("# Max Latencies: 00120 00007\n", "");
        assert_eq!(
            parse(&cut, &test()),
            Err(ParseError::Missing("Max Latencies"))
        );
        assert!(matches!(
            parse("000001 000900\n", &test()),
            Err(ParseError::Line(_))
        ));
        assert!(parse("", &test()).is_err());
    }

    #[test]
    fn what_no_test_prints_is_an_error_and_no_panic() {
        let max = u64::MAX;
        for (row, overflows) in [
            // A bin that wasn't asked for, and sums beyond 64 bits.
            (format!("{max} 1 1"), 0),
            ("000100 1 1".to_owned(), 0),
            (format!("000001 {max} 1\n000002 {max} 1"), 0),
            (format!("000001 {max} 1"), max),
        ] {
            let text = format!(
                "{row}\n# Min Latencies: 1 1\n# Avg Latencies: 1 1\n# Max Latencies: {max} 1\n# Histogram Overflows: {overflows} 0\n"
            );
            assert!(parse(&text, &test()).is_err(), "{row}");
        }
    }

    #[test]
    fn so_many_wake_ups_are_due() {
        assert_eq!((test().due(0), test().due(1)), (9_500, 6_333));
        let loops = Test {
            length: Length::Loops(500),
            ..test()
        };
        assert_eq!(loops.due(3), 500);
        let broken = Test {
            break_us: Some(50),
            ..loops
        };
        assert_eq!(broken.due(0), 1);
        assert!(broken.is_broken_by(Some(51)) && !broken.is_broken_by(Some(50)));
        assert!(!test().is_broken_by(Some(51)));
    }

    #[test]
    fn the_command_is_the_vendors() {
        let test = Test {
            cpus: "7".parse().unwrap(),
            length: Length::Loops(100_000_000),
            ..test()
        };
        let line = "cyclictest -q -m --default-system -a 7 -t 1 -p 99 -i 1000 -l 100000000 -h 100 \
                    --mainaffinity 6";
        assert_eq!(test.command(), line);
        let spikes = Test {
            spike_us: Some(50),
            ..test
        };
        assert_eq!(
            spikes.command(),
            format!("{line} --spike=50 --spike-nodes=1024")
        );
    }
}
