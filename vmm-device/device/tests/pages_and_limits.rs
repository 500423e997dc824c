// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: a read from the register pages equals a read by exit. cur_perf follows the host's
//! setting of its visibility. A limit bounds host calls and loses no request. A request's time is
//! that in which it was in force.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but not in what they share"
)]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use vcpufreq_device::fakes::{FixedSource, ManualClock, RecordingActuator, RecordingEvents};
use vcpufreq_device::*;

const TABLE: [u32; 3] = [600_000, 1_200_000, 1_800_000];
const MS: u64 = 1_000_000;

type FakeDevice = Device<Arc<RecordingActuator>, Arc<FixedSource>, Arc<RecordingEvents>>;

struct Bench {
    device: Arc<FakeDevice>,
    actuator: Arc<RecordingActuator>,
    source: Arc<FixedSource>,
    events: Arc<RecordingEvents>,
    clock: ManualClock,
}

fn at(khz: u32) -> PcpuPerf {
    PcpuPerf {
        pcpu: 0,
        khz: Khz(khz),
        reference: Khz(1_800_000),
        capacity: Util::MAX,
    }
}

/// Two vCPUs in one domain, a third one alone.
fn config(visibility: CurPerfVisibility, rate_limit: Option<RateLimit>) -> DeviceConfig {
    let spec = |domain| VcpuSpec {
        table: PerfTable::try_from(TABLE.map(Khz).to_vec()).unwrap(),
        capacity: Util::MAX,
        domain: DomainId(domain),
    };
    DeviceConfig {
        visibility,
        rate_limit,
        ..DeviceConfig::new(vec![spec(0), spec(0), spec(5)])
    }
}

fn bench(visibility: CurPerfVisibility, rate_limit: Option<RateLimit>) -> Bench {
    let config = config(visibility, rate_limit);
    let actuator = Arc::new(RecordingActuator::default());
    let source = Arc::new(FixedSource::new(at(1_200_000)));
    let events = Arc::new(RecordingEvents::default());
    let clock = ManualClock::default();
    let ports = (actuator.clone(), source.clone(), events.clone());
    let device = FakeDevice::new(config, ports.0, ports.1, ports.2).unwrap();
    Bench {
        device: Arc::new(device.with_clock(clock.clone())),
        actuator,
        source,
        events,
        clock,
    }
}

fn memory(vcpus: u16) -> Arc<Box<[AtomicU32]>> {
    let words = usize::try_from(region_size(vcpus)).unwrap() / REG_WIDTH;
    Arc::new((0..words).map(|_| AtomicU32::new(0)).collect())
}

/// The word at an offset in a vCPU's page.
fn word(memory: &[AtomicU32], vcpu: u64, offset: u64) -> u32 {
    let index = usize::try_from(vcpu * REGION_STRIDE + offset).unwrap() / REG_WIDTH;
    u32::from_le(memory[index].load(SeqCst))
}

impl Bench {
    fn attach(&self) -> Arc<Box<[AtomicU32]>> {
        let memory = memory(3);
        let pages = RegisterPages::new(Box::new(memory.clone()), 3).unwrap();
        self.device.attach_pages(pages).unwrap();
        memory
    }

    fn ask(&self, vcpu: u16, khz: u32) {
        self.ask_for(Some(vcpu), vcpu, khz);
    }

    /// `by` writes the register of `vcpu`.
    fn ask_for(&self, by: Option<u16>, vcpu: u16, khz: u32) {
        let by = by.map(VcpuId);
        let vcpu = VcpuId(vcpu);
        self.device.write_by(by, vcpu, WriteReg::SetPerf, khz);
    }

    fn pass(&self, ns: u64) {
        self.clock.advance(ns);
    }

    /// uclamp.min of everything applied.
    fn floors(&self) -> Vec<u16> {
        let applied = self.actuator.applied();
        applied.iter().map(|(_, clamp)| clamp.min.get()).collect()
    }

    /// Requests that had a token.
    fn carried_out(&self) -> u64 {
        let counters = [0, 1, 2].map(|vcpu| self.counters(vcpu));
        counters.iter().map(|c| c.applied + c.unchanged).sum()
    }

    fn counters(&self, vcpu: u16) -> CounterSnapshot {
        self.device.counters(VcpuId(vcpu)).unwrap()
    }
}

