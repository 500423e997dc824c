// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the arithmetic between guest and host: worked rows, and rules for all values.

use proptest::prelude::*;
use vcpufreq_device::*;

fn spec(capacity: u16, table: &[u32]) -> VcpuSpec {
    VcpuSpec {
        table: PerfTable::try_from(table.iter().copied().map(Khz).collect::<Vec<_>>())
            .expect("a sound table"),
        capacity: Util::new(capacity).expect("a capacity"),
        domain: DomainId(0),
    }
}

const LITTLE: &[u32] = &[600_000, 1_200_000, 1_800_000];
const BIG: &[u32] = &[700_000, 1_400_000, 2_100_000, 2_800_000];
const NO_TABLE: &[u32] = &[1024];

#[test]
fn requests_become_clamps() {
    use ClampMode::{Exact, Floor};
    use Headroom::{None, Quarter};
    #[rustfmt::skip]
    let rows = [
        // name, capacity, table, asked, mode, headroom => min, max, granted
        ("big, half",            1024, BIG, 1_400_000, Floor, None,  512, 1024, 1_400_000),
        ("big, all",             1024, BIG, 2_800_000, Floor, None, 1024, 1024, 2_800_000),
        ("exact closes the top", 1024, BIG, 1_400_000, Exact, None,  512,  512, 1_400_000),
        ("floor, not nearest",    329, LITTLE, 1_200_000, Floor, None, 219, 1024, 1_200_000),
        ("little, all",           329, LITTLE, 1_800_000, Exact, None, 329, 329, 1_800_000),
        ("between entries",       329, LITTLE, 900_000, Floor, None, 164, 1024, 900_000),
        ("zero is no floor",     1024, BIG, 0, Floor, None, 0, 1024, 0),
        ("and no ceiling",       1024, BIG, 0, Exact, None, 0, 1024, 0),
        ("on an old kernel too", 1024, BIG, 0, Exact, Quarter, 0, 1024, 0),
        ("the least of all",     1024, BIG, 1, Exact, None, 0, 0, 1),
        ("garbage above",         329, LITTLE, u32::MAX, Exact, None, 329, 329, 1_800_000),
        ("one above",             329, LITTLE, 1_800_001, Floor, None, 329, 1024, 1_800_000),
        ("no table, any value",  1024, NO_TABLE, 333, Floor, None, 333, 1024, 333),
        ("old kernel, half",     1024, BIG, 1_400_000, Floor, Quarter, 409, 1024, 1_400_000),
        ("old kernel, all",      1024, BIG, 2_800_000, Exact, Quarter, 819, 819, 2_800_000),
        ("more than 32 bits",    1024, &[u32::MAX], u32::MAX, Exact, None, 1024, 1024, u32::MAX),
    ];
    for (name, capacity, table, asked, mode, headroom, min, max, granted) in rows {
        let decision = clamp(&spec(capacity, table), Khz(asked), mode, headroom);
        let clamp = (decision.clamp.min.get(), decision.clamp.max.get());
        assert_eq!(clamp, (min, max), "{name}");
        assert_eq!(decision.granted, Khz(granted), "{name}");
    }
}

#[test]
fn frequencies_become_performance() {
    #[rustfmt::skip]
    let rows = [
        // name, vCPU's capacity and table, pCPU's capacity, f, f_max => kHz
        ("mirrors its pCPU",        1024, BIG,    1024, 2_100_000, 2_800_000, Some(2_100_000)),
        ("mirrors a little one",     329, LITTLE,  329, 1_200_000, 1_800_000, Some(1_200_000)),
        ("big vCPU on little pCPU", 1024, BIG,     329, 1_800_000, 1_800_000, Some(899_609)),
        ("little vCPU on big pCPU",  329, LITTLE, 1024, 2_800_000, 2_800_000, Some(5_602_431)),
        ("almost nothing is 1",     1024, NO_TABLE,  1, 1, 2_800_000, Some(1)),
        ("more than 64 bits",       1024, &[u32::MAX], 1024, u32::MAX, u32::MAX, Some(u32::MAX)),
        ("more than fits is cut",      1, &[u32::MAX], 1024, u32::MAX, 1, Some(u32::MAX)),
        ("no frequency",            1024, BIG,    1024, 0, 2_800_000, None),
        ("no maximum",              1024, BIG,    1024, 1, 0, None),
        ("no capacity",             1024, BIG,       0, 1, 1, Some(1)),
    ];
    for (name, capacity, table, pcpu_capacity, khz, reference, expected) in rows {
        let pcpu = PcpuPerf {
            pcpu: 0,
            khz: Khz(khz),
            reference: Khz(reference),
            capacity: Util::new(pcpu_capacity).unwrap(),
        };
        let got = performance(&spec(capacity, table), &pcpu);
        assert_eq!(got, expected.map(Khz), "{name}");
    }
}

#[test]
fn headroom_follows_the_kernel() {
    let rows = [
        ((5, 10), Headroom::Quarter),
        ((6, 7), Headroom::Quarter),
        ((6, 8), Headroom::None),
        ((6, 12), Headroom::None),
        ((7, 2), Headroom::None),
    ];
    for ((major, minor), headroom) in rows {
        assert_eq!(
            Headroom::for_kernel(major, minor),
            headroom,
            "{major}.{minor}"
        );
    }
}

