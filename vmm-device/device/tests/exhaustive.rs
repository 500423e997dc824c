// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arithmetic for all values, where those are few enough: capacities with requests and with each
//! other, clamps as numbers, offsets and widths of accesses, and all short sequences of takers at a
//! bucket. `policy.rs` draws from the others.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vcpufreq_device::fakes::{FixedSource, NullActuator};
use vcpufreq_device::*;

fn util(value: u16) -> Util {
    Util::new(value).expect("within 1024")
}

fn spec(capacity: u16, max: u32) -> VcpuSpec {
    VcpuSpec {
        table: PerfTable::try_from(vec![Khz(max)]).expect("a table"),
        capacity: util(capacity),
        domain: DomainId(0),
    }
}

/// A table that ends at 1024, so that a request is a share of the capacity; and the headroom of old
/// kernels, which is 4/5.
#[test]
fn each_capacity_with_each_request() {
    for capacity in 0..=1024 {
        let vcpu = spec(capacity, 1024);
        for asked in 0..=1025 {
            let request = |mode, headroom| clamp(&vcpu, Khz(asked), mode, headroom).clamp;
            let all = u32::from(capacity) * asked.min(1024);
            let exact = request(ClampMode::Exact, Headroom::None);
            let old = request(ClampMode::Floor, Headroom::Quarter);
            assert_eq!(u32::from(exact.min.get()), all / 1024, "{capacity} {asked}");
            let max = if asked == 0 { Util::MAX } else { exact.min };
            assert_eq!(exact.max, max, "{capacity} {asked}");
            assert_eq!(
                u32::from(old.min.get()),
                all * 4 / 5120,
                "{capacity} {asked}"
            );
            assert_eq!(old.max, Util::MAX);
        }
    }
}

#[test]
fn each_capacity_of_a_vcpu_on_each_of_a_pcpu() {
    const KHZ: u32 = 1_300_000;
    const MAX: u32 = 2_800_000;
    for of_vcpu in 0..=1024 {
        let vcpu = spec(of_vcpu, MAX);
        for of_pcpu in 0..=1024 {
            let pcpu = PcpuPerf {
                pcpu: 0,
                khz: Khz(KHZ),
                reference: Khz(MAX),
                capacity: util(of_pcpu),
            };
            let whole = (u64::from(KHZ) * u64::from(of_pcpu)).checked_div(of_vcpu.into());
            let told = whole.map(|khz| Khz(u32::try_from(khz.max(1)).unwrap_or(u32::MAX)));
            assert_eq!(performance(&vcpu, &pcpu), told, "{of_vcpu} on {of_pcpu}");
        }
    }
}

#[test]
fn each_pair_of_numbers_is_a_clamp_or_none() {
    for value in 0..=u16::MAX {
        assert_eq!(
            Util::new(value).map(Util::get),
            (value <= 1024).then_some(value)
        );
        assert_eq!(Util::saturating(value.into()).get(), value.min(1024));
    }
    for min in 0..=1026_u16 {
        for max in 0..=1026_u16 {
            let bits = u32::from(min) | (u32::from(max) << 16);
            let clamp = Clamp::from_bits(bits);
            assert_eq!(clamp.is_some(), min <= 1024 && max <= 1024);
            assert_eq!(clamp.map_or(bits, Clamp::bits), bits);
        }
    }
}

