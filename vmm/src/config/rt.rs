// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is wanted of real-time vCPUs, checked without looking at the host.

use anyhow::bail;
use vcpufreq_device::Util;
use vcpufreq_host::CpuList;

use super::VcpuConfig;
use crate::options::{BoundArgs, RunArgs, values::of_vcpu};

/// Checks the real-time side of `vcpus` and these bounds; the lower bound of each vCPU's requests.
///
/// # Errors
/// The first rule that is broken.
pub fn floors(
    bounds: &BoundArgs,
    vcpus: &[VcpuConfig],
    online: &CpuList,
) -> anyhow::Result<Vec<Util>> {
    check_pins(vcpus, online)?;
    let floor = |(number, (vcpu, config))| match of_vcpu(&bounds.floor, number) {
        Some(khz) => floor(vcpu, config, *khz),
        None => Ok(Util::ZERO),
    };
    let floors = (0..).zip(vcpus.iter().enumerate()).map(floor);
    let floors: Vec<_> = floors.collect::<anyhow::Result<_>>()?;
    if bounds.resume_latency_us.is_some() && vcpus.iter().all(|vcpu| vcpu.rt.is_none()) {
        bail!("--resume-latency-us is for real-time vCPUs' pCPUs; give --rt too");
    }
    Ok(floors)
}

/// Checks what else a guest of `run` with these floors can't have.
///
/// # Errors
/// The first rule that is broken.
pub fn check_run(options: &RunArgs, floors: &[Util]) -> anyhow::Result<()> {
    if options.vcpus.no_bridge && floors.iter().any(|floor| *floor > Util::ZERO) {
        bail!("--floor is a bound on requests, of which there are none with --no-bridge");
    }
    let mem_mib = options.mem.0;
    let page_mib = options.hugepages.unwrap_or_default().bytes() >> 20;
    if page_mib > 0 && mem_mib % page_mib != 0 {
        bail!(
            "{mem_mib} MiB of memory is no multiple of the huge pages' {page_mib} MiB; change --mem"
        );
    }
    Ok(())
}

/// `floor(capacity × kHz / reference)`, as a request of so many kHz would be clamped.
fn floor(vcpu: usize, config: &VcpuConfig, khz: u32) -> anyhow::Result<Util> {
    let max_khz = config.opps.last().map_or(0, |opp| opp.khz);
    if khz > max_khz {
        bail!(
            "vCPU {vcpu}'s floor of {khz} kHz is not within its maximum of {max_khz} kHz; lower --floor"
        );
    }
    let util = u128::from(config.capacity.get()) * u128::from(khz);
    let reference = config.rated().reference;
    Ok(Util::saturating(util / u128::from(reference.0.max(1))))
}

fn check_pins(vcpus: &[VcpuConfig], online: &CpuList) -> anyhow::Result<()> {
    let mut taken = Vec::new();
    let rt = vcpus.iter().enumerate();
    for (first, config) in rt.filter(|(_, config)| config.rt.is_some()) {
        let &[pcpu] = config.pin.as_slice() else {
            bail!(
                "vCPU {first} is real-time and has to be pinned to one pCPU; give --pin {first}=PCPU"
            );
        };
        for (second, other) in vcpus.iter().enumerate() {
            if second != first && other.pin.contains(&pcpu) {
                bail!("CPU {pcpu} is real-time vCPU {first}'s alone; pin vCPU {second} to another");
            }
            if other.domain == config.domain && other.rt.is_none() {
                bail!(
                    "domain {} has real-time vCPUs and others; give --domain of their own",
                    config.domain
                );
            }
        }
        taken.push(pcpu);
    }
    if !taken.is_empty() && online.iter().all(|cpu| taken.contains(&cpu)) {
        bail!("real-time vCPUs have all of CPUs {online}; leave one for everything else");
    }
    Ok(())
}
