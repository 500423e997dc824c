// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A repeat as lines to draw.

use crate::machine::BenchMachine;
use crate::observed::Observed;

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
    pub fn series(&self, machine: &BenchMachine) -> Option<Series> {
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
        moments.extend(self.seen.changes.iter().map(|change| change.time_us));
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
            .filter(|one| span.contains(&one.time_us));
        Some(Series {
            placement: placement
                .iter()
                .map(|(us, cpu)| (relative(*us), *cpu))
                .collect(),
            frequency,
            requests: requests
                .map(|one| (relative(one.time_us), one.value))
                .collect(),
            end_us: relative(*span.end()),
        })
    }
}
