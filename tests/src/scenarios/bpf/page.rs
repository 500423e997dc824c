// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU's page is true right after its thread has moved, and right after the frequency has
//! changed: nothing is waited for.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_device::{Khz, PcpuPerf, VcpuId, performance};
use vcpufreq_host_bpf::HostBpf;
use vcpufreq_tests::LabVerdict;

use super::programs::{like, start, util};
use crate::harness::policy::Policy;
use crate::harness::{load, sysfs};

const MOVES: usize = 1_000;
const CHANGES: usize = 200;

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let big = policies.last().context("no policy")?;
    ensure!(
        policies.len() > 1,
        "needs two policies: take another topology"
    );
    let vcpu = like(big, 0)?;
    let spec = vcpu.spec.clone();
    let host = start(&policies, vec![vcpu])?;
    host.register_thread(VcpuId(0))?;
    let expected = |policy: &Policy, khz: u32| {
        let cpu = PcpuPerf {
            pcpu: policy.cpu(),
            khz: Khz(khz),
            reference: Khz(policy.max()),
            capacity: util(policy.capacity),
        };
        performance(&spec, &cpu)
    };
    let moves = moves(&host, &policies, &expected)?;
    let changes = changes(&host, &policies, &expected)?;
    let counters = host.counters(VcpuId(0)).context("no counters")?;
    let figures = json!({
        "moves": moves, "changes": changes,
        "switches": counters.switches, "frequencies": counters.frequencies,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("no read after a move is wrong", moves["wrong"] == 0, &moves)
        .check(
            "no read after a change is wrong",
            changes["wrong"] == 0,
            &changes,
        )
        .check("each move is looked at", moves["looks"] == MOVES, &moves)
        .check_eq("nothing is unsettled", &counters.unsettled, 0))
}

/// From cluster to cluster, each at a frequency of its own; governors leave them alone.
fn moves(
    host: &HostBpf,
    policies: &[Policy],
    expected: &dyn Fn(&Policy, u32) -> Option<Khz>,
) -> Result<Value> {
    let mut result = PageLooks::default();
    for (n, policy) in policies.iter().enumerate() {
        sysfs::write(format!("{}/scaling_governor", policy.path), "userspace")?;
        let khz = policy.opps.get(n % policy.opps.len()).copied();
        set(policy, khz.context("no OPP")?)?;
    }
    for n in 0..MOVES {
        let policy = policies.get(n % policies.len()).context("no policy")?;
        let cpu = policy.cpus.get(n / policies.len() % policy.cpus.len());
        load::pin(*cpu.context("no CPU")?)?;
        let seen = host.cur_perf(VcpuId(0));
        result.add(seen, expected(policy, policy.khz()?));
    }
    Ok(result.json())
}

/// On the first pCPU of each policy, over its OPPs.
fn changes(
    host: &HostBpf,
    policies: &[Policy],
    expected: &dyn Fn(&Policy, u32) -> Option<Khz>,
) -> Result<Value> {
    let mut result = PageLooks::default();
    for policy in policies {
        load::pin(policy.cpu())?;
        for n in 0..CHANGES {
            let khz = policy.opps.get(n * 3 % policy.opps.len()).copied();
            let khz = khz.context("no OPP")?;
            set(policy, khz)?;
            let seen = host.cur_perf(VcpuId(0));
            result.add(seen, expected(policy, khz));
        }
        sysfs::write(format!("{}/scaling_governor", policy.path), "schedutil")?;
    }
    Ok(result.json())
}

fn set(policy: &Policy, khz: u32) -> Result<()> {
    sysfs::write(format!("{}/scaling_setspeed", policy.path), khz)?;
    ensure!(policy.khz()? == khz, "the host did not take {khz} kHz");
    Ok(())
}

#[derive(Default)]
struct PageLooks {
    looks: usize,
    wrong: usize,
    first_wrong: Option<Value>,
    values: BTreeMap<u32, usize>,
}

impl PageLooks {
    fn add(&mut self, seen: Option<Khz>, expected: Option<Khz>) {
        self.looks += 1;
        if let Some(Khz(khz)) = seen {
            *self.values.entry(khz).or_default() += 1;
        }
        if seen != expected || seen.is_none() {
            self.wrong += 1;
            let row = json!({ "seen": format!("{seen:?}"), "expected": format!("{expected:?}") });
            self.first_wrong.get_or_insert(row);
        }
    }

    fn json(&self) -> Value {
        json!({
            "looks": self.looks, "wrong": self.wrong, "first_wrong": self.first_wrong,
            "different_values": self.values.len(),
        })
    }
}
