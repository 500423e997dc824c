// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether vCPUs mirror the host's topology: by the user's option, else if their pins allow.

use std::collections::BTreeSet;

use anyhow::bail;
use vcpufreq_host::{CAPACITY_SCALE, CpuList};

use crate::{
    config::VcpuConfig,
    options::{VcpuArgs, values::of_vcpu},
};
use vcpufreq_host::HostCpus;

/// Why vCPUs have the tables, clusters and domains of their pCPUs, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologySource {
    /// `--host-topology`.
    Asked(bool),
    /// Each vCPU is pinned within one cpufreq policy.
    Pinned,
    /// One of them isn't.
    NotPinned,
    /// The user gives a table, a domain or a capacity.
    Described,
}

impl TopologySource {
    /// Of these options, on this host.
    pub fn choose(options: &VcpuArgs, host: &HostCpus, count: u32) -> Self {
        if let Some(asked) = options.host_topology {
            return Self::Asked(asked);
        }
        if describes(options) {
            return Self::Described;
        }
        let mut pins = (0..count).map(|vcpu| of_vcpu(&options.pin, vcpu));
        match pins.all(|pin| policy_of_pin(host, pin).is_some()) {
            true => Self::Pinned,
            false => Self::NotPinned,
        }
    }

    /// Whether they mirror it.
    pub fn mirrors(self) -> bool {
        matches!(self, Self::Asked(true) | Self::Pinned)
    }

    /// The same in a line, for these vCPUs.
    pub fn text(self, vcpus: &[VcpuConfig]) -> String {
        let pins: CpuList = vcpus.iter().flat_map(|vcpu| vcpu.pin.clone()).collect();
        let pcpus = match vcpus.iter().any(|vcpu| vcpu.pin.is_empty()) {
            true => "the host's CPUs".to_owned(),
            false => format!("CPUs {pins}"),
        };
        match self {
            Self::Asked(true) => {
                format!("the vCPUs mirror {pcpus}: their tables, clusters and domains")
            }
            Self::Pinned => format!(
                "the vCPUs mirror {pcpus}, which they are pinned to: their tables, clusters and \
                 domains; --host-topology=false leaves these out"
            ),
            Self::Asked(false) => {
                let without = match own_tables(vcpus) {
                    own if own.is_empty() => "the vCPUs".to_owned(),
                    own if own.len() == vcpus.len() => {
                        return "the vCPUs have the tables of --table alone \
                                (--host-topology=false)"
                            .to_owned();
                    }
                    own => format!("all vCPUs but {own}, which --table describes,"),
                };
                format!(
                    "{without} have no tables (--host-topology=false): any frequency up to the \
                     maximum, and cur_perf in no steps"
                )
            }
            Self::NotPinned => "the vCPUs aren't pinned, each within one cpufreq policy, so they \
                                have no tables: any frequency up to the maximum, and cur_perf in \
                                no steps; --pin VCPUS=PCPUS has them mirror their CPUs"
                .to_owned(),
            Self::Described => "the vCPUs are as --table, --domain and --capacity describe them; \
                                --host-topology adds what these leave out"
                .to_owned(),
        }
    }
}

