// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From what was observed to a figure: pure arithmetic on times.
//!
//! A load begins when the host gives its thread the pCPU: the last switch to
//! it before its own mark `start`. On both sides that is the host's event,
//! with the host's clock; the mark only tells which one.

use std::collections::BTreeMap;

use crate::duty_cycle;
use crate::frame_times::percentile;
use crate::load_log::Mark;
use crate::machine::{BenchMachine, Cluster};
use crate::metric::Metric;
use crate::needed::HostKhz;
use crate::observed::Observed;
use crate::observed::Unsettled;
use crate::scenario::Scenario;

/// Before the load's first switch, what belongs to its wake-up or creation.
const WAKE_US: u64 = 2_000;

impl Metric {
    /// The figure; `None` when it doesn't come about while the load lasts.
    pub fn measure(
        self,
        machine: &BenchMachine,
        observed: &Observed,
        host: Option<HostKhz>,
    ) -> Option<u64> {
        let start = observed.start()?;
        let from = |us: u64| us.saturating_sub(start.us);
        let own = machine.cluster_of(start.cpu)?;
        let big = machine.big();
        let reached = |khz: u32| observed.reaches(machine, own, khz, start.us).map(from);
        let of_duty = |name, duty| observed.of_duty(machine, name, duty);
        let places = || observed.marks.iter().filter(|mark| mark.us >= start.us);
        let on_big = || places().find(|mark| big.cpus.contains(&mark.cpu));
        let off_little = || places().find(|mark| !machine.little().cpus.contains(&mark.cpu));
        match self {
            Self::ToFmax => reached(own.khz.1),
            Self::ToHostTop => reached(host?.top),
            Self::ToNeeded => observed.needed(machine, host?).map(from),
            Self::Below => {
                let needed = host?.settled;
                let since = observed.needed(machine, host?)?;
                let spans = observed.load_spans(machine)?;
                let late = spans.filter(|(khz, ..)| *khz < needed);
                Some(
                    late.map(|(_, from, to)| to.saturating_sub(from.max(since)))
                        .sum(),
                )
            }
            Self::Above => {
                let top = host?.top;
                let spans = observed.load_spans(machine)?;
                let over = spans.filter(|(khz, ..)| *khz > top);
                Some(over.map(|(_, from, to)| to - from).sum())
            }
            Self::AtFmax => {
                let spans = observed.load_spans(machine)?;
                let highest = spans.filter(|(khz, ..)| *khz == own.khz.1);
                Some(highest.map(|(_, from, to)| to - from).sum())
            }
            Self::ToFmin => {
                // The load's thread wakes for the last mark.
                let until = observed.marks.last()?.us.saturating_sub(WAKE_US);
                let since = observed.stays(own, own.khz.0, until)?;
                Some(since.saturating_sub(observed.mark("end")?.us))
            }
            Self::FirstFmin => {
                let end = observed.mark("end")?.us;
                Some(observed.reaches(machine, own, own.khz.0, end)? - end)
            }
            Self::TopKhz => observed.top(machine, own).map(u64::from),
            Self::Work => observed.figure("turns"),
            Self::OnBig => observed.share_on(|cpu| big.cpus.contains(&cpu)),
            Self::Busiest => {
                let cpus = machine.cpus().into_iter();
                cpus.filter_map(|one| observed.share_on(|cpu| cpu == one))
                    .max()
            }
            Self::Migrate => off_little().map(|mark| from(observed.since(mark))),
            Self::ToBig => on_big().map(|mark| from(observed.since(mark))),
            Self::ToBigFmax => {
                let there = observed.since(on_big()?);
                observed.reaches(machine, big, big.khz.1, there).map(from)
            }
            Self::EndsOnBig => {
                let last = observed.marks.last()?;
                Some(u64::from(big.cpus.contains(&last.cpu)))
            }
            Self::Met(duty) => per(of_duty("met", duty)?, 1000, of_duty("done", duty)?),
            Self::Took(duty) => per(of_duty("took_us", duty)?, 1, of_duty("done", duty)?),
            Self::Steady(duty) => of_duty("middle_us", duty),
            Self::Score => {
                let lasted_us = observed.mark("end")?.us.checked_sub(start.us)?;
                per(observed.jobs()?, 1_000_000_000, lasted_us)
            }
            Self::Energy => observed.energy_uj(machine, start.us, observed.mark("end")?.us),
            Self::PerJoule => {
                let uj = observed.energy_uj(machine, start.us, observed.mark("end")?.us)?;
                per(observed.jobs()?, 1_000_000_000, uj)
            }
            _ => self.of_job(machine, observed),
        }
    }
}

impl Metric {
    /// The figures of jobs of several threads: in the time that counts. A boot's is none of a load's.
    fn of_job(self, machine: &BenchMachine, observed: &Observed) -> Option<u64> {
        let span = || Some((observed.start()?.us, observed.mark("end")?.us));
        match self {
            Self::FrameTime(percent) => percentile(observed.frames_us(machine), percent),
            Self::Late => observed.late(machine),
            Self::Cycles => observed.job_us(machine),
            Self::JobScore => {
                let (from, to) = span()?;
                let ns = observed.charged(machine, (from, to)).between(from, to);
                per(observed.figure("done")?, 1_000_000_000, ns / 1000)
            }
            Self::Fairness => {
                let [own, twin] = [
                    observed.figure("pace_ns")?,
                    observed.figure("twin_pace_ns")?,
                ];
                per(own.min(twin), 1000, own.max(twin))
            }
            Self::JobEnergy => Some(observed.charged(machine, span()?).pj? / 1_000_000),
            _ => None,
        }
    }