#[test]
fn tables_are_checked() {
    let khz = |values: &[u32]| values.iter().copied().map(Khz).collect::<Vec<_>>();
    let long: Vec<u32> = (1..=65).collect();
    let rows = [
        ("empty", khz(&[]), TableError::Empty),
        ("overlong", khz(&long), TableError::TooLong { len: 65 }),
        ("zero", khz(&[0, 1]), TableError::Zero { index: 0 }),
        (
            "unsorted",
            khz(&[2, 3, 1]),
            TableError::NotRising {
                index: 2,
                previous: Khz(3),
                entry: Khz(1),
            },
        ),
        (
            "twice the same",
            khz(&[2, 2]),
            TableError::NotRising {
                index: 1,
                previous: Khz(2),
                entry: Khz(2),
            },
        ),
    ];
    for (name, entries, error) in rows {
        assert_eq!(PerfTable::try_from(entries), Err(error), "{name}");
    }
    assert_eq!(
        PerfTable::try_from(khz(&long[..64]))
            .unwrap()
            .register_len(),
        64
    );
}

fn any_spec() -> impl Strategy<Value = VcpuSpec> {
    let table = proptest::collection::btree_set(1..=u32::MAX, 1..=64);
    (1..=1024u16, table)
        .prop_map(|(capacity, table)| spec(capacity, &table.into_iter().collect::<Vec<_>>()))
}

proptest! {
    #[test]
    fn a_clamp_is_within_the_vcpus_capacity(
        spec in any_spec(), asked: u32, exact: bool, old: bool,
    ) {
        let mode = if exact { ClampMode::Exact } else { ClampMode::Floor };
        let headroom = if old { Headroom::Quarter } else { Headroom::None };
        let Clamp { min, max } = clamp(&spec, Khz(asked), mode, headroom).clamp;
        prop_assert!(min <= spec.capacity);
        prop_assert!(min <= max);
    }

    #[test]
    fn asking_for_more_never_clamps_to_less(spec in any_spec(), a: u32, b: u32) {
        let clamp = |khz| clamp(&spec, Khz(khz), ClampMode::Exact, Headroom::None).clamp.min;
        prop_assert!(clamp(a.min(b)) <= clamp(a.max(b)));
    }

    /// A kernel from 6.8 on requests `floor(f_max * util / capacity)` and the driver rounds up.
    /// With the floor in `util`, that is the requested OPP if OPPs are at least one step of the
    /// scale apart.
    #[test]
    fn the_host_picks_the_opp_that_was_asked_for(
        capacity in 50..=1024u16, step in 100_000..400_000u32, opps in 1..=20u32,
    ) {
        let table: Vec<u32> = (1..=opps).map(|i| i * step).collect();
        let spec = spec(capacity, &table);
        for asked in &table {
            let clamp = clamp(&spec, Khz(*asked), ClampMode::Exact, Headroom::None).clamp;
            let util = u64::from(clamp.min.get());
            let target = u64::from(spec.table.max().0) * util / u64::from(capacity);
            let picked = table.iter().find(|opp| u64::from(**opp) >= target);
            prop_assert_eq!(picked, Some(asked));
        }
    }

    #[test]
    fn a_vcpu_that_mirrors_its_pcpu_reads_its_frequency(spec in any_spec(), khz in 1..=u32::MAX) {
        let khz = Khz(khz).min(spec.table.max());
        let pcpu = PcpuPerf {
            pcpu: 3,
            khz,
            reference: spec.table.max(),
            capacity: spec.capacity,
        };
        prop_assert_eq!(performance(&spec, &pcpu), Some(khz));
    }
}

#[test]
fn the_nearest_entry_is_one_of_a_table_that_has_steps() {
    let rows = [
        (BIG, 1_000_000, 700_000),
        (BIG, 1_050_000, 1_400_000),
        (BIG, 4_000_000, 2_800_000),
        // One entry: what it gets, also above its maximum.
        (NO_TABLE, 333, 333),
        (NO_TABLE, 1024, 1024),
        (NO_TABLE, 2048, 2048),
    ];
    for (table, khz, told) in rows {
        assert_eq!(nearest_entry(&spec(1024, table), Khz(khz)), Khz(told));
    }
}

#[test]
fn a_clamp_within_bounds_keeps_what_it_can() {
    let clamp = |min, max| Clamp {
        min: Util::new(min).unwrap(),
        max: Util::new(max).unwrap(),
    };
    let rows = [
        ("none", (0, 1024), (0, 1024), (0, 1024)),
        ("a floor", (300, 1024), (600, 1024), (600, 1024)),
        ("a floor below it", (700, 1024), (600, 1024), (700, 1024)),
        ("a ceiling", (700, 1024), (0, 500), (500, 500)),
        ("a ceiling above it", (300, 300), (0, 500), (300, 300)),
        (
            "a floor above its ceiling",
            (200, 300),
            (600, 1024),
            (600, 600),
        ),
        ("both", (0, 1024), (200, 300), (200, 300)),
    ];
    for (name, of, bounds, expected) in rows {
        let within = clamp(of.0, of.1).within(clamp(bounds.0, bounds.1));
        assert_eq!(within, clamp(expected.0, expected.1), "{name}");
    }
}