#[test]
fn pages_show_the_registers_and_nothing_else() {
    let bench = bench(CurPerfVisibility::Exact, None);
    let memory = bench.attach();
    for (vcpu, domain) in [(0, 0), (1, 0), (2, 5)] {
        let page: Vec<_> = (0..REGION_STRIDE / 4)
            .map(|i| word(&memory, vcpu, 4 * i))
            .collect();
        assert_eq!(page[..6], [1_800_000, 0, 3, 0, 600_000, domain]);
        let [features, cap] =
            [REG_FEATURES, REG_PERF_CAP].map(|at| usize::try_from(at / 4).unwrap());
        assert_eq!(
            page[features],
            FEATURE_ANY_CPU | FEATURE_CEILING | FEATURE_PERF_CAP
        );
        assert_eq!(page[cap], 1_800_000);
        let others = (0..)
            .zip(&page[6..])
            .filter(|(i, _)| ![features, cap].contains(&(i + 6)));
        let rest = others.map(|(_, word)| word);
        assert!(rest.copied().all(|word| word == 0));
    }
    assert!(memory[3 * 1024..].iter().all(|w| w.load(SeqCst) == 0));
}

/// perf_cap of each vCPU, by exit and in the page.
fn caps(bench: &Bench, memory: &[AtomicU32]) -> [u32; 3] {
    [0, 1, 2].map(|vcpu| {
        let read = bench.device.read(VcpuId(vcpu), ReadReg::PerfCap);
        assert_eq!(word(memory, vcpu.into(), REG_PERF_CAP), read);
        read
    })
}

#[test]
fn a_cap_is_seen_by_its_domain_until_it_goes() {
    let bench = bench(CurPerfVisibility::Exact, None);
    let memory = bench.attach();
    let max = TABLE[2];
    for (cap, shown) in [
        (Some(900_001), 900_001),
        (Some(max), max),
        (Some(max + 1), max),
        (Some(u32::MAX), max),
        // 0 would be unknown.
        (Some(0), 1),
        (None, max),
    ] {
        bench.device.set_cap(DomainId(0), cap.map(Khz));
        assert_eq!(caps(&bench, &memory), [shown, shown, max], "{cap:?}");
    }
    bench.device.set_cap(DomainId(5), Some(Khz(7)));
    assert_eq!(caps(&bench, &memory), [max, max, 7]);
    // Of the host, not of the guest.
    bench.device.reset();
    bench.device.set_cap(DomainId(1), Some(Khz(9)));
    assert_eq!(caps(&bench, &memory), [max, max, 7]);
}

#[test]
fn a_cap_shows_no_more_than_cur_perf_does() {
    let by_table = bench(CurPerfVisibility::Table, None);
    let memory = by_table.attach();
    for (cap, shown) in [
        (1, TABLE[0]),
        (1_199_999, TABLE[0]),
        (1_200_000, TABLE[1]),
        (1_799_999, TABLE[1]),
        (u32::MAX, TABLE[2]),
    ] {
        by_table.device.set_cap(DomainId(0), Some(Khz(cap)));
        assert_eq!(caps(&by_table, &memory)[0], shown, "{cap}");
    }
    let hidden = bench(CurPerfVisibility::Request, None);
    let memory = hidden.attach();
    hidden.device.set_cap(DomainId(0), Some(Khz(TABLE[0])));
    assert_eq!(caps(&hidden, &memory), [0; 3]);
    let features = hidden.device.read(VcpuId(0), ReadReg::Features);
    assert_eq!(features, FEATURE_ANY_CPU | FEATURE_CEILING);
}

#[test]
fn a_selection_is_in_the_page_when_the_write_returns() {
    let bench = bench(CurPerfVisibility::Exact, None);
    let memory = bench.attach();
    for (selected, entry) in [(2, TABLE[2]), (3, 0), (u32::MAX, 0), (1, TABLE[1])] {
        bench
            .device
            .write(VcpuId(1), WriteReg::PerftblSel, selected);
        assert_eq!(word(&memory, 1, REG_PERFTBL_RD), entry);
        assert_eq!(word(&memory, 0, REG_PERFTBL_RD), TABLE[0]);
        assert_eq!(word(&memory, 1, REG_PERFTBL_SEL), 0);
    }
    bench.device.reset();
    assert_eq!(word(&memory, 1, REG_PERFTBL_RD), TABLE[0]);
}

