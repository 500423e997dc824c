// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `host-bpf/` on a real kernel.
//!
//! Most need no guest: a thread of this program stands for a vCPU's, as the programs see threads.
//! Where the guest's accesses matter, a VM of a few instructions makes them ([`tiny_vm`]).

mod arith;
mod ext_server;
mod flood;
mod group;
mod light;
mod limits;
mod many;
mod meddling;
mod others;
mod page;
mod refused;
mod requests;
mod scx;
mod settled;
mod shared;
mod sum;
mod tiny_vm;
mod vcpu;

use anyhow::{Context, Result};
use serde_json::Value;
use vcpufreq_device::{
    ClampMode, CurPerfVisibility, DomainId, Headroom, Khz, PerfTable, Util, VcpuSpec,
};
use vcpufreq_host_bpf::{ActuateBy, HostBpf, PcpuFacts, VcpuPolicy, VmConfig, WarningSink};

use crate::harness::plan::Plan;
use crate::harness::policy::Policy;

pub use flood::guest as flood_guest;
pub use others::{switches, vmm, vms};

/// Guest address of the registers of the tiny VM.
const BASE: u64 = 0x0a00_0000;

/// Carries out a scenario by name, when it is one of these.
pub fn run(name: &str, plan: &Plan) -> Option<Result<Value>> {
    match name {
        "bpf-arithmetic" => Some(arith::run()),
        "bpf-two-vms" => Some(others::two()),
        "bpf-kill" => Some(others::kill()),
        "bpf-ends" => Some(others::ends(plan)),
        "bpf-limits" => Some(limits::run()),
        "bpf-meddling" => Some(meddling::run()),
        "bpf-switch-cost" => Some(others::switch_cost()),
        "bpf-page" => Some(page::run()),
        "bpf-flood" => Some(flood::run()),
        "bpf-kfunc-refused" => Some(refused::run()),
        "bpf-requests" => Some(requests::run()),
        "bpf-shared" => Some(shared::run()),
        "bpf-sum" => Some(sum::run()),
        "bpf-many" => Some(many::run()),
        "bpf-dip" => Some(light::run()),
        "ext-server" => Some(ext_server::run()),
        _ => scx::run(name, plan),
    }
}

/// A vCPU that is like a CPU of this policy, with a domain of its own.
fn like(policy: &Policy, domain: u32) -> Result<VcpuPolicy> {
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

fn util(capacity: u32) -> Util {
    Util::saturating(u128::from(capacity))
}

fn pcpus(policies: &[Policy]) -> Vec<PcpuFacts> {
    let mut pcpus = Vec::new();
    for policy in policies {
        pcpus.extend(policy.cpus.iter().map(|&number| PcpuFacts {
            number,
            capacity: util(policy.capacity),
            khz_max: Khz(policy.max()),
        }));
    }
    pcpus
}

/// The programs for these vCPUs.
fn start(policies: &[Policy], vcpus: Vec<VcpuPolicy>) -> Result<HostBpf> {
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
fn histogram(buckets: &[u32]) -> Value {
    let full = buckets.iter().enumerate().filter(|(_, count)| **count > 0);
    full.map(|(n, &count)| (format!("{}_ns", 1_u64 << n), Value::from(count)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
