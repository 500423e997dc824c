// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long the load's pCPU ran at each frequency and for which threads, and how long its vCPU
//! requested which frequency, while the load lasted. From the trace, of all repeats of a scenario. What
//! was added for vCPUs is of one more repeat.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::machine::{BenchMachine, Cluster};
use crate::observed::Observed;

/// µs at each frequency in kHz; 0 where nothing was requested.
pub type TimeAtFreq = BTreeMap<u64, u64>;

/// The times of all repeats of a scenario.
#[derive(Debug, Default)]
struct Sums {
    /// Of the cluster that the load starts on.
    ran: TimeAtFreq,
    /// Of the requests of the cluster's vCPUs.
    requested: TimeAtFreq,
    /// For which the pCPU that the load starts on ran the load's threads or the vCPUs, in µs.
    own_us: u64,
    /// For which it ran other threads.
    others_us: u64,
    /// Of vCPUs on that pCPU, sum and target.
    targets: Option<[u64; 2]>,
}

impl Sums {
    fn add(&mut self, machine: &BenchMachine, observed: &Observed) -> Option<()> {
        let start = observed.start()?;
        let (from, to) = (start.us, observed.marks.last()?.us);
        let cluster = machine.cluster_of(start.cpu)?;
        for (khz, since, until) in observed.at_frequencies(machine, cluster, from, to)? {
            *self.ran.entry(khz.into()).or_default() += until - since;
        }
        for (khz, us) in observed.requested(machine, cluster, (from, to)) {
            *self.requested.entry(khz).or_default() += us;
        }
        let own = |tid| observed.threads.contains(&tid);
        self.own_us += observed.ran_us(start.cpu, (from, to), own);
        let others = |tid| tid != 0 && !own(tid);
        self.others_us += observed.ran_us(start.cpu, (from, to), others);
        self.targets = self.targets.or(observed.targets);
        Some(())
    }
}

impl Observed {
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
    let mut sums = Sums::default();
    for one in observed {
        sums.add(machine, one)?;
    }
    let mean = |part: usize| Some(sums.targets?[part]);
    let pairs = |times: TimeAtFreq| times.into_iter().collect::<Vec<_>>();
    Some(json!({
        "ran_us": pairs(sums.ran), "requested_us": pairs(sums.requested),
        "own_us": sums.own_us, "others_us": sums.others_us,
        "target_sum": mean(0), "target": mean(1),
    }))
}
