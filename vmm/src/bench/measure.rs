// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From what was observed to a figure: pure arithmetic on times.
//!
//! A load begins when the host gives its thread the pCPU: the last switch to
//! it before its own mark `start`. On both sides that is the host's event,
//! with the host's clock; the mark only tells which one.

use std::collections::BTreeMap;

use super::machine::{Cluster, Machine};
use super::session::{Mark, Observed};

/// Before the load's first switch, what belongs to its wake-up or creation.
const WAKE_US: u64 = 2_000;

/// What can be read off a repeat. All times are in µs from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Until the pCPU of the start runs at its highest frequency.
    ToFmax,
    /// From the mark `end` until it runs at its lowest, to stay there.
    ToFmin,
    /// From the mark `end` until it does so for the first time: a dip, perhaps.
    FirstFmin,
    /// The highest frequency in kHz that it runs at while the load lasts.
    TopKhz,
    /// Until it runs at the frequency that was highest on the host.
    ToHostTop,
    /// Turns of work that the load's first thread did.
    Work,
    /// Of the time that the load's threads ran, per mille on CPUs of the most
    /// capable cluster; in a guest, of the vCPUs' time.
    OnBig,
    /// Until the load is on a CPU of the most capable cluster.
    ToBig,
    /// Until it is there and that cluster runs at its highest frequency.
    ToBigFmax,
    /// Whether it is there at the end: 1 or 0.
    EndsOnBig,
}

impl Metric {
    /// Name and unit in reports.
    pub fn name(self) -> (&'static str, &'static str) {
        match self {
            Self::ToFmax => ("to_fmax", "us"),
            Self::ToFmin => ("to_fmin", "us"),
            Self::FirstFmin => ("first_fmin", "us"),
            Self::TopKhz => ("top_khz", "kHz"),
            Self::ToHostTop => ("to_host_top", "us"),
            Self::Work => ("work", "turns"),
            Self::OnBig => ("on_big", "permille"),
            Self::ToBig => ("migrate", "us"),
            Self::ToBigFmax => ("to_big_fmax", "us"),
            Self::EndsOnBig => ("ends_on_big", "share"),
        }
    }

    /// The figure; `None` when it doesn't come about while the load lasts.
    /// `host_top` is the frequency that the host alone reached.
    pub fn of(self, machine: &Machine, observed: &Observed, host_top: Option<u32>) -> Option<u64> {
        let start = observed.start()?;
        let from = |us: u64| us.saturating_sub(start.us);
        let own = machine.cluster_of(start.cpu)?;
        let big = machine.big();
        let reached = |khz: u32| observed.reaches(machine, own, khz, start.us).map(from);
        let on_big = || {
            let mut places = observed.marks.iter().filter(|mark| mark.us >= start.us);
            places.find(|mark| big.cpus.contains(&mark.cpu))
        };
        match self {
            Self::ToFmax => reached(own.khz.1),
            Self::ToHostTop => reached(host_top?),
            Self::ToFmin => {
                let since = observed.stays(own, own.khz.0, observed.marks.last()?.us)?;
                Some(since.saturating_sub(observed.mark("end")?.us))
            }
            Self::FirstFmin => {
                let end = observed.mark("end")?.us;
                Some(observed.reaches(machine, own, own.khz.0, end)? - end)
            }
            Self::TopKhz => observed.top(machine, own).map(u64::from),
            Self::Work => Some(observed.turns),
            Self::OnBig => observed.share_on(&big.cpus),
            Self::ToBig => on_big().map(|mark| from(observed.since(mark))),
            Self::ToBigFmax => {
                let there = observed.since(on_big()?);
                observed.reaches(machine, big, big.khz.1, there).map(from)
            }
            Self::EndsOnBig => {
                let last = observed.marks.last()?;
                Some(u64::from(big.cpus.contains(&last.cpu)))
            }
        }
    }
}

impl Observed {
    /// The first mark of this name.
    fn mark(&self, name: &str) -> Option<&Mark> {
        self.marks.iter().find(|mark| mark.name == name)
    }