#[test]
fn cur_perf_is_what_was_found_last() {
    let bench = bench(CurPerfVisibility::Exact, None);
    let memory = bench.attach();
    bench.device.refresh(VcpuId(2));
    assert_eq!(word(&memory, 2, REG_CUR_PERF), 1_200_000);
    assert_eq!(word(&memory, 0, REG_CUR_PERF), 1_800_000);
    bench.source.set(None);
    bench.device.refresh(VcpuId(2));
    assert_eq!(word(&memory, 2, REG_CUR_PERF), 1_200_000);
    bench.device.refresh(VcpuId(99));
}

#[test]
fn a_restored_state_is_in_the_pages() {
    let bench = bench(CurPerfVisibility::Exact, None);
    let memory = bench.attach();
    let mut state = bench.device.save();
    state.vcpus[0] = VcpuState {
        perftbl_sel: 2,
        cur_perf_khz: 777,
    };
    let state = CheckedState::try_from(state).unwrap();
    bench.device.restore(&state).unwrap();
    assert_eq!(word(&memory, 0, REG_CUR_PERF), 777);
    assert_eq!(word(&memory, 0, REG_PERFTBL_RD), TABLE[2]);
}

#[test]
fn pages_of_another_size_and_second_ones_are_refused() {
    let wrong = RegisterPages::new(Box::new(memory(16)), 17).unwrap_err();
    assert_eq!(
        wrong,
        PagesError::Size {
            vcpus: 17,
            expected: 0x2_0000,
            bytes: 0x1_0000,
        }
    );
    let bench = bench(CurPerfVisibility::Exact, None);
    bench.attach();
    let more = RegisterPages::new(Box::new(memory(3)), 3).unwrap();
    assert_eq!(bench.device.attach_pages(more), Err(PagesError::Twice));
}

#[test]
fn cur_perf_tells_what_the_host_lets_it() {
    let rows = [
        (CurPerfVisibility::Exact, 1_333_333, 1_333_333),
        (CurPerfVisibility::Table, 1_333_333, 1_200_000),
        (CurPerfVisibility::Table, 1_199_999, 1_200_000),
        // Half-way: the higher one.
        (CurPerfVisibility::Table, 900_000, 1_200_000),
        (CurPerfVisibility::Table, 1, 600_000),
        (CurPerfVisibility::Table, 1_800_000, 1_800_000),
        // Until it asks, the maximum.
        (CurPerfVisibility::Request, 1_333_333, 1_800_000),
    ];
    for (visibility, khz, told) in rows {
        let bench = bench(visibility, None);
        bench.source.set(Some(at(khz)));
        let memory = bench.attach();
        let read = bench.device.read(VcpuId(0), ReadReg::CurPerf);
        assert_eq!(read, told, "{visibility:?} {khz}");
        assert_eq!(word(&memory, 0, REG_CUR_PERF), told);
    }
}

#[test]
fn a_report_of_the_request_has_nothing_of_the_host() {
    let bench = bench(CurPerfVisibility::Request, None);
    bench.source.set(None);
    bench.ask(1, 700_000);
    let read = |vcpu| bench.device.read(VcpuId(vcpu), ReadReg::CurPerf);
    assert_eq!([0, 1, 2].map(read), [700_000, 700_000, 1_800_000]);
    bench.ask(1, u32::MAX);
    assert_eq!(read(0), 1_800_000);
    bench.ask(1, 0);
    assert_eq!(read(0), 1_800_000);
    assert_eq!(bench.counters(0).source_failures, 0);
}

/// 1,000 a second, two at once.
const LIMIT: RateLimit = RateLimit {
    per_second: NonZeroU32::new(1000).unwrap(),
    burst: NonZeroU32::new(2).unwrap(),
};

