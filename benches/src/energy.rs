// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Energy from the trace: for each pCPU its busy time, times the power of its OPP from the kernel's
//! energy model. Idle costs nothing; caches, memory and leakage aren't in it.

use crate::machine::{BenchMachine, Cluster};
use crate::observed::Observed;

impl Observed {
    /// Of all pCPUs between two moments, in µJ; `None` where a cluster's power
    /// isn't known.
    pub fn energy_uj(&self, machine: &BenchMachine, from: u64, to: u64) -> Option<u64> {
        let mut uw_us = 0;
        for cluster in &machine.clusters {
            for (khz, since, until) in self.at_frequencies(machine, cluster, from, to)? {
                let uw = cluster.uw(khz)?;
                for &cpu in &cluster.cpus {
                    uw_us += uw * self.ran_us(cpu, (since, until), |tid| tid != 0);
                }
            }
        }
        Some(uw_us / 1_000_000)
    }

    /// A cluster's frequencies with their spans, in order.
    pub fn at_frequencies(
        &self,
        machine: &BenchMachine,
        cluster: &Cluster,
        from: u64,
        to: u64,
    ) -> Option<Vec<(u32, u64, u64)>> {
        let mut spans = vec![(self.khz_at(machine, cluster, from)?, from, to)];
        let changes = self.seen.changes.iter();
        let own =
            changes.filter(|one| one.cpu == cluster.first() && (from..to).contains(&one.time_us));
        for change in own {
            if let Some(last) = spans.last_mut() {
                last.2 = change.time_us;
            }
            spans.push((change.khz, change.time_us, to));
        }
        Some(spans)
    }

    /// How long a pCPU ran the threads for which `counts` is true, in µs; the idle task is thread 0.
    pub fn ran_us(&self, cpu: u32, (from, to): (u64, u64), counts: impl Fn(i32) -> bool) -> u64 {
        let mut busy = 0;
        let mut since = None;
        for switch in self.seen.switches.iter().filter(|one| one.cpu == cpu) {
            let us = switch.time_us.clamp(from, to);
            // The thread of the first switch has run since before the trace.
            if counts(switch.prev.1) {
                busy += us - since.unwrap_or(from);
            }
            since = Some(us);
            if switch.time_us >= to {
                return busy;
            }
        }
        let last = self.seen.switches.iter().rfind(|one| one.cpu == cpu);
        match (last, since) {
            (Some(last), Some(since)) if counts(last.next.1) => busy + to - since,
            _ => busy,
        }
    }
}
