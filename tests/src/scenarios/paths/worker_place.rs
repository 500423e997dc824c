// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a write by `ioeventfd` costs its vCPU, by where the worker that it wakes runs. On the vCPU's own
//! pCPU the worker comes first, and its work is a part of the write. So it stays off pinned pCPUs.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_bench::piped::threads;
use vcpufreq_host::CpuList;
use vcpufreq_tests::LabVerdict;

use super::measured::Measured;
use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::thread_facts::allowed;

/// A write beside a worker on the same pCPU costs at least so many of one beside a worker elsewhere.
const TIMES: f64 = 4.0;
/// Elsewhere two CPUs differ by less.
const ALIKE: f64 = 1.2;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let pinned = first_cpus(&policies);
    let mut guest = Measured::boot(plan, &policies, "ioeventfd")?;
    let pid = guest.vm.pid();
    let mut of_vmm = threads(pid)?.into_iter();
    let worker = of_vmm.find(|(_, name)| name == "requests");
    let (worker, _) = worker.context("no worker")?;
    let chosen: CpuList = allowed(pid, worker)?.parse()?;
    let own = *pinned.last().context("no pin")?;
    let others = policies.iter().flat_map(|policy| &policy.cpus);
    let others = others.filter(|cpu| !pinned.contains(cpu));
    let (by_itself, _) = guest.timed_writes()?;
    let mut beside = |cpu: u32| -> Result<f64> {
        let mut place = CpuSet::new();
        place.set(usize::try_from(cpu)?)?;
        sched_setaffinity(Pid::from_raw(worker), &place)?;
        Ok(guest.timed_writes()?.0)
    };
    let on_its_own = beside(own)?;
    let elsewhere: Vec<f64> = others.map(|cpu| beside(*cpu)).collect::<Result<_>>()?;
    guest.vm.quit()?;
    let least = elsewhere.iter().copied().fold(f64::INFINITY, f64::min);
    let costs = (by_itself, on_its_own, &elsewhere);
    let figures = json!({
        "worker_allowed_on": chosen.to_string(), "median_ns": by_itself,
        "median_ns_on_its_own": on_its_own, "median_ns_elsewhere": elsewhere,
    });
    let apart = !pinned.iter().any(|cpu| chosen.contains(*cpu));
    Ok(LabVerdict::with_figures(figures)
        .check(
            "the worker stays off pinned pCPUs",
            apart,
            chosen.to_string(),
        )
        .check(
            "there it would cost the vCPU its time",
            on_its_own >= TIMES * least,
            costs,
        )
        .check("as it is, it does not", by_itself <= ALIKE * least, costs))
}
