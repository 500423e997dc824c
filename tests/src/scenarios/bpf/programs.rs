// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The BPF programs as the scenarios start them, and what they count.

use anyhow::{Context, Result};
use serde_json::Value;
use vcpufreq_device::{
    ClampMode, CurPerfVisibility, DomainId, Headroom, Khz, PerfTable, Util, VcpuSpec,
};
use vcpufreq_host_bpf::{ActuateBy, HostBpf, PcpuFacts, VcpuPolicy, VmConfig, WarningSink};

use crate::harness::policy::Policy;

/// Guest address of the registers of the tiny VM.
pub const BASE: u64 = 0x0a00_0000;

/// A vCPU that is like a CPU of this policy, with a domain of its own.
pub fn like(policy: &Policy, domain: u32) -> Result<VcpuPolicy> {
    let table: Vec<Khz> = policy.opps.iter().map(|&khz| Khz(khz)).collect();
    Ok(VcpuPolicy {
        spec: VcpuSpec {
            table: PerfTable::try_from(table)?,
            capacity: util(policy.capacity),
            domain: DomainId(domain),
        },
        domain,
        clamp: ClampMode::Floor,
        headroom: Headroom::None,
        visibility: CurPerfVisibility::Exact,
        actuate: ActuateBy::Worker,
        limit: None,
        sum: false,
        tell: false,
        floor: Util::ZERO,
    })
}

pub fn util(capacity: u32) -> Util {
    Util::saturating(u128::from(capacity))
}

fn pcpus(policies: &[Policy]) -> Vec<PcpuFacts> {
    let mut pcpus = Vec::new();
    for policy in policies {
        pcpus.extend(policy.cpus.iter().map(|&number| PcpuFacts {
            number,
            capacity: util(policy.capacity),
            reference: Khz(policy.max()),
        }));
    }
    pcpus
}

/// The programs for these vCPUs.
pub fn start(policies: &[Policy], vcpus: Vec<VcpuPolicy>) -> Result<HostBpf> {
    let config = VmConfig {
        base: BASE,
        vcpus,
        pcpus: pcpus(policies),
        warn: WarningSink::new(|line| eprintln!("{line}")),
    };
    let khz = |cpu| {
        let mut of = policies.iter().filter(|policy| policy.cpus.contains(&cpu));
        of.next()?.khz().ok().map(Khz)
    };
    HostBpf::start(config, khz).context("starting the BPF programs")
}

/// The buckets that hold anything, each by its lower bound.
pub fn histogram(buckets: &[u32]) -> Value {
    let full = buckets.iter().enumerate().filter(|(_, count)| **count > 0);
    full.map(|(n, &count)| (format!("{}_ns", 1_u64 << n), Value::from(count)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