    /// Of all repeats at once, where one has too few samples: a value, if there are enough.
    pub fn of_all(self, machine: &BenchMachine, observed: &[Observed]) -> Option<Vec<Option<u64>>> {
        let Self::FrameTime(percent) = self else {
            return None;
        };
        let frames = observed.iter().flat_map(|one| one.frames_us(machine));
        Some(
            percentile(frames.collect(), percent)
                .into_iter()
                .map(Some)
                .collect(),
        )
    }
}

/// `count` in `unit` of what `of` counts, rounded.
fn per(count: u64, unit: u64, of: u64) -> Option<u64> {
    (count * unit + of / 2).checked_div(of)
}

impl Observed {
    fn figure(&self, name: &str) -> Option<u64> {
        self.figures.get(name).copied()
    }

    /// What the log has of rt-app with this duty, as chosen for the machine or as it
    /// is, whichever the scenario has.
    fn of_duty(&self, machine: &BenchMachine, name: &str, duty: u32) -> Option<u64> {
        let logged = |us| self.figure(&format!("{name}/{us}"));
        logged(duty_cycle::run_us(duty, machine.big()))
            .or_else(|| logged(duty_cycle::plain_us(duty)))
    }

    /// Frames on time, else jobs done.
    fn jobs(&self) -> Option<u64> {
        self.figure("on_time").or(self.figure("done"))
    }

    /// The first mark of this name.
    pub fn mark(&self, name: &str) -> Option<&Mark> {
        self.marks.iter().find(|mark| mark.name == name)
    }

    /// Why the state at the start wasn't the settled one: governors that
    /// didn't come down, or a frequency that rose before the load did. Beside
    /// another load, or held high, no frequency is where it rests, nor where another process tells of
    /// the start: it has worked before.
    pub fn not_settled(&self, machine: &BenchMachine, scenario: &Scenario) -> Option<Unsettled> {
        if self.unsettled.is_some() || !scenario.starts_low() {
            return self.unsettled.clone();
        }
        let start = self.start().filter(|start| !start.told)?;
        let own = machine.cluster_of(start.cpu)?;
        let number = machine
            .clusters
            .iter()
            .position(|one| one.cpus == own.cpus)?;
        // The wake-up, or what creates the thread, moves the frequency already.
        let khz = self.khz_at(machine, own, start.us.saturating_sub(WAKE_US))?;
        (khz > *self.khz_at_rest.get(number)?).then(|| Unsettled {
            why: format!("pCPU {} at {khz} kHz before the load", start.cpu),
            lasting: false,
        })
    }

    /// The mark `start`, at the moment when the thread got the pCPU.
    pub fn start(&self) -> Option<Mark> {
        let mark = self.mark("start")?;
        Some(Mark {
            us: self.since(mark),
            ..mark.clone()
        })
    }

    /// Since when the load's thread has had the pCPU of a mark. It may be
    /// switched to after the mark by as much as the clocks can be off. What another process has told
    /// is when that began.
    pub fn since(&self, mark: &Mark) -> u64 {
        if mark.told {
            return mark.us;
        }
        let mut since = mark.us;
        for switch in self
            .seen
            .switches
            .iter()
            .filter(|switch| switch.cpu == mark.cpu)
        {
            if switch.time_us > mark.us + self.clock_error_us {
                break;
            }
            if self.threads.contains(&switch.next.1) {
                since = switch.time_us;
            }
        }
        since
    }

    /// A cluster's frequency at a moment, in kHz.
    pub fn khz_at(&self, machine: &BenchMachine, cluster: &Cluster, us: u64) -> Option<u32> {
        let number = machine
            .clusters
            .iter()
            .position(|one| one.cpus == cluster.cpus)?;
        let mut own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        match own.rfind(|change| change.time_us <= us) {
            Some(change) => Some(change.khz),
            None => self.khz_before.get(number).copied(),
        }
    }

    /// When a cluster first runs at a frequency, from a moment on.
    fn reaches(
        &self,
        machine: &BenchMachine,
        cluster: &Cluster,
        khz: u32,
        from: u64,
    ) -> Option<u64> {
        if self.khz_at(machine, cluster, from) == Some(khz) {
            return Some(from);
        }
        let mut own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        own.find(|change| change.time_us >= from && change.khz == khz)
            .map(|change| change.time_us)
    }

    /// Since when a cluster has been at a frequency that it keeps until `until`.
    fn stays(&self, cluster: &Cluster, khz: u32, until: u64) -> Option<u64> {
        let mut own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        let last = own.rfind(|change| change.time_us <= until)?;
        (last.khz == khz).then_some(last.time_us)
    }

    /// The highest frequency of a cluster while the load lasts, in kHz.
    pub fn top(&self, machine: &BenchMachine, cluster: &Cluster) -> Option<u32> {
        let (from, to) = (self.start()?.us, self.marks.last()?.us);
        let own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        let within = own
            .filter(|change| (from..=to).contains(&change.time_us))
            .map(|change| change.khz);
        within.chain(self.khz_at(machine, cluster, from)).max()
    }

    /// Of the time that the threads ran while the load lasted, per mille on
    /// these CPUs.
    fn share_on(&self, counts: impl Fn(u32) -> bool) -> Option<u64> {
        let (from, to) = (self.start()?.us, self.marks.last()?.us);
        let (mut there, mut all) = (0, 0);
        let mut since: BTreeMap<u32, u64> = BTreeMap::new();
        for switch in &self.seen.switches {
            let us = switch.time_us.clamp(from, to);
            if let Some(began) = since.remove(&switch.cpu) {
                all += us - began;
                there += if counts(switch.cpu) { us - began } else { 0 };
            }
            if self.threads.contains(&switch.next.1) {
                since.insert(switch.cpu, us);
            }
        }
        (there * 1000).checked_div(all)
    }
}
