// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the device, driven as a guest would drive it. Registers follow the contract. A
//! domain's request is its members' last write. A clamp in force is not set again; a refused one
//! is. If the host fails, the guest reads the last good value.

mod state;

use std::sync::Arc;

use vcpufreq_device::fakes::{FixedSource, RecordingActuator, RecordingEvents};
use vcpufreq_device::*;

type Region = MmioRegion<Arc<RecordingActuator>, Arc<FixedSource>, Arc<RecordingEvents>>;

struct Bench {
    region: Region,
    actuator: Arc<RecordingActuator>,
    source: Arc<FixedSource>,
    events: Arc<RecordingEvents>,
}

const LITTLE: [u32; 3] = [600_000, 1_200_000, 1_800_000];
const BIG: [u32; 2] = [1_400_000, 2_800_000];

fn spec(capacity: u16, table: &[u32], domain: u32) -> VcpuSpec {
    VcpuSpec {
        table: PerfTable::try_from(table.iter().copied().map(Khz).collect::<Vec<_>>())
            .expect("a sound table"),
        capacity: Util::new(capacity).expect("a capacity"),
        domain: DomainId(domain),
    }
}

/// vCPUs 0 and 1 little and in domain 7, vCPU 2 big and alone in domain 3.
fn config(mode: ClampMode) -> DeviceConfig {
    DeviceConfig {
        mode,
        ..DeviceConfig::new(vec![
            spec(329, &LITTLE, 7),
            spec(329, &LITTLE, 7),
            spec(1024, &BIG, 3),
        ])
    }
}

fn bench(mode: ClampMode) -> Bench {
    let actuator = Arc::new(RecordingActuator::default());
    let source = Arc::new(FixedSource::new(PcpuPerf {
        pcpu: 0,
        khz: Khz(1_200_000),
        reference: Khz(1_800_000),
        capacity: Util::saturating(329),
    }));
    let events = Arc::new(RecordingEvents::default());
    let ports = (
        Arc::clone(&actuator),
        Arc::clone(&source),
        Arc::clone(&events),
    );
    let device = Device::new(config(mode), ports.0, ports.1, ports.2).expect("a sound device");
    Bench {
        region: MmioRegion::new(Arc::new(device)),
        actuator,
        source,
        events,
    }
}

