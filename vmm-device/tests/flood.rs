// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: whatever a guest does to the region, nothing panics and nothing grows. 10 million
//! accesses at random offsets, widths, values and vCPUs, from a fixed seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vcpufreq_device::fakes::FixedSource;
use vcpufreq_device::*;

const ACCESSES: u64 = 10_000_000;
const VCPUS: u16 = 20;

/// Refuses every third demand, and checks that what it is asked for makes sense.
#[derive(Default)]
struct Moody {
    calls: AtomicU64,
}

impl Actuator for Moody {
    fn apply(&self, domain: DomainId, demand: Demand) -> Result<(), ActuateError> {
        assert!(demand == Demand::NONE || demand.max == demand.min);
        match self.calls.fetch_add(1, Relaxed) % 3 {
            0 => Err(ActuateError::NoThread { domain }),
            _ => Ok(()),
        }
    }
}

/// xorshift64*: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 32) % bound
    }
}

fn device() -> Device<Arc<Moody>, FixedSource, NoEvents> {
    let table = PerfTable::try_from(vec![Khz(1), Khz(1000), Khz(u32::MAX)]).expect("a sound table");
    let spec = |vcpu: u16| VcpuSpec {
        table: table.clone(),
        capacity: Util::MAX,
        domain: DomainId(u32::from(vcpu / 3)),
    };
    let config = DeviceConfig {
        vcpus: (0..VCPUS).map(spec).collect(),
        mode: ClampMode::Exact,
        headroom: Headroom::None,
        report: Report::Exact,
        rate_limit: None,
    };
    let pcpu = PcpuPerf {
        pcpu: 0,
        khz: Khz(u32::MAX),
        khz_max: Khz(u32::MAX),
        capacity: Util::MAX,
    };
    Device::new(config, Arc::default(), FixedSource::new(pcpu), NoEvents).expect("a sound device")
}

/// Resident memory of this process, in pages.
fn resident_pages() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let resident = statm.split(' ').nth(1).expect("seven numbers");
    resident.parse().expect("a number")
}

/// Mostly near the registers, often legal, sometimes anywhere.
fn offset(random: &mut Random) -> u64 {
    match random.below(16) {
        0 => random.next(),
        1 => random.below(region_size(VCPUS)),
        _ => random.below(VCPUS.into()) * REGION_STRIDE + random.below(0x20),
    }
}

fn hammer(region: &MmioRegion<Arc<Moody>, FixedSource, NoEvents>, random: &mut Random, n: u64) {
    let mut data = [0; 16];
    for _ in 0..n {
        let mut offset = offset(random);
        let mut len = usize::try_from(random.below(17)).expect("below 17");
        if random.below(2) == 0 {
            offset &= !3;
            len = 4;
        }
        if random.below(2) == 0 {
            region.read(offset, &mut data[..len]);
        } else {
            data[..8].copy_from_slice(&random.next().to_le_bytes());
            region.write(offset, &data[..len]);
        }
    }
}

#[test]
fn ten_million_random_accesses() {
    let region = MmioRegion::new(Arc::new(device()));
    let mut random = Random(0x00c0_ffee);
    hammer(&region, &mut random, ACCESSES / 10);
    let before = resident_pages();
    hammer(&region, &mut random, ACCESSES - ACCESSES / 10);
    let grown = resident_pages().saturating_sub(before);
    assert!(grown <= 16, "grew by {grown} pages");

    let device = region.device();
    let all: Vec<_> = (0..VCPUS)
        .map(|v| device.counters(VcpuId(v)).unwrap())
        .collect();
    for (vcpu, c) in all.iter().enumerate() {
        let outcomes = c.applied + c.unchanged + c.superseded + c.refused + c.not_applicable;
        assert_eq!(c.requests, outcomes, "vCPU {vcpu}");
        assert!(
            c.requests > 1000 && c.illegal > 1000 && c.refused > 0,
            "{vcpu}: {c:?}"
        );
    }
    assert!(device.accesses_outside() > 1000);
}