    /// Why the state at the start wasn't the settled one: governors that
    /// didn't come down, or a frequency that rose before the load did.
    pub fn unsettled(&self, machine: &Machine) -> Option<String> {
        if self.unsettled.is_some() {
            return self.unsettled.clone();
        }
        let start = self.start()?;
        let own = machine.cluster_of(start.cpu)?;
        // The wake-up, or what creates the thread, moves the frequency already.
        let khz = self.khz_at(machine, own, start.us.saturating_sub(WAKE_US))?;
        (khz != own.khz.0).then(|| format!("pCPU {} at {khz} kHz before the load", start.cpu))
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
    /// switched to after the mark by as much as the clocks can be off.
    fn since(&self, mark: &Mark) -> u64 {
        let mut since = mark.us;
        for switch in self
            .seen
            .switches
            .iter()
            .filter(|switch| switch.cpu == mark.cpu)
        {
            if switch.us > mark.us + self.clock_error_us {
                break;
            }
            if self.threads.contains(&switch.next) {
                since = switch.us;
            }
        }
        since
    }

    /// A cluster's frequency at a moment, in kHz.
    pub fn khz_at(&self, machine: &Machine, cluster: &Cluster, us: u64) -> Option<u32> {
        let number = machine
            .clusters
            .iter()
            .position(|one| one.cpus == cluster.cpus)?;
        let mut own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        match own.rfind(|change| change.us <= us) {
            Some(change) => Some(change.khz),
            None => self.khz_before.get(number).copied(),
        }
    }

    /// When a cluster first runs at a frequency, from a moment on.
    fn reaches(&self, machine: &Machine, cluster: &Cluster, khz: u32, from: u64) -> Option<u64> {
        if self.khz_at(machine, cluster, from) == Some(khz) {
            return Some(from);
        }
        let mut own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        own.find(|change| change.us >= from && change.khz == khz)
            .map(|change| change.us)
    }

    /// Since when a cluster has been at a frequency that it keeps until `until`.
    fn stays(&self, cluster: &Cluster, khz: u32, until: u64) -> Option<u64> {
        let mut own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        let last = own.rfind(|change| change.us <= until)?;
        (last.khz == khz).then_some(last.us)
    }

    /// The highest frequency of a cluster while the load lasts, in kHz.
    pub fn top(&self, machine: &Machine, cluster: &Cluster) -> Option<u32> {
        let (from, to) = (self.start()?.us, self.marks.last()?.us);
        let own = self
            .seen
            .changes
            .iter()
            .filter(|one| one.cpu == cluster.first());
        let within = own
            .filter(|change| (from..=to).contains(&change.us))
            .map(|change| change.khz);
        within.chain(self.khz_at(machine, cluster, from)).max()
    }

    /// Of the time that the threads ran while the load lasted, per mille on
    /// these CPUs.
    fn share_on(&self, cpus: &[u32]) -> Option<u64> {
        let (from, to) = (self.start()?.us, self.marks.last()?.us);
        let (mut there, mut all) = (0, 0);
        let mut since: BTreeMap<u32, u64> = BTreeMap::new();
        for switch in &self.seen.switches {
            let us = switch.us.clamp(from, to);
            if let Some(began) = since.remove(&switch.cpu) {
                all += us - began;
                there += if cpus.contains(&switch.cpu) {
                    us - began
                } else {
                    0
                };
            }
            if self.threads.contains(&switch.next) {
                since.insert(switch.cpu, us);
            }
        }
        (there * 1000).checked_div(all)
    }
}

/// A repeat as lines to draw; times in µs from the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Series {
    /// From when on the load was on which pCPU.
    pub placement: Vec<(i64, u32)>,
    /// From when on the pCPU that it was on had which frequency, in kHz.
    pub frequency: Vec<(i64, u32)>,
    /// When the guest asked for what, in the unit of its table.
    pub requests: Vec<(i64, u64)>,
    /// The end.
    pub end_us: i64,
}

/// Of the time before the start, what is drawn, in µs.
const LEAD_US: u64 = 20_000;

impl Observed {
    /// The lines of this repeat.
    pub fn series(&self, machine: &Machine) -> Option<Series> {
        let start = self.start()?;
        let span = start.us.saturating_sub(LEAD_US)..=self.marks.last()?.us;
        let relative =
            |us: u64| i64::try_from(us).unwrap_or(i64::MAX) - i64::try_from(start.us).unwrap_or(0);
        let mut placement = vec![(*span.start(), start.cpu)];
        for mark in self.marks.iter().filter(|mark| mark.us >= start.us) {
            if placement.last().is_some_and(|(_, cpu)| *cpu != mark.cpu) {
                placement.push((self.since(mark), mark.cpu));
            }
        }
        let mut moments: Vec<u64> = placement.iter().map(|(us, _)| *us).collect();
        moments.extend(self.seen.changes.iter().map(|change| change.us));
        moments.retain(|us| span.contains(us));
        moments.sort_unstable();
        let mut frequency: Vec<(i64, u32)> = Vec::new();
        for us in moments {
            let on = placement.iter().rfind(|(since, _)| *since <= us)?.1;
            let khz = self.khz_at(machine, machine.cluster_of(on)?, us)?;
            if frequency.last().is_none_or(|(_, last)| *last != khz) {
                frequency.push((relative(us), khz));
            }
        }
        let requests = self
            .seen
            .requests
            .iter()
            .filter(|one| span.contains(&one.us));
        Some(Series {
            placement: placement
                .iter()
                .map(|(us, cpu)| (relative(*us), *cpu))
                .collect(),
            frequency,
            requests: requests.map(|one| (relative(one.us), one.khz)).collect(),
            end_us: relative(*span.end()),
        })
    }
}
