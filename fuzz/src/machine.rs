// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine of the targets that carry out requests: three vCPUs of two domains, and what is in
//! force for each domain.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use vcpufreq_device::fakes::FixedSource;
use vcpufreq_device::{
    ActuateError, Actuator, Clamp, Device, DeviceConfig, DomainId, Khz, NoEvents, PcpuPerf,
    PerfTable, Util, VcpuSpec,
};

/// Of each vCPU: its domain, its capacity, and its table in kHz.
pub const VCPUS: [(u32, u16, &[u32]); 3] = [
    (0, 329, &[600_000, 1_000_000, 1_800_000]),
    (0, 329, &[600_000, 1_000_000, 1_800_000]),
    (1, 1024, &[700_000, 1_200_000, 2_800_000]),
];

/// The minimum in force of each domain.
#[derive(Debug, Default)]
pub struct Minima([AtomicU32; 2]);

impl Minima {
    /// All of them.
    pub fn minima(&self) -> [u32; 2] {
        self.0.each_ref().map(|min| min.load(Relaxed))
    }
}

impl Actuator for Minima {
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        assert_eq!(clamp.max, Util::MAX, "in mode floor");
        self.0[domain.0 as usize].store(clamp.min.get().into(), Relaxed);
        Ok(())
    }

    fn serves_any_vcpu(&self) -> bool {
        true
    }
}

/// The minimum that a request for so many kHz by `vcpu` stands for, of its domain.
pub fn minimum(vcpu: usize, khz: u32) -> (usize, u32) {
    let (domain, capacity, table) = VCPUS[vcpu];
    let max = table[table.len() - 1];
    let util = u64::from(capacity) * u64::from(khz.min(max)) / u64::from(max);
    (domain as usize, u32::try_from(util).unwrap_or(u32::MAX))
}

/// Checks that the minima in force are `expected`.
pub fn check(device: &FuzzedDevice, expected: [u32; 2], after: &dyn std::fmt::Debug) {
    let in_force = device.actuator().minima();
    assert_eq!(in_force, expected, "minima in force after {after:?}");
}

/// A device of that machine.
pub type FuzzedDevice = Device<Minima, FixedSource, NoEvents>;

/// A new one.
pub fn device() -> FuzzedDevice {
    let vcpus = VCPUS.map(|(domain, capacity, table)| VcpuSpec {
        table: PerfTable::try_from(table.iter().copied().map(Khz).collect::<Vec<_>>())
            .expect("a table that rises"),
        capacity: Util::new(capacity).expect("within 1024"),
        domain: DomainId(domain),
    });
    let config = DeviceConfig::new(vcpus.into());
    let source = FixedSource::new(PcpuPerf {
        pcpu: 0,
        khz: Khz(1_400_000),
        reference: Khz(2_800_000),
        capacity: Util::MAX,
    });
    Device::new(config, Minima::default(), source, NoEvents).expect("a configuration that holds")
}
