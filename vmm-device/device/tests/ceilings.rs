// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: a request with a number of ms is the most, too, for so long at most. A guest that does not
//! write it again in time is no longer held down, also if its newest request waits for a token.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but not in what they share"
)]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use vcpufreq_device::fakes::{FixedSource, ManualClock, RecordingActuator, RecordingEvents};
use vcpufreq_device::*;

const ONE: VcpuId = VcpuId(0);
const LOW: u32 = 250_000;
const HIGH: u32 = 750_000;
/// For 5 ms.
const CEILING: u32 = 5 << CEILING_SHIFT;
const MS: u64 = 1_000_000;
const FREE: u16 = 1024;

struct Bench {
    device: Device<Arc<RecordingActuator>, FixedSource, Arc<RecordingEvents>>,
    actuator: Arc<RecordingActuator>,
    events: Arc<RecordingEvents>,
    clock: ManualClock,
}

impl Bench {
    fn new(rate_limit: Option<RateLimit>) -> Self {
        Self::of_mode(ClampMode::Ceilings, rate_limit)
    }

    fn of_mode(mode: ClampMode, rate_limit: Option<RateLimit>) -> Self {
        let spec = VcpuSpec {
            table: PerfTable::try_from(vec![Khz(LOW), Khz(HIGH), Khz(1_000_000)]).unwrap(),
            capacity: Util::MAX,
            domain: DomainId(0),
        };
        let config = DeviceConfig {
            mode,
            rate_limit,
            ..DeviceConfig::new(vec![spec])
        };
        let (actuator, events) = (Arc::default(), Arc::default());
        let clock = ManualClock::default();
        let ports = (
            Arc::clone(&actuator),
            FixedSource::default(),
            Arc::clone(&events),
        );
        let device = Device::new(config, ports.0, ports.1, ports.2).unwrap();
        Self {
            device: device.with_clock(clock.clone()),
            actuator,
            events,
            clock,
        }
    }

    fn ask(&self, value: u32) {
        self.device
            .write_by(Some(ONE), ONE, WriteReg::SetPerf, value);
    }

    /// Lets time pass; how long the ceiling still holds.
    fn pass(&self, ms: u64) -> Option<u64> {
        self.clock.advance(ms * MS);
        let left = self.device.lift_ceilings()?;
        Some(u64::try_from(left.as_millis()).unwrap())
    }

    /// All clamps so far.
    fn clamps(&self) -> Vec<(u16, u16)> {
        let applied = self.actuator.applied();
        let clamps = applied.iter().map(|(_, clamp)| clamp);
        clamps
            .map(|clamp| (clamp.min.get(), clamp.max.get()))
            .collect()
    }

    /// Requests, and those with an outcome.
    fn counted(&self) -> (u64, u64) {
        let all = self.device.counters(ONE).unwrap();
        (all.requests, all.applied + all.unchanged + all.superseded)
    }
}

#[test]
fn a_ceiling_holds_until_the_next_request() {
    let bench = Bench::new(None);
    bench.ask(LOW | CEILING);
    let status = bench.device.domain_status(ONE).unwrap();
    assert_eq!(status.requested, Some(Khz(LOW)));
    bench.ask(HIGH);
    bench.ask(HIGH | CEILING);
    bench.ask(0);
    assert_eq!(
        bench.clamps(),
        [(256, 256), (768, FREE), (768, 768), (0, FREE)]
    );
}

#[test]
fn a_ceiling_that_is_not_written_again_ends() {
    let bench = Bench::new(None);
    bench.ask(LOW | CEILING);
    assert_eq!(bench.pass(4), Some(1));
    bench.ask(LOW | CEILING);
    assert_eq!(bench.pass(4), Some(1));
    assert_eq!(bench.clamps(), [(256, 256)]);
    assert_eq!(bench.pass(1), None);
    assert_eq!(bench.clamps(), [(256, 256), (256, FREE)]);
    assert_eq!(bench.pass(100), None);
    assert_eq!(bench.clamps().len(), 2);
    let (requests, outcomes) = bench.counted();
    assert_eq!(requests, outcomes);
}

/// The thread that ends ceilings sleeps until there is one.
#[test]
fn the_first_ceiling_is_told() {
    let bench = Bench::new(None);
    let told = || {
        let all = bench.events.all();
        let ceilings = all
            .iter()
            .filter(|event| matches!(event, Event::Ceiling { .. }));
        ceilings.count()
    };
    bench.ask(LOW);
    assert_eq!(told(), 0);
    (0..3).for_each(|_| bench.ask(LOW | CEILING));
    assert_eq!(told(), 1);
    bench.pass(5);
    bench.ask(LOW | CEILING);
    assert_eq!(told(), 2);
}

#[test]
fn a_request_that_waits_for_a_token_is_not_held_down() {
    let bench = Bench::new(Some(RateLimit {
        per_second: NonZeroU32::MIN,
        burst: NonZeroU32::MIN,
    }));
    bench.ask(LOW | CEILING);
    bench.ask(HIGH);
    assert_eq!(bench.clamps(), [(256, 256)]);
    assert!(bench.device.apply_deferred() > Some(Duration::from_millis(100)));
    assert_eq!(bench.pass(5), None);
    assert_eq!(bench.clamps(), [(256, 256), (768, FREE)]);
}

/// A ceiling has a token, and its end is one more host call. One without a token is none.
#[test]
fn a_flood_of_ceilings_keeps_to_the_limit() {
    const TOKENS: u32 = 10;
    let bench = Bench::new(Some(RateLimit {
        per_second: NonZeroU32::MIN,
        burst: NonZeroU32::new(TOKENS).unwrap(),
    }));
    for n in 0..500 {
        bench.ask(if n % 2 == 0 { LOW } else { HIGH } | (1 << CEILING_SHIFT));
        bench.pass(1);
    }
    let calls = u32::try_from(bench.clamps().len()).unwrap();
    assert!((TOKENS..=2 * TOKENS).contains(&calls), "{calls} host calls");
    let (_, max) = *bench.clamps().last().unwrap();
    assert_eq!(max, FREE);
}

/// Nor is a request a ceiling that the guest can't know of.
#[test]
fn only_one_mode_has_ceilings() {
    for mode in [ClampMode::Floor, ClampMode::Exact] {
        let bench = Bench::of_mode(mode, None);
        bench.ask(LOW | CEILING);
        let most = if mode == ClampMode::Exact { 1024 } else { FREE };
        assert_eq!(bench.clamps(), [(1024, most)]);
        assert_eq!(bench.pass(0), None);
        let features = bench.device.read(ONE, ReadReg::Features);
        assert_eq!(features & FEATURE_CEILING, 0);
    }
}

#[test]
fn no_snapshot_holds_one() {
    let bench = Bench::new(None);
    bench.ask(LOW | CEILING);
    let state = bench.device.save();
    assert_eq!(state.requests[0].khz, LOW);
    let other = Bench::new(None);
    let state = CheckedState::try_from(state).unwrap();
    other.device.restore(&state).unwrap();
    assert_eq!(other.clamps(), [(256, FREE)]);
}

#[test]
fn a_guest_that_starts_anew_is_not_held_down() {
    let bench = Bench::new(None);
    bench.ask(LOW | CEILING);
    bench.device.reset();
    assert_eq!(bench.clamps().last(), Some(&(0, FREE)));
}
