// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is wanted of real-time vCPUs, checked without looking at the host.

use thiserror::Error;
use vcpufreq_device::{DomainId, Util, host::CpuList};

use super::VcpuConfig;
use crate::options::{RunArgs, values::of_vcpu};

/// Why a guest can't be real-time like this.
#[derive(Debug, Error)]
pub enum RtError {
    /// Not pinned to one pCPU.
    #[error("vCPU {0} is real-time and has to be pinned to one pCPU; give --pin {0}=PCPU")]
    NotPinned(usize),
    /// A pCPU for two.
    #[error("CPU {pcpu} is real-time vCPU {first}'s alone; pin vCPU {second} to another")]
    Shared {
        /// The pCPU.
        pcpu: u32,
        /// Whose it is.
        first: usize,
        /// Who may run there too.
        second: usize,
    },
    /// Nothing left for the VMM's own threads.
    #[error("real-time vCPUs have all of CPUs {0}; leave one for everything else")]
    NoHousekeeping(CpuList),
    /// A domain of both kinds.
    #[error("domain {0} has real-time vCPUs and others; give --domain of their own")]
    MixedDomain(DomainId),
    /// A bound without anybody to bind it for.
    #[error("--resume-latency-us is for real-time vCPUs' pCPUs; give --rt too")]
    NoRtVcpu,
    /// Memory that doesn't come out even.
    #[error(
        "{mem_mib} MiB of memory is no multiple of the huge pages' {page_mib} MiB; change --mem"
    )]
    OddMemory {
        /// The guest's memory.
        mem_mib: u64,
        /// A page.
        page_mib: u64,
    },
    /// A floor that the vCPU doesn't reach.
    #[error(
        "vCPU {vcpu}'s floor of {khz} kHz is not within its maximum of {max_khz} kHz; lower --floor"
    )]
    Floor {
        /// The vCPU.
        vcpu: usize,
        /// What was asked for.
        khz: u32,
        /// Its highest frequency; 0 when it isn't known.
        max_khz: u32,
    },
    /// A floor without requests.
    #[error("--floor is a bound on requests, of which there are none with --no-bridge")]
    FloorWithoutBridge,
}

/// Checks the real-time side of these options; the lower bound of each vCPU's requests.
///
/// # Errors
/// The first rule that is broken.
pub fn floors(
    options: &RunArgs,
    vcpus: &[VcpuConfig],
    online: &CpuList,
) -> Result<Vec<Util>, RtError> {
    check_pins(vcpus, online)?;
    let floor = |(number, (vcpu, config))| match of_vcpu(&options.floor, number) {
        Some(khz) => floor(vcpu, config, *khz),
        None => Ok(Util::ZERO),
    };
    let floors = (0..).zip(vcpus.iter().enumerate()).map(floor);
    let floors: Vec<_> = floors.collect::<Result<_, _>>()?;
    if options.vcpus.no_bridge && floors.iter().any(|floor| *floor > Util::ZERO) {
        return Err(RtError::FloorWithoutBridge);
    }
    if options.resume_latency_us.is_some() && vcpus.iter().all(|vcpu| vcpu.rt.is_none()) {
        return Err(RtError::NoRtVcpu);
    }
    let mem_mib = options.mem.0;
    let page_mib = options.hugepages.unwrap_or_default().bytes() >> 20;
    if page_mib > 0 && !mem_mib.is_multiple_of(page_mib) {
        return Err(RtError::OddMemory { mem_mib, page_mib });
    }
    Ok(floors)
}

/// `floor(capacity × kHz / maximum)`, as a request of so many kHz would be clamped.
fn floor(vcpu: usize, config: &VcpuConfig, khz: u32) -> Result<Util, RtError> {
    let max_khz = config.opps.last().map_or(0, |opp| opp.khz);
    if khz > max_khz {
        return Err(RtError::Floor { vcpu, khz, max_khz });
    }
    let util = u128::from(config.capacity.get()) * u128::from(khz);
    Ok(Util::saturating(util / u128::from(max_khz.max(1))))
}

fn check_pins(vcpus: &[VcpuConfig], online: &CpuList) -> Result<(), RtError> {
    let mut taken = Vec::new();
    let rt = vcpus.iter().enumerate();
    for (first, config) in rt.filter(|(_, config)| config.rt.is_some()) {
        let &[pcpu] = config.pin.as_slice() else {
            return Err(RtError::NotPinned(first));
        };
        for (second, other) in vcpus.iter().enumerate() {
            if second != first && other.pin.contains(&pcpu) {
                return Err(RtError::Shared {
                    pcpu,
                    first,
                    second,
                });
            }
            if other.domain == config.domain && other.rt.is_none() {
                return Err(RtError::MixedDomain(config.domain));
            }
        }
        taken.push(pcpu);
    }
    if !taken.is_empty() && online.iter().all(|cpu| taken.contains(&cpu)) {
        return Err(RtError::NoHousekeeping(online.clone()));
    }
    Ok(())
}
