// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPUs as the pCPUs that they are pinned to.

#![forbid(unsafe_code)]

use vcpufreq_device::{
    DeviceConfig, DomainId, Headroom, Khz, PerfTable, TableError, Util, VcpuId, VcpuSpec,
};

use super::{HostCpus, HostRoot};

/// Why a vCPU can't be as its pCPUs.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// It may run anywhere.
    #[error("vCPU {vcpu} is not pinned")]
    NotPinned {
        /// The vCPU.
        vcpu: VcpuId,
    },
    /// Its pCPUs have no policy, or different ones.
    #[error("the pCPUs of vCPU {vcpu} are not those of one cpufreq policy")]
    NoPolicy {
        /// The vCPU.
        vcpu: VcpuId,
    },
    /// The policy's frequencies.
    #[error("vCPU {vcpu}: {error}")]
    Table {
        /// The vCPU.
        vcpu: VcpuId,
        /// What is wrong with them.
        error: TableError,
    },
}

/// A device for vCPUs with these pins: each has the frequencies, the capacity and, as its domain, the
/// policy of its pCPUs. The headroom is that of the host's kernel.
///
/// # Errors
/// The first vCPU for which that can't be.
pub fn mirror(root: &HostRoot, pins: &[Vec<u32>]) -> Result<DeviceConfig, MirrorError> {
    let cpus = HostCpus::read(root);
    let vcpus = (0..).map(VcpuId).zip(pins);
    let vcpus = vcpus.map(|(vcpu, pin)| mirrored(&cpus, vcpu, pin));
    let version = root.kernel_version();
    let headroom = version.map_or(Headroom::None, |(major, minor)| {
        Headroom::for_kernel(major, minor)
    });
    Ok(DeviceConfig {
        headroom,
        ..DeviceConfig::new(vcpus.collect::<Result<_, _>>()?)
    })
}

fn mirrored(cpus: &HostCpus, vcpu: VcpuId, pin: &[u32]) -> Result<VcpuSpec, MirrorError> {
    let first = *pin.first().ok_or(MirrorError::NotPinned { vcpu })?;
    let (policy, cpu) = cpus
        .policy_of(first)
        .zip(cpus.cpu(first))
        .filter(|(policy, _)| pin.iter().all(|pcpu| policy.cpus.contains(*pcpu)))
        .ok_or(MirrorError::NoPolicy { vcpu })?;
    let mut table: Vec<_> = policy.opps.iter().map(|opp| Khz(opp.khz)).collect();
    if table.is_empty() {
        // Any frequency up to it.
        table.extend(policy.top_khz().map(Khz));
    }
    let table = PerfTable::try_from(table);
    let table = table.map_err(|error| MirrorError::Table { vcpu, error })?;
    Ok(VcpuSpec {
        table: match cpu.reference_khz {
            Some(reference) => table.referring_to(Khz(reference)),
            None => table,
        },
        capacity: Util::saturating(cpu.capacity_or_full().into()),
        domain: DomainId(policy.id),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::FakeHost;

    #[test]
    fn a_vcpu_is_as_its_pcpus() {
        let host = FakeHost::two_plus_two();
        let config = mirror(&host.root(), &[vec![1], vec![2, 3]]).unwrap();
        let [little, big] = &config.vcpus[..] else {
            panic!("{config:?}")
        };
        assert_eq!((little.domain, little.capacity.get()), (DomainId(0), 329));
        assert_eq!((big.domain, big.capacity.get()), (DomainId(2), 1024));
        assert_eq!(little.table.max(), Khz(1_800_000));
        assert_eq!(big.table.entries().len(), 5);
    }

    #[test]
    fn others_are_refused_by_name() {
        let root = FakeHost::two_plus_two();
        let why = |pins: &[Vec<u32>]| mirror(&root.root(), pins).unwrap_err().to_string();
        assert_eq!(why(&[vec![0], vec![]]), "vCPU 1 is not pinned");
        let policies = "the pCPUs of vCPU 0 are not those of one cpufreq policy";
        assert_eq!(why(&[vec![1, 2]]), policies);
        assert_eq!(why(&[vec![9]]), policies);
    }
}
