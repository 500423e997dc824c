// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine of the targets that carry out requests: three vCPUs of two domains, and what is in
//! force for each domain.

use std::sync::Mutex;

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

/// The minimum and the maximum in force of each domain.
#[derive(Debug)]
pub struct AppliedClamps(Mutex<[Clamp; 2]>);

impl AppliedClamps {
    /// All of them.
    pub fn clamps(&self) -> [Clamp; 2] {
        *self.0.lock().expect("no panic meanwhile")
    }
}

impl Actuator for AppliedClamps {
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        self.0.lock().expect("no panic meanwhile")[domain.0 as usize] = clamp;
        Ok(())
    }

    fn serves_any_vcpu(&self) -> bool {
        true
    }
}

/// The clamp that `value` in set_perf of `vcpu` stands for, of its domain. Bits 28 to 31 make it a
/// ceiling too.
pub fn clamp_of(vcpu: usize, value: u32) -> (usize, Clamp) {
    let (domain, capacity, table) = VCPUS[vcpu];
    let max = table[table.len() - 1];
    let khz = value % (1 << 28);
    let util = u64::from(capacity) * u64::from(khz.min(max)) / u64::from(max);
    let min = Util::saturating(util.into());
    let is_ceiling = khz != 0 && value != khz;
    let max = if is_ceiling { min } else { Util::MAX };
    (domain as usize, Clamp { min, max })
}

/// Checks that the clamps in force are `expected`.
pub fn check(device: &FuzzedDevice, expected: [Clamp; 2], after: &dyn std::fmt::Debug) {
    let in_force = device.actuator().clamps();
    assert_eq!(in_force, expected, "clamps in force after {after:?}");
}

/// A device of that machine.
pub type FuzzedDevice = Device<AppliedClamps, FixedSource, NoEvents>;

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
    let actuator = AppliedClamps(Mutex::new([Clamp::NONE; 2]));
    Device::new(config, actuator, source, NoEvents).expect("a configuration that holds")
}