#[test]
fn what_comes_too_fast_waits_and_the_newest_wins() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    for khz in [600_000, 1_200_000, 1_800_000, 900_000] {
        bench.ask(0, khz);
    }
    assert_eq!(bench.floors(), [341, 682]);
    assert_eq!(
        bench.device.apply_deferred(),
        Some(Duration::from_millis(1))
    );
    bench.pass(MS - 1);
    assert_eq!(bench.device.apply_deferred(), Some(Duration::from_nanos(1)));
    bench.pass(1);
    assert_eq!(bench.device.apply_deferred(), None);
    assert_eq!(bench.floors(), [341, 682, 512]);
    let counters = bench.counters(0);
    assert_eq!((counters.requests, counters.limited), (4, 2));
    assert_eq!((counters.applied, counters.superseded), (3, 1));
    let limited = |event: &&Event| matches!(event, Event::Limited { .. });
    assert_eq!(bench.events.all().iter().filter(limited).count(), 2);
}

#[test]
fn a_newer_request_with_a_token_replaces_the_one_that_waits() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    for khz in [600_000, 1_200_000, 1_800_000] {
        bench.ask(0, khz);
    }
    // The other member of the domain has tokens of its own.
    bench.ask(1, 900_000);
    assert_eq!(bench.floors(), [341, 682, 512]);
    bench.pass(10 * MS);
    assert_eq!(bench.device.apply_deferred(), None);
    assert_eq!(bench.floors(), [341, 682, 512]);
}

#[test]
fn one_vcpu_does_not_use_up_anothers_tokens() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    for turn in 0..1000 {
        bench.ask(0, TABLE[turn % 3]);
    }
    bench.ask(2, 1_800_000);
    assert_eq!(bench.counters(2).applied, 1);
    assert_eq!(bench.counters(0).applied, 2);
}

#[test]
fn a_vcpu_that_writes_every_page_has_its_own_rate() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    // 100 ms of a request each 10 µs, to all three registers in turn.
    for turn in 0..10_000 {
        let register = u16::try_from(turn % 3).unwrap();
        bench.ask_for(Some(0), register, TABLE[turn / 3 % 3]);
        bench.device.apply_deferred();
        bench.pass(10_000);
    }
    let calls = bench.carried_out();
    assert!((100..=102).contains(&calls), "{calls}");
    // Another writer has its own tokens, and the VM some for it.
    let before = bench.floors().len();
    bench.ask(2, 777_000);
    assert_eq!(bench.floors().len(), before + 1);
}

#[test]
fn a_vm_has_the_rate_of_its_domains() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    // 100 ms in which three vCPUs write as fast as they can; there are two domains.
    for turn in 0..10_000 {
        let vcpu = u16::try_from(turn % 3).unwrap();
        bench.ask(vcpu, TABLE[turn / 3 % 3]);
        bench.device.apply_deferred();
        bench.pass(10_000);
    }
    let calls = bench.carried_out();
    assert!((200..=204).contains(&calls), "{calls}");
}

#[test]
fn where_the_writer_is_not_known_its_domain_pays() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    for khz in TABLE {
        for register in 0..3 {
            bench.ask_for(None, register, khz);
        }
    }
    let limited = [0, 1, 2].map(|vcpu| bench.counters(vcpu).limited);
    // Two at once of the registers of the first domain, two of the other's.
    assert_eq!(limited.iter().sum::<u64>(), 9 - 4);
    assert_eq!(limited[2], 1);
    // A writer that isn't there is none that is known.
    bench.ask_for(Some(99), 2, 1_000_000);
    assert_eq!(bench.counters(2).limited, 2);
}

#[test]
fn what_waits_is_charged_to_its_writer() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    for khz in TABLE {
        bench.ask_for(Some(2), 0, khz);
    }
    bench.pass(MS);
    assert_eq!(bench.device.apply_deferred(), None);
    // That was the token which vCPU 2 had by then; vCPU 0 has its burst.
    bench.ask(2, 600_000);
    bench.ask(0, 700_000);
    assert_eq!(
        (bench.counters(2).limited, bench.counters(0).limited),
        (1, 1)
    );
}

#[test]
fn host_calls_are_bounded_by_the_limit() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    // 100 ms of a request each 10 µs.
    for turn in 0..10_000 {
        bench.ask(0, TABLE[turn % 3]);
        bench.device.apply_deferred();
        bench.pass(10_000);
    }
    let calls = bench.floors().len();
    assert!((100..=102).contains(&calls), "{calls}");
    bench.ask(0, 1_500_000);
    bench.pass(10 * MS);
    assert_eq!(bench.device.apply_deferred(), None);
    // 1024 × 1500 / 1800
    assert_eq!(bench.floors().last(), Some(&853));
}

