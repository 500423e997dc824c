// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From configured vCPUs to the facts that their device-tree nodes are made of.

use std::{collections::BTreeMap, fs::File, io::Read, path::Path};

use anyhow::Context;
use vcpufreq_bridge::shm;
use vcpufreq_device::{DomainId, guest_capacities, region_size};
use vcpufreq_dt::{
    CpuFacts, CpufreqRegion, FactsError, Machine, MachineFacts, OppTable, RegionKind,
};

use crate::config::VcpuConfig;
use vcpufreq_vm::layout;

/// Without the bridge the guest has no cpufreq driver, and Linux doesn't
/// multiply capacities by a frequency: the same for all keeps their ratio.
const SAME_FOR_ALL_KHZ: u32 = 1_000_000;

/// A file with a tree may be padded. What is behind this many bytes isn't read.
const MAX_FILE: u64 = 16 << 20;

/// The bytes of the device tree at `path`.
///
/// # Errors
/// As open(2) and read(2), in one line.
pub fn read_tree(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut tree = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut tree));
    read.with_context(|| format!("can't read {}; name a device tree blob", path.display()))?;
    Ok(tree)
}

/// The registers of the cpufreq device of `vcpus`, at `base`.
pub fn registers(vcpus: &[VcpuConfig], base: u64) -> CpufreqRegion {
    CpufreqRegion {
        base,
        size: region_size(count(vcpus)),
        kind: RegionKind::Registers,
    }
}

/// The memory of the same device, shared with the guest.
pub fn shared_memory(vcpus: &[VcpuConfig], base: u64) -> CpufreqRegion {
    CpufreqRegion {
        base,
        size: shm::size(count(vcpus)),
        kind: RegionKind::SharedMemory,
    }
}

/// The registers of the same device in the guest's RAM.
pub fn in_guest_ram(vcpus: &[VcpuConfig], base: u64) -> CpufreqRegion {
    CpufreqRegion {
        kind: RegionKind::GuestRam,
        ..registers(vcpus, base)
    }
}

fn count(vcpus: &[VcpuConfig]) -> u16 {
    u16::try_from(vcpus.len()).unwrap_or(u16::MAX)
}

/// The guest's CPUs, with the cpufreq device if there is one, and with PSCI's standby if
/// `standby`.
///
/// A domain has one OPP table, which its vCPUs share; a table of one entry is
/// none, and neither is there one without the bridge.
///
/// # Errors
/// What the device tree can't describe of these vCPUs.
pub fn machine(
    vcpus: &[VcpuConfig],
    cpufreq: Option<CpufreqRegion>,
    standby: bool,
) -> Result<Machine, FactsError> {
    let mut tables = Vec::new();
    let mut table_of: BTreeMap<DomainId, usize> = BTreeMap::new();
    let mut cpus = Vec::new();
    let rated: Vec<_> = vcpus.iter().map(VcpuConfig::rated).collect();
    let capacities = guest_capacities(&rated);
    for (number, (vcpu, capacity)) in (0_u16..).zip(vcpus.iter().zip(capacities)) {
        let opp_table = (cpufreq.is_some() && vcpu.opps.len() > 1).then(|| {
            *table_of.entry(vcpu.domain).or_insert_with(|| {
                tables.push(OppTable {
                    opps: vcpu.opps.clone(),
                    shared: true,
                });
                tables.len() - 1
            })
        });
        let top = vcpu.opps.last().filter(|_| cpufreq.is_some());
        cpus.push(CpuFacts {
            reg: layout::mpidr_affinity(number),
            capacity: capacity.get(),
            khz_max: top.map_or(SAME_FOR_ALL_KHZ, |opp| opp.khz),
            opp_table,
            place: vcpu.place,
            real_time: vcpu.rt.is_some(),
        });
    }
    Machine::try_from(MachineFacts {
        cpus,
        opp_tables: tables,
        standby,
        cpufreq,
    })
}

#[cfg(test)]
mod tests {
    //! vCPUs of one domain share a table; without the bridge there is none, and
    //! capacities keep their ratio.

    use vcpufreq_host::{HostCpus, fakes::FakeHost};

    use super::*;
    use crate::{config::resolve, options::RunArgs};

    const VCPUS: &str = "cpus = 3\nhost-topology = true\n\
        [vcpu.0]\npin = 0\n[vcpu.1]\npin = 2\n[vcpu.2]\npin = 3";

    fn vcpus(toml: &str) -> Vec<VcpuConfig> {
        let host = HostCpus::read(&FakeHost::two_plus_two().root());
        let options = RunArgs::of_toml(toml).vcpus;
        resolve::vcpus(&options, &host, resolve::vcpu_count(&options).unwrap()).unwrap()
    }

    #[test]
    fn vcpus_of_one_domain_share_a_table() {
        let vcpus = vcpus(VCPUS);
        let cpufreq = Some(registers(&vcpus, 0x0a00_0000));
        let machine = machine(&vcpus, cpufreq, false).unwrap();
        let facts = machine.facts();
        let tables: Vec<_> = facts.cpus.iter().map(|cpu| cpu.opp_table).collect();
        assert_eq!(tables, [Some(0), Some(1), Some(1)]);
        assert_eq!(machine.guest_capacities(), [329, 1024, 1024]);
        assert_eq!(facts.cpufreq.unwrap().size, 0x1_0000);
    }

    #[test]
    fn a_real_time_vcpu_is_a_real_time_cpu() {
        let machine = machine(&vcpus(&format!("{VCPUS}\nrt = 'fifo:1'")), None, true).unwrap();
        let real_time: Vec<_> = machine
            .facts()
            .cpus
            .iter()
            .map(|cpu| cpu.real_time)
            .collect();
        assert_eq!(real_time, [false, false, true]);
    }

    #[test]
    fn a_table_of_one_entry_is_none() {
        let vcpus = vcpus("[vcpu.0]\ntable = [5]\ncapacity = 1024");
        let machine = machine(&vcpus, Some(registers(&vcpus, 0)), false).unwrap();
        assert!(machine.facts().opp_tables.is_empty());
        assert_eq!(machine.facts().cpus[0].khz_max, 5);
    }

    #[test]
    fn without_the_bridge_capacities_keep_their_ratio() {
        let machine = machine(&vcpus(VCPUS), None, true).unwrap();
        let [little, big, _] = machine.capacity_dmips_mhz()[..] else {
            panic!()
        };
        assert_eq!(u64::from(little) * 1024 / u64::from(big), 329);
        assert!(machine.facts().opp_tables.is_empty() && machine.facts().cpufreq.is_none());
    }
}
