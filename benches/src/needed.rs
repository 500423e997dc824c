// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frequency that a load needs: where the host's own governor settles.

use crate::machine::{BenchMachine, Cluster};
use crate::observed::Observed;
use crate::scenario::Scenario;

/// What the pCPU of the start runs at on the host, in kHz; medians of the repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostKhz {
    /// At most.
    pub top: u32,
    /// At least, for half of the time in the second half of the load.
    pub settled: u32,
}

impl HostKhz {
    /// From the host's repeats of a scenario.
    pub fn needed(
        machine: &BenchMachine,
        scenario: &Scenario,
        observed: &[Observed],
    ) -> Option<Self> {
        let own = machine.cluster_of(scenario.first(machine))?;
        let median = |of: &dyn Fn(&Observed) -> Option<u32>| {
            let mut all: Vec<_> = observed.iter().filter_map(of).collect();
            all.sort_unstable();
            // Of two in the middle the lower one: half of those that have one reach it at least.
            all.get(all.len().saturating_sub(1) / 2).copied()
        };
        let top = median(&|one| one.top(machine, own))?;
        let settled = median(&|one| one.settled(machine));
        Some(Self {
            top,
            settled: settled.unwrap_or(top),
        })
    }
}

impl Observed {
    /// The frequencies of the start's pCPU from the start until the mark `end`, and from when to
    /// when each lasted.
    pub fn load_spans(
        &self,
        machine: &BenchMachine,
    ) -> Option<impl Iterator<Item = (u32, u64, u64)>> {
        let start = self.start()?;
        let own: &Cluster = machine.cluster_of(start.cpu)?;
        let end = self.mark("end")?.us;
        Some(
            self.at_frequencies(machine, own, start.us, end)?
                .into_iter(),
        )
    }

    /// When the load first has what it needs.
    pub fn needed(&self, machine: &BenchMachine, host: HostKhz) -> Option<u64> {
        let mut spans = self.load_spans(machine)?;
        let first = spans.find(|(khz, ..)| *khz >= host.settled);
        first.map(|(_, from, _)| from)
    }

    fn settled(&self, machine: &BenchMachine) -> Option<u32> {
        let middle = u64::midpoint(self.start()?.us, self.mark("end")?.us);
        let spans = self.load_spans(machine)?;
        let late = spans.map(|(khz, from, to)| (khz, to.saturating_sub(from.max(middle))));
        let mut late: Vec<_> = late.collect();
        late.sort_unstable_by_key(|(khz, _)| std::cmp::Reverse(*khz));
        let half = late.iter().map(|(_, us)| us).sum::<u64>().div_ceil(2);
        let mut above = 0;
        let found = late.iter().find(|(_, us)| {
            above += us;
            above >= half
        });
        found.map(|(khz, _)| *khz)
    }
}
