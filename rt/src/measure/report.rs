// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The measurements, their conditions, and the verdict on the budget.

use std::fmt::Write as _;

use serde::Serialize;
use vcpufreq_device::host::CpuList;

use super::{
    cyclictest::Latencies,
    machine::MeasuredHost,
    script::{Hackbench, TestLoad},
};
use crate::settings::FrequencyCap;

/// Where a test ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TestPlace {
    /// On the host's CPUs.
    Host,
    /// On the guest's vCPUs.
    Guest,
}

impl TestPlace {
    /// Its word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Guest => "guest",
        }
    }
}

/// What the figures depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Conditions {
    /// The host.
    #[serde(flatten)]
    pub machine: MeasuredHost,
    /// What `apply` set here, by its profile; `None` when nothing is applied.
    pub profile: Option<String>,
    /// The CPUs that were measured.
    pub cpus: CpuList,
    /// Those that had the load.
    pub others: CpuList,
    /// stress-ng's share of each of them.
    pub load_percent: u8,
    /// hackbench's size.
    pub hackbench: Hackbench,
    /// The governors of the policies of the measured CPUs.
    pub governors: Vec<String>,
}

/// What kept the measured CPUs below their highest frequency during a test, as far as it was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunCaps {
    /// The lowest of each policy, with all that made it.
    pub caps: Vec<FrequencyCap>,
    /// How often the hardware throttled a CPU, or its package, for heat: x86 alone tells.
    pub throttled: u64,
}

impl RunCaps {
    /// A line for each.
    fn lines(&self) -> Vec<String> {
        let caps = self.caps.iter().map(|cap| format!("capped, {cap}"));
        let throttled = match self.throttled {
            0 => None,
            times => Some(format!("throttled by the hardware for heat, {times} times")),
        };
        caps.chain(throttled).collect()
    }
}

/// One test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TestRun {
    /// Where.
    pub place: TestPlace,
    /// Beside which load.
    pub load: TestLoad,
    /// The command line that measured.
    pub command: String,
    /// Of each CPU.
    pub latencies: Vec<Latencies>,
    /// How many wake-ups each CPU has at least, when the test went on to its end.
    pub due: Vec<u64>,
    /// What held the host's CPUs down meanwhile.
    #[serde(flatten)]
    pub held: RunCaps,
}

impl TestRun {
    /// The first CPU with fewer wake-ups than are due; a test without any is one, too.
    fn incomplete(&self) -> Option<String> {
        let (place, load) = (self.place.name(), self.load.name());
        if self.latencies.is_empty() {
            return Some(format!("{place}, {load}: nothing was measured"));
        }
        let mut pairs = self.latencies.iter().zip(&self.due);
        let (one, due) = pairs.find(|(one, due)| one.samples < **due || one.samples == 0)?;
        Some(format!(
            "{place}, {load}: CPU {} has {} wake-ups of {due} or more that were due",
            one.cpu, one.samples
        ))
    }
}

/// Whether the latencies stay within the budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
pub enum LatencyVerdict {
    /// No budget was given.
    None,
    /// None was above it.
    Kept,
    /// A test has fewer wake-ups than it should.
    Incomplete {
        /// Which, and how many.
        why: String,
    },
    /// Some were above it.
    Exceeded {
        /// The longest.
        max_us: u64,
    },
    /// The figures are no hardware's.
    Refused {
        /// Why.
        why: String,
    },
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LatencyReport {
    /// What it depends on.
    pub conditions: Conditions,
    /// The longest latency that may be.
    pub budget_us: Option<u64>,
    /// The tests, in order.
    pub runs: Vec<TestRun>,
    /// The verdict on the budget.
    #[serde(flatten)]
    pub verdict: LatencyVerdict,
}

impl LatencyReport {
    /// With the verdict that follows from the rest.
    #[must_use]
    pub fn new(conditions: Conditions, budget_us: Option<u64>, runs: Vec<TestRun>) -> Self {
        let all = runs.iter().flat_map(|run| &run.latencies);
        let max = all.map(|one| one.max_us).max();
        let incomplete = match runs.is_empty() {
            true => Some("nothing was measured".to_owned()),
            false => runs.iter().find_map(TestRun::incomplete),
        };
        let emulated = &conditions.machine.emulated;
        let verdict = match (budget_us, max, emulated, incomplete) {
            // That one is enough.
            (Some(budget), Some(max_us), None, _) if max_us > budget => {
                LatencyVerdict::Exceeded { max_us }
            }
            (_, _, _, Some(why)) => LatencyVerdict::Incomplete { why },
            (None, _, _, None) => LatencyVerdict::None,
            (Some(_), _, Some(why), None) => LatencyVerdict::Refused { why: why.clone() },
            (Some(_), _, None, None) => LatencyVerdict::Kept,
        };
        Self {
            conditions,
            budget_us,
            runs,
            verdict,
        }
    }

    /// As the lab's figures are marked wherever they are shown.
    #[must_use]
    pub(super) fn mark(&self) -> &'static str {
        match self.conditions.machine.emulated {
            Some(_) => " (emulated)",
            None => "",
        }
    }

