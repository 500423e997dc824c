// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the programs start with.

use std::fs::OpenOptions;
use std::os::fd::AsFd;

use vcpufreq_bridge::BridgeDevice;
use vcpufreq_device::DomainId;
use vcpufreq_host::SysfsSource;

use crate::{ActuateBy, HostModule, PcpuFacts, VcpuPolicy};

/// The module, bound to all domains; `None` when it isn't loaded, or can't act
/// for these.
pub(super) fn open_module(
    device: &BridgeDevice,
    domains: &[DomainId],
) -> anyhow::Result<Option<HostModule>> {
    if !HostModule::is_loaded() || !device.actuator().clamps() {
        return Ok(None);
    }
    let specs = &device.config().vcpus;
    let module = HostModule::open(u16::try_from(specs.len())?, u16::try_from(domains.len())?)?;
    for (index, domain) in (0..).zip(domains) {
        // The module writes cgroups only: on threads it is the worker.
        let Some(group) = device.actuator().group(*domain) else {
            return Ok(None);
        };
        let open = |name| OpenOptions::new().write(true).open(group.join(name));
        let (min, max) = (open("cpu.uclamp.min")?, open("cpu.uclamp.max")?);
        module.bind(index, min.as_fd(), max.as_fd())?;
    }
    Ok(Some(module))
}

/// What puts requests into force.
pub(super) fn by(device: &BridgeDevice, scx: bool, module: &Option<HostModule>) -> ActuateBy {
    match (scx, device.actuator().clamps(), module) {
        (true, _, _) => ActuateBy::Scx,
        (false, false, _) => ActuateBy::Nothing,
        (false, true, Some(_)) => ActuateBy::Kfunc,
        (false, true, None) => ActuateBy::Worker,
    }
}

pub(super) fn policies(
    device: &BridgeDevice,
    domains: &[DomainId],
    actuate: ActuateBy,
    sum: bool,
) -> Vec<VcpuPolicy> {
    let config = device.config();
    let policy = |spec: &vcpufreq_device::VcpuSpec| VcpuPolicy {
        spec: spec.clone(),
        domain: u32::try_from(domains.partition_point(|id| *id < spec.domain)).unwrap_or(u32::MAX),
        clamp: config.mode,
        headroom: config.headroom,
        visibility: config.visibility,
        actuate,
        limit: config.rate_limit,
        floor: device.actuator().floor(spec.domain),
        // By sched_setattr each new clamp would dip the frequency.
        sum: sum && device.actuator().group(spec.domain).is_some(),
        tell: device.events().has_sink(),
    };
    config.vcpus.iter().map(policy).collect()
}

/// The pCPUs whose frequency the host tells.
pub(super) fn pcpus(source: &SysfsSource) -> Vec<PcpuFacts> {
    let known = source.pcpus().into_iter().map(|top| PcpuFacts {
        number: top.pcpu,
        capacity: top.capacity,
        reference: top.reference,
    });
    known.collect()
}
