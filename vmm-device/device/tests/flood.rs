// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: whatever a guest does to the region, nothing panics and nothing grows. 10 million
//! accesses at random offsets, widths, values and vCPUs, from a fixed seed: half of them to a
//! device without limits, half to the default of `vcpufreq run`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vcpufreq_device::fakes::{FixedSource, ManualClock};
use vcpufreq_device::*;

/// To each of the two devices.
const ACCESSES: u64 = 5_000_000;
const VCPUS: u16 = 20;

/// The VMM's limit.
const LIMIT: RateLimit = RateLimit {
    per_second: NonZeroU32::new(5_000).expect("not 0"),
    burst: NonZeroU32::new(500).expect("not 0"),
};
/// How long an access takes, on the limit's clock: so that some requests have to wait.
const ACCESS_NS: u64 = 100;
/// Accesses after which requests that wait get their turn.
const TURN: u64 = 1_000;

/// Refuses every third clamp, and checks that what it is asked for makes sense.
struct Moody {
    mode: ClampMode,
    calls: AtomicU64,
}

impl Actuator for Moody {
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        let makes_sense = match self.mode {
            ClampMode::Exact => clamp.max == clamp.min,
            ClampMode::Floor => clamp.max == Util::MAX,
            // Most values are ceilings.
            ClampMode::Ceilings => clamp.max == clamp.min || clamp.max == Util::MAX,
        };
        assert!(clamp == Clamp::NONE || makes_sense);
        match self.calls.fetch_add(1, Relaxed) % 3 {
            0 => Err(ActuateError::NoThread { domain }),
            _ => Ok(()),
        }
    }

    fn serves_any_vcpu(&self) -> bool {
        true
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

type MoodyDevice = Device<Moody, FixedSource, NoEvents>;

/// A device, and its clock.
fn device(
    mode: ClampMode,
    visibility: CurPerfVisibility,
    rate_limit: Option<RateLimit>,
) -> (MoodyDevice, ManualClock) {
    let table = PerfTable::try_from(vec![Khz(1), Khz(1000), Khz(u32::MAX)]).expect("a sound table");
    let spec = |vcpu: u16| VcpuSpec {
        table: table.clone(),
        capacity: Util::MAX,
        domain: DomainId(u32::from(vcpu / 3)),
    };
    let config = DeviceConfig {
        vcpus: (0..VCPUS).map(spec).collect(),
        mode,
        headroom: Headroom::None,
        visibility,
        rate_limit,
    };
    let pcpu = PcpuPerf {
        pcpu: 0,
        khz: Khz(u32::MAX),
        reference: Khz(u32::MAX),
        capacity: Util::MAX,
    };
    let moody = Moody {
        mode,
        calls: AtomicU64::new(0),
    };
    let device = Device::new(config, moody, FixedSource::new(pcpu), NoEvents);
    let clock = ManualClock::default();
    let device = device.expect("a sound device");
    (device.with_clock(clock.clone()), clock)
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

fn access(region: &MmioRegion<Moody, FixedSource, NoEvents>, random: &mut Random) {
    let mut data = [0; 16];
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

/// Makes all accesses; what was counted of each vCPU, when no request waits any more.
fn hammered((device, clock): (MoodyDevice, ManualClock)) -> Vec<CounterSnapshot> {
    let region = MmioRegion::new(Arc::new(device));
    let device = region.device();
    let mut random = Random(0x00c0_ffee);
    let mut before = 0;
    for n in 0..ACCESSES {
        if n == ACCESSES / 10 {
            before = resident_pages();
        }
        access(&region, &mut random);
        clock.advance(ACCESS_NS);
        if n % TURN == 0 {
            device.apply_deferred();
            device.lift_ceilings();
        }
    }
    let grown = resident_pages().saturating_sub(before);
    assert!(grown <= 16, "grew by {grown} pages");
    while let Some(wait) = device.apply_deferred() {
        clock.advance(u64::try_from(wait.as_nanos()).expect("short"));
    }
    assert!(device.accesses_outside() > 1000);
    let counters = (0..VCPUS).map(|vcpu| device.counters(VcpuId(vcpu)));
    counters.map(|counters| counters.expect("a vCPU")).collect()
}

/// Each request has become of something, and there was enough of everything.
fn check(all: &[CounterSnapshot]) {
    for (vcpu, c) in all.iter().enumerate() {
        let outcomes = c.applied + c.unchanged + c.superseded + c.refused + c.not_applicable;
        assert_eq!(c.requests, outcomes, "vCPU {vcpu}");
        assert!(
            c.requests > 1000 && c.illegal > 1000 && c.refused > 0,
            "{vcpu}: {c:?}"
        );
    }
}

// In one test, so that neither grows while the other is measured.
#[test]
fn ten_million_random_accesses() {
    let all = hammered(device(ClampMode::Exact, CurPerfVisibility::Exact, None));
    check(&all);
    assert!(all.iter().all(|c| c.limited == 0));

    let all = hammered(device(
        ClampMode::Ceilings,
        CurPerfVisibility::Table,
        Some(LIMIT),
    ));
    check(&all);
    assert!(all.iter().all(|c| c.limited > 1000), "{all:?}");
}