#[test]
fn a_reset_does_not_wait() {
    let bench = bench(CurPerfVisibility::Exact, Some(LIMIT));
    for khz in TABLE {
        bench.ask(0, khz);
    }
    bench.device.reset();
    assert_eq!(bench.floors().last(), Some(&0));
    bench.pass(10 * MS);
    assert_eq!(bench.device.apply_deferred(), None);
    assert_eq!(bench.floors().last(), Some(&0));
}

#[test]
fn coalesced_requests_are_counted_and_told() {
    let bench = bench(CurPerfVisibility::Exact, None);
    bench.device.count_coalesced(VcpuId(2), 7);
    bench.device.count_coalesced(VcpuId(2), 0);
    bench.device.count_coalesced(VcpuId(9), 1);
    bench.ask(2, 600_000);
    let counters = bench.counters(2);
    assert_eq!((counters.requests, counters.coalesced), (8, 7));
    assert_eq!(
        bench.events.all()[0],
        Event::Coalesced {
            vcpu: VcpuId(2),
            domain: DomainId(5),
            count: 7,
        }
    );
    assert_eq!(bench.events.all().len(), 3);
}

/// One whose clamps are the asking thread's.
struct Own;

impl Actuator for Own {
    fn apply(&self, _domain: DomainId, _clamp: Clamp) -> Result<(), ActuateError> {
        Ok(())
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

#[test]
fn a_device_whose_actuator_serves_its_own_alone_says_so() {
    let read = |actuator: Arc<dyn Actuator>| {
        let (config, source) = (
            config(CurPerfVisibility::Exact, None),
            FixedSource::default(),
        );
        let device = Device::new(config, actuator, source, NoEvents).unwrap();
        device.read(VcpuId(0), ReadReg::Features)
    };
    assert_eq!(read(Arc::new(Own)), FEATURE_PERF_CAP);
    let any: Arc<RecordingActuator> = Arc::default();
    let all = FEATURE_ANY_CPU | FEATURE_CEILING | FEATURE_PERF_CAP;
    assert_eq!(read(any), all);
}

#[test]
fn times_are_those_in_which_requests_were_in_force() {
    let one = NonZeroU32::MIN;
    let limit = RateLimit {
        per_second: NonZeroU32::new(10).unwrap(),
        burst: one,
    };
    let bench = bench(CurPerfVisibility::Exact, Some(limit));
    let times = |vcpu| {
        let times = bench.device.requested_for(VcpuId(vcpu));
        times.map(|times| {
            let ms = |(khz, time): (Khz, Duration)| (khz.0, time.as_millis());
            times.into_iter().map(ms).collect::<Vec<_>>()
        })
    };
    bench.pass(30 * MS);
    bench.ask(0, TABLE[2]);
    bench.pass(50 * MS);
    // It waits for a token, for 50 ms.
    bench.ask(0, TABLE[0]);
    bench.pass(50 * MS);
    bench.device.apply_deferred();
    bench.pass(7 * MS);
    let of = |times: [u128; 4]| {
        Some(
            [0, TABLE[0], TABLE[1], TABLE[2]]
                .into_iter()
                .zip(times)
                .collect(),
        )
    };
    assert_eq!(times(0), of([30, 7, 0, 100]));
    assert_eq!(times(1), times(0), "of its domain");
    assert_eq!((times(2), times(3)), (of([137, 0, 0, 0]), None));
    // The host refuses one: none is in force.
    bench.pass(1000 * MS);
    bench.actuator.fail_with(Some(ActuateError::NoThread {
        domain: DomainId(0),
    }));
    bench.ask(0, TABLE[1]);
    bench.pass(5 * MS);
    assert_eq!(times(0), of([35, 1007, 0, 100]));
    // Another path had this one carried out, 2 ms ago.
    let khz = Khz(TABLE[1]);
    bench
        .device
        .carried_out(VcpuId(1), khz, Duration::from_millis(2));
    assert_eq!(times(0), of([33, 1007, 2, 100]));
}
