// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device without a host, and what of its events the tests of this path look at.

use std::sync::Arc;

use vcpufreq_device::fakes::{FixedSource, RecordingEvents};
use vcpufreq_device::{
    Actuator, Device, DeviceConfig, DomainId, Event, Khz, PerfTable, Util, VcpuSpec,
};

pub type FakeDevice<A> = Device<A, FixedSource, RecordingEvents>;

/// Of so many vCPUs, in a domain each.
pub fn fake_device<A: Actuator>(vcpus: u32, actuator: A) -> Arc<FakeDevice<A>> {
    let spec = |domain| VcpuSpec {
        table: PerfTable::try_from(vec![Khz(1), Khz(2)]).unwrap(),
        capacity: Util::MAX,
        domain: DomainId(domain),
    };
    let config = DeviceConfig::new((0..vcpus).map(spec).collect());
    let ports = (FixedSource::default(), RecordingEvents::default());
    Arc::new(Device::new(config, actuator, ports.0, ports.1).unwrap())
}

/// The values that were asked for, in order.
pub fn requests<A: Actuator>(device: &FakeDevice<A>) -> Vec<u32> {
    let events = device.events().all().into_iter();
    let khz = events.filter_map(|event| match event {
        Event::Request { khz, .. } => Some(khz.0),
        _ => None,
    });
    khz.collect()
}
