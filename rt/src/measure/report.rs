// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The measurements, their conditions, and the verdict on the budget.

use std::net::IpAddr;

use serde::Serialize;
use vcpufreq_host::CpuList;

use super::{
    cyclictest::{Latencies, TestParameters},
    machine::MeasuredHost,
    script::{Hackbench, TestLoad},
    spikes::Spikes,
};
use crate::{published::PublishedMaximum, settings::FrequencyCap};

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
    /// The guest's CPUs that were measured.
    pub guest_cpus: Option<CpuList>,
    /// Those of the guest that had the load.
    pub guest_others: Option<CpuList>,
    /// How each test measured.
    pub test: TestParameters,
    /// stress-ng's share of each of them.
    pub load_percent: u8,
    /// stress-ng's `SCHED_FIFO` priority.
    pub stress_fifo: Option<u8>,
    /// hackbench's size.
    pub hackbench: Hackbench,
    /// Where the ping flood goes.
    pub net_to: Option<IpAddr>,
    /// What others have measured with the applied profile.
    pub published: Vec<PublishedMaximum>,
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
    pub(super) fn lines(&self) -> Vec<String> {
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
    /// The command line that measured its first part.
    pub command: String,
    /// Of each CPU.
    pub latencies: Vec<Latencies>,
    /// How many wake-ups each CPU has at least, when the test went on to its end.
    pub due: Vec<u64>,
    /// The latencies above a bound, if there is one.
    pub spikes: Option<Spikes>,
    /// How often a part was lost with the guest's shell, and measured again.
    pub losses: u64,
    /// What held the host's CPUs down meanwhile.
    #[serde(flatten)]
    pub held: RunCaps,
}

impl TestRun {
    /// Place and load.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}, {}", self.place.name(), self.load.name())
    }

    /// The first CPU with fewer wake-ups than are due; a test without any is one, too.
    pub(super) fn incomplete(&self) -> Option<String> {
        let name = self.name();
        if self.latencies.is_empty() {
            return Some(format!("{name}: nothing was measured"));
        }
        let mut pairs = self.latencies.iter().zip(&self.due);
        let (one, due) = pairs.find(|(one, due)| one.samples < **due || one.samples == 0)?;
        Some(format!(
            "{name}: CPU {} has {} wake-ups of {due} or more that were due",
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
    /// Tests that are still to come.
    pub tests_left: u64,
    /// The verdict on the budget.
    #[serde(flatten)]
    pub verdict: LatencyVerdict,
}

impl LatencyReport {
    /// With the verdict that follows from the rest.
    #[must_use]
    pub fn new(
        conditions: Conditions,
        budget_us: Option<u64>,
        (runs, tests_left): (Vec<TestRun>, u64),
    ) -> Self {
        let all = runs.iter().flat_map(|run| &run.latencies);
        let max = all.map(|one| one.max_us).max();
        let incomplete = match runs.is_empty() {
            true => Some("nothing was measured".to_owned()),
            false => runs.iter().find_map(TestRun::incomplete),
        };
        let incomplete = match tests_left {
            0 => incomplete,
            left => Some(format!("{left} tests are still to come")),
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
            tests_left,
            verdict,
        }
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
            guest_cpus: None,
            guest_others: None,
            test: TestParameters {
                loops: None,
                seconds: Some(10),
                parts: 1,
                interval_us: 1000,
                priority: 90,
                bins_us: 400,
                break_us: None,
            },
            load_percent: 60,
            stress_fifo: None,
            hackbench: Hackbench::default(),
            net_to: None,
            published: Vec::new(),
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
            spikes: None,
            losses: 0,
            held: RunCaps::default(),
        };
        LatencyReport::new(conditions, budget_us, (vec![run], 0))
    }

    /// The same with its only run changed.
    fn changed(change: fn(&mut TestRun)) -> LatencyReport {
        let mut report = report(None, Some(20));
        report.runs.iter_mut().for_each(change);
        LatencyReport::new(report.conditions, report.budget_us, (report.runs, 0))
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
        let nothing = LatencyReport::new(short.conditions.clone(), Some(20), (Vec::new(), 0));
        assert!(matches!(nothing.verdict, LatencyVerdict::Incomplete { .. }));
        let unfinished = report(None, Some(20));
        let (conditions, runs) = (unfinished.conditions, unfinished.runs);
        let unfinished = LatencyReport::new(conditions, Some(20), (runs, 2));
        assert!(unfinished.text().contains("2 tests are still to come"));
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
    fn what_others_published_is_beside_it_and_no_verdict() {
        let with = |emulated: Option<&str>| {
            let mut report = report(emulated, Some(20));
            let row = |place: &str, load: &str, max_us| PublishedMaximum {
                place: place.to_owned(),
                load: load.to_owned(),
                max_us,
                conditions: "board, 24 h".to_owned(),
                source: "a guide".to_owned(),
            };
            let rows = vec![row("host", "idle", 6), row("guest", "stress", 9)];
            report.conditions.published = rows;
            LatencyReport::new(report.conditions, report.budget_us, (report.runs, 0))
        };
        let here = with(None);
        assert_eq!(here.verdict, LatencyVerdict::Kept);
        let text = here.text();
        for line in [
            "published: host, idle: at most 6 µs (board, 24 h; a guide); here 20 µs (CPU 3, 10 s, \
             kernel 7.2)\n",
            "published: guest, stress: at most 9 µs (board, 24 h; a guide); not measured here\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        let mut loaded = with(None);
        loaded.conditions.published[0].load = "stress".to_owned();
        loaded.conditions.stress_fifo = Some(1);
        (loaded.runs[0].load, loaded.runs[0].due[0]) = (TestLoad::Stress, 11);
        let line = "here 20 µs so far (CPU 3, 10 s, kernel 7.2, stress-ng at 60 % with SCHED_FIFO \
                    1)\n";
        let text = loaded.text();
        assert!(text.contains(line), "{text}");
        let emulated = with(Some("it is the lab")).text();
        let line = "at most 6 µs (board, 24 h; a guide); figures here are no hardware's\n";
        assert!(emulated.contains(line), "{emulated}");
    }

    #[test]
    fn single_latencies_and_lost_parts_have_a_line() {
        let text = changed(|run| {
            run.losses = 2;
            run.spikes = Some(Spikes {
                above_us: 10,
                count: 1,
                recorded: Vec::new(),
            });
        })
        .text();
        assert!(text.contains("host, idle: 1 above 10 µs\n"), "{text}");
        let lost = "host, idle: parts were measured again 2 times, as the guest's shell was lost\n";
        assert!(text.contains(lost), "{text}");
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
