// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accesses of a guest to the registers of three vCPUs, against a model: what a register reads as,
//! and the clamp that is in force.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use vcpufreq_device::fakes::FixedSource;
use vcpufreq_device::{
    ActuateError, Actuator, Clamp, ClampMode, CurPerfVisibility, Device, DeviceConfig, DomainId,
    Headroom, Khz, MmioRegion, NoEvents, PcpuPerf, PerfTable, Util, VcpuId, VcpuSpec,
};

/// Of each vCPU: its domain, its capacity, and its table in kHz.
const VCPUS: [(u32, u16, &[u32]); 3] = [
    (0, 329, &[600_000, 1_000_000, 1_800_000]),
    (0, 329, &[600_000, 1_000_000, 1_800_000]),
    (1, 1024, &[700_000, 1_200_000, 2_800_000]),
];
/// The registers that the binding has, and the one of the features.
const REGISTERS: [u64; 7] = [0x00, 0x04, 0x08, 0x0c, 0x10, 0x14, 0x100];
/// Bytes of an access: what, where, of how many bytes, and its value.
const ACCESS: usize = 8;

/// The minimum in force of each domain.
#[derive(Debug, Default)]
struct Minima([AtomicU32; 2]);

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

/// What the device should be like.
#[derive(Default)]
struct Model {
    selected: [u32; 3],
    minima: [u32; 2],
}

impl Model {
    fn write(&mut self, vcpu: usize, register: u64, value: u32) {
        let (domain, capacity, table) = VCPUS[vcpu];
        let max = table[table.len() - 1];
        match register {
            0x04 => {
                let util = u64::from(capacity) * u64::from(value.min(max)) / u64::from(max);
                self.minima[domain as usize] = u32::try_from(util).unwrap_or(u32::MAX);
            }
            0x0c => self.selected[vcpu] = value,
            _ => (),
        }
    }

    /// What a register reads as; `None` for cur_perf, which the host decides.
    fn read(&self, vcpu: usize, register: u64) -> Option<u32> {
        let (domain, _, table) = VCPUS[vcpu];
        let selected = usize::try_from(self.selected[vcpu]).ok();
        match register {
            0x00 => None,
            0x08 => u32::try_from(table.len()).ok(),
            0x10 => Some(selected.and_then(|n| table.get(n)).copied().unwrap_or(0)),
            0x14 => Some(domain),
            0x100 => Some(1),
            _ => Some(0),
        }
    }
}

/// Carries the accesses out on device and model.
pub fn registers(data: &[u8]) {
    let device = Arc::new(device());
    let region = MmioRegion::new(device.clone());
    let mut model = Model::default();
    for access in data.chunks_exact(ACCESS) {
        let [what, page, register, len, value @ ..] = access else {
            continue;
        };
        let value: [u8; 4] = value.try_into().unwrap_or_default();
        let in_page = match REGISTERS.get(usize::from(register % 8)) {
            Some(known) => *known,
            None => u64::from(u32::from_le_bytes(value)),
        };
        let offset = u64::from(page % 5) * 0x1000 + in_page;
        let (vcpu, in_page) = ((offset / 0x1000) as usize, offset % 0x1000);
        // Most have the width that is legal.
        let len = if *len < 200 { 4 } else { usize::from(*len % 9) };
        let legal = vcpu < VCPUS.len() && len == 4;
        let by = Some(VcpuId(u16::from(what >> 4) % 4)).filter(|by| by.index() < VCPUS.len());
        if what & 1 == 0 {
            let bytes = [value, value, value].concat();
            region.write_by(by, offset, &bytes[..len]);
            if legal {
                model.write(vcpu, in_page, u32::from_le_bytes(value));
            }
            for (domain, minimum) in model.minima.iter().enumerate() {
                let in_force = device.actuator().0[domain].load(Relaxed);
                assert_eq!(in_force, *minimum, "domain {domain} after {access:?}");
            }
        } else {
            let mut read = vec![0xff; len];
            region.read(offset, &mut read);
            let expected = if legal {
                model.read(vcpu, in_page)
            } else {
                Some(0)
            };
            let read = read
                .iter()
                .rev()
                .fold(0, |all, byte| all << 8 | u64::from(*byte));
            match expected {
                Some(expected) => assert_eq!(read, u64::from(expected), "{access:?}"),
                None => assert!(read > 0, "{access:?}"),
            }
        }
    }
}

fn device() -> Device<Minima, FixedSource, NoEvents> {
    let vcpus = VCPUS.map(|(domain, capacity, table)| VcpuSpec {
        table: PerfTable::try_from(table.iter().copied().map(Khz).collect::<Vec<_>>())
            .expect("a table that rises"),
        capacity: Util::new(capacity).expect("within 1024"),
        domain: DomainId(domain),
    });
    let config = DeviceConfig {
        vcpus: vcpus.into(),
        mode: ClampMode::Floor,
        headroom: Headroom::None,
        visibility: CurPerfVisibility::Exact,
        rate_limit: None,
    };
    let source = FixedSource::new(PcpuPerf {
        pcpu: 0,
        khz: Khz(1_400_000),
        khz_max: Khz(2_800_000),
        capacity: Util::MAX,
    });
    Device::new(config, Minima::default(), source, NoEvents).expect("a configuration that holds")
}