impl Bench {
    fn read(&self, vcpu: u64, reg: u64) -> u32 {
        let mut data = [0xff; 4];
        self.region.read(vcpu * REGION_STRIDE + reg, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, vcpu: u64, reg: u64, value: u32) {
        self.region
            .write(vcpu * REGION_STRIDE + reg, &value.to_le_bytes());
    }

    fn counters(&self, vcpu: u16) -> CounterSnapshot {
        let counters = self.region.device().counters(VcpuId(vcpu));
        counters.expect("a vCPU")
    }

    /// Domain and uclamp.min of everything applied.
    fn floors(&self) -> Vec<(u32, u16)> {
        let applied = self.actuator.applied();
        applied
            .iter()
            .map(|(d, clamp)| (d.0, clamp.min.get()))
            .collect()
    }
}

const REFUSED: ActuateError = ActuateError::Refused {
    domain: DomainId(7),
    call: "a test",
    errno: 16,
};

#[test]
fn a_change_of_bounds_says_whether_they_are_in_force() {
    let Bench {
        region, actuator, ..
    } = bench(ClampMode::Floor);
    let device = region.device();
    let (domain, reason) = (DomainId(7), "a test");
    let bounds = Clamp {
        min: Util::saturating(300),
        ..Clamp::NONE
    };
    device.set_bounds(domain, bounds);
    let refused = ActuateError::Refused {
        domain,
        call: reason,
        errno: 5,
    };
    for error in [refused, ActuateError::NotApplicable { domain, reason }] {
        actuator.fail_with(Some(error));
        assert_eq!(device.apply_bounds(VcpuId(1)), Some(Err(error)));
    }
    actuator.fail_with(None);
    // The second time it is in force already.
    for vcpu in [VcpuId(1), VcpuId(0)] {
        assert_eq!(device.apply_bounds(vcpu), Some(Ok(())));
        assert_eq!(actuator.applied(), [(domain, bounds)]);
    }
    assert_eq!(device.apply_bounds(VcpuId(9)), None);
}

#[test]
fn fixed_registers_read_as_configured() {
    let bench = bench(ClampMode::Floor);
    assert_eq!([0, 1, 2].map(|v| bench.read(v, REG_PERFTBL_LEN)), [3, 3, 2]);
    assert_eq!([0, 1, 2].map(|v| bench.read(v, REG_PERF_DOMAIN)), [7, 7, 3]);
    let features = FEATURE_ANY_CPU | FEATURE_PERF_CAP;
    assert_eq!(bench.read(2, REG_FEATURES), features);
}

#[test]
fn the_table_reads_by_selection_per_vcpu() {
    let bench = bench(ClampMode::Floor);
    assert_eq!(bench.read(0, REG_PERFTBL_RD), LITTLE[0], "reset: entry 0");
    bench.write(0, REG_PERFTBL_SEL, 2);
    bench.write(2, REG_PERFTBL_SEL, 1);
    assert_eq!(bench.read(0, REG_PERFTBL_RD), LITTLE[2]);
    assert_eq!(bench.read(1, REG_PERFTBL_RD), LITTLE[0]);
    assert_eq!(bench.read(2, REG_PERFTBL_RD), BIG[1]);
}

#[test]
fn a_selection_out_of_range_reads_0() {
    let bench = bench(ClampMode::Floor);
    for selection in [3, 64, 0x8000_0000, u32::MAX] {
        bench.write(0, REG_PERFTBL_SEL, selection);
        assert_eq!(bench.read(0, REG_PERFTBL_RD), 0, "{selection}");
    }
}

#[test]
fn illegal_accesses_read_0_are_dropped_and_counted() {
    let bench = bench(ClampMode::Floor);
    let reads: [(&str, u64, usize); 9] = [
        ("narrow", REG_CUR_PERF, 2),
        ("wide", REG_CUR_PERF, 8),
        ("empty", REG_CUR_PERF, 0),
        ("very wide", REG_CUR_PERF, 64),
        ("unaligned", 0x01, 4),
        ("across registers", 0x02, 4),
        ("of a register that is written", REG_SET_PERF, 4),
        ("of an extension that there isn't", REG_FEATURES + 4, 4),
        ("at the end of the page", 0xffc, 4),
    ];
    for (n, (name, offset, len)) in (1..).zip(reads) {
        let mut data = vec![0xaa; len];
        bench.region.read(REGION_STRIDE + offset, &mut data);
        assert_eq!(data, vec![0; len], "{name}");
        assert_eq!(bench.counters(1).illegal, n, "{name}");
    }
    for (offset, data) in [
        (REG_CUR_PERF, &[1, 0, 0, 0][..]),
        (REG_SET_PERF, &[1, 0]),
        (REG_SET_PERF, &[1; 8]),
        (REG_SET_PERF + 1, &[1; 4]),
    ] {
        bench.region.write(2 * REGION_STRIDE + offset, data);
    }
    assert_eq!(bench.counters(2).illegal, 4);
    assert_eq!(bench.actuator.applied(), []);
    assert_eq!(bench.counters(0), CounterSnapshot::default());
}

#[test]
fn the_padding_belongs_to_no_vcpu() {
    let bench = bench(ClampMode::Floor);
    assert_eq!(bench.region.size(), 0x1_0000);
    for vcpu in [3, 15, u64::MAX / REGION_STRIDE] {
        assert_eq!(bench.read(vcpu, REG_PERFTBL_LEN), 0);
        bench.write(vcpu, REG_SET_PERF, 1);
    }
    assert_eq!(bench.region.device().accesses_outside(), 6);
    assert_eq!(
        bench.events.all()[0],
        Event::IllegalAccess {
            vcpu: None,
            offset: 3 * REGION_STRIDE + REG_PERFTBL_LEN,
            len: 4,
            write: false,
        }
    );
}

#[test]
fn regions_are_padded_to_64_kib() {
    for (vcpus, size) in [
        (1, 0x1_0000),
        (16, 0x1_0000),
        (17, 0x2_0000),
        (512, 0x20_0000),
    ] {
        assert_eq!(region_size(vcpus), size, "{vcpus} vCPUs");
    }
}

#[test]
fn the_last_write_to_any_member_counts() {
    let bench = bench(ClampMode::Floor);
    bench.write(0, REG_SET_PERF, 1_800_000);
    bench.write(1, REG_SET_PERF, 600_000);
    assert_eq!(
        bench.floors(),
        [(7, 329), (7, 109)],
        "not the highest: the last"
    );
    bench.write(0, REG_SET_PERF, 600_000);
    assert_eq!(
        bench.floors().len(),
        2,
        "the same request by another member is no change"
    );
}

#[test]
fn domains_are_apart() {
    let bench = bench(ClampMode::Floor);
    bench.write(2, REG_SET_PERF, 2_800_000);
    bench.write(0, REG_SET_PERF, 600_000);
    assert_eq!(bench.floors(), [(3, 1024), (7, 109)]);
}

#[test]
fn what_is_in_force_is_not_asked_for_again() {
    let bench = bench(ClampMode::Exact);
    for _ in 0..3 {
        bench.write(2, REG_SET_PERF, 1_400_000);
    }
    // Another request, but the same clamp.
    bench.write(2, REG_SET_PERF, 1_400_001);
    assert_eq!(bench.floors(), [(3, 512)]);
    let counters = bench.counters(2);
    assert_eq!(
        (counters.requests, counters.applied, counters.unchanged),
        (4, 1, 3)
    );
}

#[test]
fn a_refused_request_is_tried_again_by_the_next_equal_one() {
    let bench = bench(ClampMode::Floor);
    bench.actuator.fail_with(Some(REFUSED));
    bench.write(0, REG_SET_PERF, 1_200_000);
    bench.write(1, REG_SET_PERF, 1_200_000);
    bench.actuator.fail_with(None);
    bench.write(1, REG_SET_PERF, 1_200_000);
    bench.write(1, REG_SET_PERF, 1_200_000);
    assert_eq!(bench.floors(), [(7, 219)]);
    assert_eq!(bench.counters(0).refused, 1);
    let counters = bench.counters(1);
    assert_eq!(
        (counters.refused, counters.applied, counters.unchanged),
        (1, 1, 1)
    );
}

#[test]
fn a_request_of_0_gives_the_reset_state_in_both_modes() {
    for mode in [ClampMode::Floor, ClampMode::Exact] {
        let bench = bench(mode);
        bench.write(0, REG_SET_PERF, 600_000);
        // Another member's page: the request is the domain's.
        bench.write(1, REG_SET_PERF, 0);
        let last = bench.actuator.applied().last().copied();
        assert_eq!(last, Some((DomainId(7), Clamp::NONE)), "{mode:?}");
        bench.write(1, REG_SET_PERF, 0);
        let counters = bench.counters(1);
        assert_eq!(
            (counters.requests, counters.applied, counters.unchanged),
            (2, 1, 1),
            "counted as any other request, {mode:?}"
        );
        let (vcpu, domain, khz) = (VcpuId(1), DomainId(7), Khz(0));
        let clamp = Clamp::NONE;
        assert_eq!(
            bench.events.all()[2..4],
            [
                Event::Request { vcpu, domain, khz },
                Event::Applied {
                    vcpu,
                    domain,
                    clamp
                }
            ]
        );
        bench.write(0, REG_SET_PERF, 600_000);
        assert_eq!(bench.floors(), [(7, 109), (7, 0), (7, 109)], "{mode:?}");
    }
}

#[test]
fn after_a_refusal_going_back_is_a_change_too() {
    let bench = bench(ClampMode::Floor);
    bench.write(0, REG_SET_PERF, 600_000);
    bench.actuator.fail_with(Some(REFUSED));
    bench.write(0, REG_SET_PERF, 1_800_000);
    bench.actuator.fail_with(None);
    bench.write(0, REG_SET_PERF, 600_000);
    // The refused call may have done half of its work: what is in force is not known.
    assert_eq!(bench.floors(), [(7, 109), (7, 109)]);
}

#[test]
fn a_request_that_had_no_effect_is_applied_again() {
    let bench = bench(ClampMode::Floor);
    let reason = "a test";
    bench.actuator.fail_with(Some(ActuateError::NotApplicable {
        domain: DomainId(7),
        reason,
    }));
    bench.write(0, REG_SET_PERF, 1_200_000);
    bench.actuator.fail_with(None);
    bench.region.device().apply_again(VcpuId(1));
    // What is added to it on the host may have changed, too.
    bench.region.device().apply_again(VcpuId(1));
    assert_eq!(bench.floors(), [(7, 219), (7, 219)]);
    let counters = bench.counters(0);
    assert_eq!(
        (
            counters.requests,
            counters.not_applicable,
            counters.applied,
            counters.unchanged
        ),
        (3, 1, 2, 0)
    );
    bench.write(0, REG_SET_PERF, 1_200_000);
    assert_eq!(bench.counters(0).unchanged, 1, "and a request is none");
}

#[test]
fn what_clamps_mean_nothing_to_is_counted_apart() {
    let bench = bench(ClampMode::Floor);
    bench.actuator.fail_with(Some(ActuateError::NotApplicable {
        domain: DomainId(3),
        reason: "a test",
    }));
    bench.write(2, REG_SET_PERF, 1);
    let counters = bench.counters(2);
    assert_eq!((counters.not_applicable, counters.refused), (1, 0));
    assert!(matches!(
        bench.events.all()[1],
        Event::NotApplicable {
            reason: "a test",
            ..
        }
    ));
}

#[test]
fn events_tell_the_story_of_a_request() {
    let bench = bench(ClampMode::Exact);
    bench.write(1, REG_SET_PERF, SET_PERF_KHZ);
    let (vcpu, domain) = (VcpuId(1), DomainId(7));
    let util = Util::new(329).unwrap();
    let clamp = Clamp {
        min: util,
        max: util,
    };
    let khz = Khz(SET_PERF_KHZ);
    assert_eq!(
        bench.events.all(),
        [
            Event::Request { vcpu, domain, khz },
            Event::Applied {
                vcpu,
                domain,
                clamp
            },
        ]
    );
}

#[test]
fn cur_perf_follows_the_pcpu() {
    let bench = bench(ClampMode::Floor);
    assert_eq!(bench.read(0, REG_CUR_PERF), 1_200_000);
    bench.source.set(Some(PcpuPerf {
        pcpu: 2,
        khz: Khz(2_800_000),
        reference: Khz(2_800_000),
        capacity: Util::MAX,
    }));
    assert_eq!(bench.read(2, REG_CUR_PERF), 2_800_000);
    assert_eq!(
        bench.read(0, REG_CUR_PERF),
        5_602_431,
        "a little vCPU on a big pCPU"
    );
}

#[test]
fn a_source_without_an_answer_shows_the_last_one() {
    let bench = bench(ClampMode::Floor);
    assert_eq!(bench.read(1, REG_CUR_PERF), 1_200_000);
    bench.source.set(None);
    assert_eq!(bench.read(1, REG_CUR_PERF), 1_200_000);
    assert_eq!(
        bench.read(0, REG_CUR_PERF),
        1_800_000,
        "never learned: the maximum"
    );
    bench.source.set(Some(PcpuPerf {
        pcpu: 0,
        khz: Khz(0),
        reference: Khz(1),
        capacity: Util::MAX,
    }));
    assert_eq!(
        bench.read(1, REG_CUR_PERF),
        1_200_000,
        "0 kHz is not believed"
    );
    assert_eq!(bench.counters(1).source_failures, 2);
}

#[test]
fn each_access_that_exits_is_counted_where_it_went() {
    let bench = bench(ClampMode::Floor);
    let accesses = |vcpu| bench.region.device().accesses(VcpuId(vcpu));
    bench.read(0, REG_CUR_PERF);
    bench.read(0, REG_SET_PERF);
    bench.write(0, REG_SET_PERF, LITTLE[1]);
    bench.write(2, REG_PERFTBL_SEL, 1);
    bench.write(3, REG_SET_PERF, LITTLE[1]);
    bench.region.device().count_in_kernel(VcpuId(2), 5);
    bench.region.device().count_in_kernel(VcpuId(9), 5);
    let counted = |reads_exited, writes_exited, writes_in_kernel| {
        Some(Accesses {
            reads_exited,
            writes_exited,
            writes_in_kernel,
        })
    };
    assert_eq!(accesses(0), counted(2, 1, 0), "illegal ones too");
    assert_eq!(accesses(1), counted(0, 0, 0));
    assert_eq!(accesses(2), counted(0, 1, 5));
    assert_eq!((accesses(3), bench.counters(2).requests), (None, 0));
}

#[test]
fn a_vcpu_stands_where_its_domain_does() {
    let bench = bench(ClampMode::Floor);
    let domain_status = |vcpu| bench.region.device().domain_status(VcpuId(vcpu));
    let before = domain_status(0).expect("a vCPU");
    assert_eq!((before.requested, before.clamp), (None, Clamp::NONE));
    assert_eq!(before.cur_perf, Khz(1_800_000));
    bench.write(1, REG_SET_PERF, LITTLE[0]);
    bench.read(0, REG_CUR_PERF);
    let after = domain_status(0).expect("a vCPU");
    assert_eq!(after.requested, Some(Khz(LITTLE[0])));
    assert_eq!(after.clamp.min.get(), 109, "329 / 3");
    assert_eq!(after.cur_perf, Khz(1_200_000));
    bench.region.device().reset();
    assert_eq!(domain_status(0).expect("a vCPU").requested, None);
    assert_eq!(domain_status(3), None);
}
