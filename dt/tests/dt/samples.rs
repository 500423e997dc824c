// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Machines that tests use.

use vcpufreq_dt::{
    CpuFacts, CpuPlace, CpufreqRegion, Machine, MachineFacts, Opp, OppTable, RegionKind,
};

pub const REGION: CpufreqRegion = CpufreqRegion {
    base: 0x0b00_0000,
    size: 0x1_0000,
    kind: RegionKind::Registers,
};

/// An OPP with voltage and power.
pub const fn opp(khz: u32, uv: u32, uw: u32) -> Opp {
    Opp {
        khz,
        uv: Some(uv),
        uw: Some(uw),
    }
}

/// An OPP of which only the frequency is known.
pub const fn bare(khz: u32) -> Opp {
    Opp {
        khz,
        uv: None,
        uw: None,
    }
}

/// CPUs without OPP tables, from (capacity, highest frequency in kHz).
pub fn cpus(perf: &[(u16, u32)]) -> MachineFacts {
    let cpus = perf
        .iter()
        .zip(0..)
        .map(|(&(capacity, khz_max), reg)| CpuFacts {
            reg,
            capacity,
            khz_max,
            opp_table: None,
            place: CpuPlace::default(),
            real_time: false,
        });
    MachineFacts {
        cpus: cpus.collect(),
        standby: true,
        ..MachineFacts::default()
    }
}

/// 2 little and 2 big CPUs, a table and a cluster for each kind.
pub fn little_big() -> MachineFacts {
    let little = vec![
        opp(600_000, 600_000, 45_000),
        opp(1_800_000, 900_000, 305_000),
    ];
    let big = vec![
        opp(700_000, 600_000, 160_000),
        opp(2_800_000, 1_000_000, 1_760_000),
    ];
    let mut facts = cpus(&[
        (329, 1_800_000),
        (329, 1_800_000),
        (1024, 2_800_000),
        (1024, 2_800_000),
    ]);
    for (index, cpu) in facts.cpus.iter_mut().enumerate() {
        cpu.opp_table = Some(index / 2);
        cpu.place.cluster = u32::from(index >= 2);
    }
    facts.opp_tables = [little, big]
        .map(|opps| OppTable { opps, shared: true })
        .into();
    facts.cpufreq = Some(REGION);
    facts
}

/// 4 silver, 3 gold, 1 prime: three tables with nothing but frequencies, CPUs
/// that change theirs alone, no idle state.
pub fn three_kinds() -> MachineFacts {
    let kinds: [(usize, u16, &[u32]); 3] = [
        (4, 347, &[300_000, 1_113_600, 1_900_800]),
        (3, 814, &[691_200, 2_400_000]),
        (1, 1024, &[806_400, 2_707_200]),
    ];
    let mut facts = MachineFacts {
        cpufreq: Some(REGION),
        ..MachineFacts::default()
    };
    for (kind, (count, capacity, khz)) in kinds.into_iter().enumerate() {
        facts.opp_tables.push(OppTable {
            opps: khz.iter().copied().map(bare).collect(),
            shared: false,
        });
        for _ in 0..count {
            facts.cpus.push(CpuFacts {
                reg: u64::try_from(facts.cpus.len()).unwrap() << 8,
                capacity,
                khz_max: *khz.last().unwrap(),
                opp_table: Some(kind),
                place: CpuPlace::default(),
                real_time: false,
            });
        }
    }
    facts
}

/// The largest machine: 512 CPUs with all affinity fields in use, a table of
/// 64 OPPs, frequencies beyond 32 bits of Hz.
pub fn largest() -> MachineFacts {
    let mut facts = cpus(&[(1024, 6_400_000); 512]);
    for (index, cpu) in facts.cpus.iter_mut().enumerate() {
        let n = u64::try_from(index).unwrap();
        cpu.reg = ((n >> 8) << 32) | (((n >> 4) & 0xf) << 8) | (n & 0xf);
        cpu.opp_table = Some(0);
        cpu.place.cluster = u32::try_from(index / 16).unwrap();
    }
    facts.opp_tables = vec![OppTable {
        opps: (1..=64).map(|n| bare(n * 100_000)).collect(),
        shared: true,
    }];
    facts.cpufreq = Some(CpufreqRegion {
        base: 0x1_0000_0000,
        size: 0x20_0000,
        kind: RegionKind::Registers,
    });
    facts
}

/// Facts that are meant to be right.
pub fn machine(facts: MachineFacts) -> Machine {
    Machine::try_from(facts).unwrap()
}

/// Every sample with its name.
pub fn all() -> Vec<(&'static str, Machine)> {
    let mut one = cpus(&[(512, 1)]);
    one.cpufreq = Some(REGION);
    [
        ("little and big", little_big()),
        ("three kinds", three_kinds()),
        ("the largest", largest()),
        ("one CPU, no table", one),
        ("no device", cpus(&[(1024, 2_000_000), (160, 1_000_000)])),
    ]
    .map(|(name, facts)| (name, machine(facts)))
    .into()
}
