// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long the load's pCPU ran at each frequency, and how long its vCPU requested which one, while
//! the load lasted. From the trace, of all repeats of a scenario.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::machine::{BenchMachine, Cluster};
use crate::observed::Observed;

/// µs at each frequency in kHz; 0 where nothing was requested.
pub type Times = BTreeMap<u64, u64>;

impl Observed {
    /// Adds the times of this repeat: of the cluster that the load starts on, and of the requests of
    /// its vCPUs.
    fn add_times(&self, machine: &BenchMachine, [ran, requested]: [&mut Times; 2]) -> Option<()> {
        let start = self.start()?;
        let (from, to) = (start.us, self.marks.last()?.us);
        let cluster = machine.cluster_of(start.cpu)?;
        for (khz, since, until) in self.at_frequencies(machine, cluster, from, to)? {
            *ran.entry(khz.into()).or_default() += until - since;
        }
        for (khz, us) in self.requested(machine, cluster, (from, to)) {
            *requested.entry(khz).or_default() += us;
        }
        Some(())
    }

    /// The newest requests of the vCPUs of a cluster, which are a domain, with their times; none
    /// without a request in the trace.
    fn requested(
        &self,
        machine: &BenchMachine,
        cluster: &Cluster,
        (from, to): (u64, u64),
    ) -> Vec<(u64, u64)> {
        let cpus = machine.cpus();
        let of_cluster = |vcpu: usize| cpus.get(vcpu).is_some_and(|cpu| cluster.cpus.contains(cpu));
        let requests = self.seen.requests.iter();
        let own = requests.filter(|one| self.seen.vcpu_of(one).is_some_and(of_cluster));
        let (mut since, mut khz) = (from, 0);
        let mut times = Vec::new();
        for request in own.take_while(|one| one.time_us < to) {
            let at = request.time_us.max(from);
            times.push((khz, at - since));
            (since, khz) = (at, request.value);
        }
        if !times.is_empty() {
            times.push((khz, to - since));
        }
        times.retain(|(_, us)| *us > 0);
        times
    }
}

/// The times of all repeats; `None` where none can be told.
pub fn json(machine: &BenchMachine, observed: &[Observed]) -> Option<Value> {
    let (mut ran, mut requested) = (Times::new(), Times::new());
    for one in observed {
        one.add_times(machine, [&mut ran, &mut requested])?;
    }
    let pairs = |times: Times| times.into_iter().collect::<Vec<_>>();
    Some(json!({ "ran_us": pairs(ran), "requested_us": pairs(requested) }))
}