/// What these vCPUs of these options are made like on this host, and what can't be had of it, in a
/// line.
pub fn line(options: &VcpuArgs, host: &HostCpus, vcpus: &[VcpuConfig]) -> String {
    let count = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
    let topology_source = TopologySource::choose(options, host, count);
    let described = topology_source.mirrors() && describes(options);
    let parts = [
        Some(topology_source.text(vcpus)),
        described.then(|| "--table, --domain and --capacity go before these".to_owned()),
        too_slow(vcpus),
        unknown_reference(host, vcpus),
        (topology_source.mirrors() && host.capacities_lack_boost).then(without_boost),
        beyond_clamps(vcpus),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    parts.join("; ")
}

/// Whether the user gives a table, a domain or a capacity.
fn describes(options: &VcpuArgs) -> bool {
    let VcpuArgs {
        table,
        domain,
        capacity,
        ..
    } = options;
    !(table.is_empty() && domain.is_empty() && capacity.is_empty())
}

/// The vCPUs that have a table though they don't mirror the host.
fn own_tables(vcpus: &[VcpuConfig]) -> CpuList {
    let numbers = (0..).zip(vcpus);
    let own = numbers.filter(|(_, vcpu)| vcpu.opps.len() > 1);
    own.map(|(number, _)| number).collect()
}

/// No CPU that Linux runs on is slower: a maximum below this is one in MHz.
const SLOWEST_KHZ: u32 = 10_000;
/// None is faster: a maximum above this is one in Hz.
const FASTEST_KHZ: u32 = 10_000_000;

/// Which vCPUs have a maximum that looks like MHz.
fn too_slow(vcpus: &[VcpuConfig]) -> Option<String> {
    let top = |vcpu: &VcpuConfig| vcpu.opps.last().map_or(SLOWEST_KHZ, |opp| opp.khz);
    let slow: Vec<_> = (0..).zip(vcpus.iter().map(top)).collect();
    let slow = slow.into_iter().filter(|(_, khz)| *khz < SLOWEST_KHZ);
    let numbers: CpuList = slow.clone().map(|(number, _)| number).collect();
    let khz = slow.map(|(_, khz)| khz).max()?;
    Some(format!(
        "--table is in kHz, so vCPUs {numbers} have at most {khz} kHz; for {khz} MHz write {khz}000"
    ))
}

/// Refuses a maximum that looks like Hz: it would leave all frequencies that the host has to the
/// lowest thousandth of the requests.
///
/// # Errors
/// What to write.
pub(super) fn check_maximum(vcpu: u32, khz: u32) -> anyhow::Result<()> {
    if khz > FASTEST_KHZ {
        let instead = khz / 1000;
        bail!(
            "--table is in kHz, so vCPU {vcpu} has up to {khz} kHz; if these are Hz write {instead}"
        );
    }
    Ok(())
}

/// Where the vCPUs' capacities may refer to another frequency.
fn unknown_reference(host: &HostCpus, vcpus: &[VcpuConfig]) -> Option<String> {
    // Without boost there is but one.
    let boosted = vcpus.iter().map(VcpuConfig::rated);
    let boosted = boosted.filter(|rated| rated.top != rated.reference);
    let assumed: BTreeSet<_> = boosted.map(|rated| rated.reference.0).collect();
    (host.guesses_reference && !assumed.is_empty()).then(|| {
        let khz: Vec<_> = assumed.iter().map(u32::to_string).collect();
        format!(
            "the kernel doesn't tell the frequency that cpu_capacity refers to, so {} kHz is \
             assumed: other requests may be off by as much as boost adds",
            khz.join(", ")
        )
    })
}

/// That the guest's capacities are the host's.
fn without_boost() -> String {
    "cpu_capacity lacks the boost that is on now, so CPUs without boost look larger than they are, to \
     this host (before Linux 6.8) and to the guest; switch boost off, or run Linux 6.8 or later"
        .to_owned()
}

/// Which requests are beyond a clamp of 1024.
fn beyond_clamps(vcpus: &[VcpuConfig]) -> Option<String> {
    let mut beyond = vcpus.iter().map(VcpuConfig::rated);
    let rated = beyond.find(|rated| rated.at_top() > CAPACITY_SCALE.into())?;
    let khz = u64::from(rated.reference.0) * u64::from(CAPACITY_SCALE)
        / u64::from(rated.capacity.get()).max(1);
    Some(format!(
        "a request above {khz} kHz is one for {khz} kHz: there a clamp ends, and so does schedutil"
    ))
}

/// The policy of all pCPUs that the vCPU is pinned to, if there is one.
pub(super) fn policy_of_pin(host: &HostCpus, pin: Option<&CpuList>) -> Option<u32> {
    let mut ids = pin?.iter().map(|cpu| Some(host.policy_of(cpu)?.id));
    let first = ids.next()??;
    ids.all(|id| id == Some(first)).then_some(first)
}