/// Of one vCPU, in its page and the first bytes of the next ones, in each width.
#[test]
fn each_offset_in_each_width_is_a_register_or_illegal() {
    let readable = BTreeMap::from([
        (REG_CUR_PERF, 5),
        (REG_PERFTBL_LEN, 1),
        (REG_PERFTBL_RD, 5),
        (REG_PERF_DOMAIN, 0),
        (REG_FEATURES, FEATURE_PERF_CAP),
        (REG_PERF_CAP, 5),
    ]);
    let config = DeviceConfig::new(vec![spec(1024, 5)]);
    let device = Device::new(config, NullActuator, FixedSource::default(), NoEvents);
    let region = MmioRegion::new(Arc::new(device.expect("a sound configuration")));
    let illegal = || {
        let inside = region.device().counters(VcpuId(0)).map(|all| all.illegal);
        inside.unwrap_or_default() + region.device().accesses_outside()
    };
    for offset in (0..0x1010)
        .chain(0x1_0000 - 8..0x1_0008)
        .chain(u64::MAX - 8..=u64::MAX)
    {
        for width in 0..=9 {
            let (mut read, before) = (vec![0xff; width], illegal());
            region.read(offset, &mut read);
            let register = readable.get(&offset).filter(|_| width == REG_WIDTH);
            assert_eq!(illegal() - before, u64::from(register.is_none()));
            let value: u32 = read.iter().map(|byte| u32::from(*byte)).sum();
            assert_eq!(
                value,
                register.copied().unwrap_or(0),
                "{offset:#x}, {width}"
            );
            let before = illegal();
            let requests = || region.device().counters(VcpuId(0)).map(|all| all.requests);
            let requested = requests();
            region.write(offset, &vec![0; width]);
            let asks = offset == REG_SET_PERF && width == REG_WIDTH;
            assert_eq!(requests(), requested.map(|before| before + u64::from(asks)));
            let written = [REG_SET_PERF, REG_PERFTBL_SEL].contains(&offset) && width == REG_WIDTH;
            assert_eq!(
                illegal() - before,
                u64::from(!written),
                "{offset:#x}, {width}"
            );
        }
    }
}

#[test]
fn each_number_of_vcpus_has_a_region_of_whole_pages() {
    for vcpus in 0..=u16::MAX {
        let (size, used) = (region_size(vcpus), u64::from(vcpus) * REGION_STRIDE);
        assert!(size % REGION_ALIGN == 0 && size >= used);
        assert!(size - used < REGION_ALIGN);
    }
}

#[derive(Clone, Default)]
struct Now(Arc<AtomicU64>);

impl Clock for Now {
    fn now_ns(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// All sequences of six requests that are 0 to 3 tokens' times apart, for bursts of 1 to 4: one
/// reaches the host at once if and only if no time up to now then has more than a burst and a token
/// for each token's time.
#[test]
fn each_sequence_at_a_bucket_has_its_tokens() {
    const TOKEN: u64 = 1_000_000;
    for burst in 1..=4 {
        for sequence in 0..4_u64.pow(6) {
            let gaps = (0..6).map(|n| sequence / 4_u64.pow(n) % 4);
            let clock = Now::default();
            let device = limited(burst, clock.clone());
            let (mut granted, mut now) = (Vec::new(), 0);
            for (gap, khz) in gaps.zip(1..) {
                now += gap;
                clock.0.store(now * TOKEN, Relaxed);
                // Tokens that came back for what was granted, at most to a burst.
                let fits = granted.iter().enumerate().all(|(n, since)| {
                    let taken = granted.len() - n + 1;
                    taken as u64 <= u64::from(burst) + (now - since)
                });
                let before = applied(&device);
                device.write_by(Some(VcpuId(0)), VcpuId(0), WriteReg::SetPerf, khz);
                assert_eq!(applied(&device) > before, fits, "burst {burst}, {sequence}");
                if fits {
                    granted.push(now);
                }
            }
        }
    }
}

/// Of a vCPU whose requests differ in their clamps, at 1,000 a second.
fn limited(burst: u32, clock: Now) -> Device<NullActuator, FixedSource, NoEvents> {
    let config = DeviceConfig {
        rate_limit: Some(RateLimit {
            per_second: NonZeroU32::new(1000).expect("not 0"),
            burst: NonZeroU32::new(burst).expect("not 0"),
        }),
        ..DeviceConfig::new(vec![spec(1024, 1024)])
    };
    let device = Device::new(config, NullActuator, FixedSource::default(), NoEvents);
    device.expect("a sound configuration").with_clock(clock)
}

fn applied(device: &Device<NullActuator, FixedSource, NoEvents>) -> u64 {
    let counters = device.counters(VcpuId(0));
    counters.map_or(0, |counters| counters.applied)
}