    /// The verdict as a line.
    #[must_use]
    pub fn verdict_line(&self) -> String {
        let budget = self.budget_us.unwrap_or_default();
        match &self.verdict {
            LatencyVerdict::None => "no budget was given".to_owned(),
            LatencyVerdict::Incomplete { why } => {
                format!("no verdict: {why}; the test was cut short, run it again")
            }
            LatencyVerdict::Kept => format!("kept: no latency was above the budget of {budget} µs"),
            LatencyVerdict::Exceeded { max_us } => {
                format!("exceeded: the longest latency was {max_us} µs, the budget is {budget} µs")
            }
            LatencyVerdict::Refused { why } => {
                format!("no verdict on the budget of {budget} µs: {why}; run it on the hardware")
            }
        }
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mark = self.mark();
        let mut text = format!(
            "{:<6}{:<10}{:>4}{:>12}{:>8}{:>8}{:>10}{:>8}  µs{mark}\n",
            "where", "load", "CPU", "samples", "min", "avg", "p99.99", "max"
        );
        for run in &self.runs {
            let held = match run.held.lines().is_empty() {
                true => "",
                false => "  capped",
            };
            for one in &run.latencies {
                let p9999 = one
                    .p9999_us
                    .map_or("beyond".to_owned(), |us| us.to_string());
                let _ = writeln!(
                    text,
                    "{:<6}{:<10}{:>4}{:>12}{:>8}{:>8}{p9999:>10}{:>8}{held}",
                    run.place.name(),
                    run.load.name(),
                    one.cpu,
                    one.samples,
                    one.min_us,
                    one.avg_us,
                    one.max_us,
                );
            }
        }
        text += "\n";
        for run in &self.runs {
            for line in run.held.lines() {
                let _ = writeln!(text, "{}, {}: {line}", run.place.name(), run.load.name());
            }
        }
        text + &self.verdict_line() + "\n"
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a budget gets a verdict on hardware and none on what isn't; every figure that
    //! isn't hardware's is marked.
    use super::*;

    fn report(emulated: Option<&str>, budget_us: Option<u64>) -> LatencyReport {
        let machine = MeasuredHost {
            kernel: "7.2".to_owned(),
            cmdline: String::new(),
            board: "board".to_owned(),
            emulated: emulated.map(str::to_owned),
        };
        let conditions = Conditions {
            machine,
            profile: None,
            cpus: "3".parse().unwrap(),
            others: "0-2".parse().unwrap(),
            load_percent: 60,
            hackbench: Hackbench::default(),
            governors: Vec::new(),
        };
        let latencies = Latencies {
            cpu: 3,
            samples: 10,
            max_us: 20,
            p9999_us: Some(20),
            histogram: [(5, 9), (20, 1)].into(),
            ..Latencies::default()
        };
        let run = TestRun {
            place: TestPlace::Host,
            load: TestLoad::Idle,
            command: "cyclictest".to_owned(),
            latencies: vec![latencies],
            due: vec![10],
            held: RunCaps::default(),
        };
        LatencyReport::new(conditions, budget_us, vec![run])
    }

    /// The same with its only run changed.
    fn changed(change: fn(&mut TestRun)) -> LatencyReport {
        let mut report = report(None, Some(20));
        report.runs.iter_mut().for_each(change);
        LatencyReport::new(report.conditions, report.budget_us, report.runs)
    }

    #[test]
    fn a_test_that_was_cut_short_keeps_no_budget() {
        let short = changed(|run| run.due = vec![11]);
        assert!(matches!(short.verdict, LatencyVerdict::Incomplete { .. }));
        assert!(short.text().contains("CPU 3 has 10 wake-ups of 11"));
        for change in [(|run| run.latencies.clear()) as fn(&mut TestRun), |run| {
            (run.due, run.latencies[0].samples) = (vec![0], 0)
        }] {
            let none = changed(change);
            assert!(matches!(none.verdict, LatencyVerdict::Incomplete { .. }));
        }
        let nothing = LatencyReport::new(short.conditions.clone(), Some(20), Vec::new());
        assert!(matches!(nothing.verdict, LatencyVerdict::Incomplete { .. }));
        let exceeded = changed(|run| (run.due, run.latencies[0].max_us) = (vec![11], 21));
        assert_eq!(exceeded.verdict, LatencyVerdict::Exceeded { max_us: 21 });
    }

    #[test]
    fn a_run_below_a_cap_is_marked() {
        assert!(!report(None, Some(20)).text().contains("capped"));
        let capped = changed(|run| {
            run.held.caps = vec![FrequencyCap {
                cpus: "2-3".parse().unwrap(),
                khz: 1_400_000,
                max_khz: 2_800_000,
                by: vec!["cooling device cpufreq-cpu2".to_owned()],
            }];
        });
        let text = capped.text();
        assert!(text.contains("20  capped\n"), "{text}");
        let line = "host, idle: capped, CPU 2-3: at most 1400000 of 2800000 kHz, by cooling device \
                    cpufreq-cpu2\n";
        assert!(text.contains(line), "{text}");
        // It is a fact about the figures, and changes no verdict.
        assert_eq!(capped.verdict, LatencyVerdict::Kept);
        let json = serde_json::to_value(&capped).unwrap();
        assert_eq!(json["runs"][0]["caps"][0]["khz"], 1_400_000);
        let throttled = changed(|run| run.held.throttled = 3).text();
        assert!(throttled.contains("20  capped\n"), "{throttled}");
        assert!(throttled.contains("for heat, 3 times\n"), "{throttled}");
    }

    #[test]
    fn verdicts() {
        assert_eq!(report(None, None).verdict, LatencyVerdict::None);
        assert_eq!(report(None, Some(20)).verdict, LatencyVerdict::Kept);
        let exceeded = LatencyVerdict::Exceeded { max_us: 20 };
        assert_eq!(report(None, Some(19)).verdict, exceeded);
        let refused = report(Some("it is the lab"), Some(1_000));
        assert!(matches!(refused.verdict, LatencyVerdict::Refused { .. }));
        assert!(
            refused
                .text()
                .contains("no verdict on the budget of 1000 µs: it is the lab")
        );
        assert!(
            report(Some("it is the lab"), None)
                .text()
                .contains("(emulated)")
        );
        assert!(!report(None, None).text().contains("(emulated)"));
    }
}
