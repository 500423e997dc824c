// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: every rule that facts can break is found, and the error carries
//! the values that broke it; facts at the edge of each rule pass.

use vcpufreq_dt::{CpufreqRegion, FactsError, Machine, MachineFacts, Opp, OppTable};

use crate::samples::{bare, cpus, largest, little_big, opp};

type Change = fn(&mut MachineFacts);
type Row = (&'static str, Change, FactsError);

/// Each row breaks one rule of `little_big`.
fn refused(rows: &[Row]) {
    for (name, break_it, error) in rows {
        let mut facts = little_big();
        break_it(&mut facts);
        assert_eq!(Machine::try_from(facts).as_ref(), Err(error), "{name}");
    }
}

#[test]
fn samples_pass() {
    for facts in [little_big(), largest()] {
        assert_eq!(Machine::try_from(facts.clone()).unwrap().facts(), &facts);
    }
}

#[test]
fn the_number_of_cpus_and_tables_is_checked() {
    refused(&[
        ("no CPU", |m| m.cpus.clear(), FactsError::NoCpus),
        (
            "513 CPUs",
            |m| *m = cpus(&[(1024, 1_000_000); 513]),
            FactsError::TooManyCpus { cpus: 513 },
        ),
        (
            "513 tables",
            |m| m.opp_tables = vec![m.opp_tables[0].clone(); 513],
            FactsError::TooManyTables { tables: 513 },
        ),
    ]);
}

#[test]
fn cpus_are_checked() {
    refused(&[
        (
            "twice the same reg",
            |m| m.cpus[3].reg = 1,
            FactsError::DuplicateReg {
                first: 1,
                second: 3,
                reg: 1,
            },
        ),
        (
            "the MPIDR bit that is always 1",
            |m| m.cpus[2].reg = 0x8000_0002,
            FactsError::RegNotAffinity {
                cpu: 2,
                reg: 0x8000_0002,
            },
        ),
        (
            "capacity 0",
            |m| m.cpus[1].capacity = 0,
            FactsError::CapacityRange {
                cpu: 1,
                capacity: 0,
            },
        ),
        (
            "capacity 1025",
            |m| m.cpus[1].capacity = 1025,
            FactsError::CapacityRange {
                cpu: 1,
                capacity: 1025,
            },
        ),
        (
            "0 kHz",
            |m| m.cpus[0].khz_max = 0,
            FactsError::ZeroMaxFrequency { cpu: 0 },
        ),
        (
            "a table that isn't there",
            |m| m.cpus[0].opp_table = Some(2),
            FactsError::NoSuchTable {
                cpu: 0,
                table: 2,
                tables: 2,
            },
        ),
        (
            "another maximum than the table's",
            |m| m.cpus[0].khz_max = 1_700_000,
            FactsError::MaxNotInTable {
                cpu: 0,
                khz_max: 1_700_000,
                table: 0,
                khz: 1_800_000,
            },
        ),
    ]);
}

#[test]
fn tables_are_checked() {
    refused(&[
        (
            "empty",
            |m| m.opp_tables[1].opps.clear(),
            FactsError::EmptyTable { table: 1 },
        ),
        (
            "65 OPPs",
            |m| m.opp_tables[1].opps = (1..=65).map(bare).collect(),
            FactsError::TableTooLong { table: 1, opps: 65 },
        ),
        (
            "0 kHz",
            |m| m.opp_tables[0].opps[0].khz = 0,
            FactsError::ZeroFrequency { table: 0, opp: 0 },
        ),
        (
            "the same frequency twice",
            |m| m.opp_tables[0].opps[0].khz = 1_800_000,
            FactsError::NotRising {
                table: 0,
                opp: 1,
                khz: 1_800_000,
                previous: 1_800_000,
            },
        ),
        (
            "falling",
            |m| m.opp_tables[0].opps.reverse(),
            FactsError::NotRising {
                table: 0,
                opp: 1,
                khz: 600_000,
                previous: 1_800_000,
            },
        ),
    ]);
}

#[test]
fn voltages_and_powers_are_checked() {
    refused(&[
        (
            "a voltage is missing",
            |m| m.opp_tables[0].opps[1].uv = None,
            FactsError::Partial {
                table: 0,
                what: "voltage",
                with: 1,
                opps: 2,
            },
        ),
        (
            "a power is missing",
            |m| m.opp_tables[0].opps[0].uw = None,
            FactsError::Partial {
                table: 0,
                what: "power",
                with: 1,
                opps: 2,
            },
        ),
        (
            "0 uV",
            |m| m.opp_tables[0].opps[1].uv = Some(0),
            FactsError::ZeroVoltage { table: 0, opp: 1 },
        ),
        (
            "0 uW",
            |m| m.opp_tables[1].opps[0].uw = Some(0),
            FactsError::PowerRange {
                table: 1,
                opp: 0,
                uw: 0,
            },
        ),
        (
            "more than the energy model takes",
            |m| m.opp_tables[1].opps[1].uw = Some(64_000_001),
            FactsError::PowerRange {
                table: 1,
                opp: 1,
                uw: 64_000_001,
            },
        ),
    ]);
}

#[test]
fn the_register_region_is_checked() {
    refused(&[
        (
            "4 KiB aligned",
            |m| {
                m.cpufreq = Some(CpufreqRegion {
                    base: 0x0b00_1000,
                    size: 0x1_0000,
                })
            },
            FactsError::RegionMisaligned { base: 0x0b00_1000 },
        ),
        (
            "a byte too small",
            |m| {
                m.cpufreq = Some(CpufreqRegion {
                    base: 0x0b00_0000,
                    size: 0x3fff,
                })
            },
            FactsError::RegionTooSmall {
                size: 0x3fff,
                needed: 0x4000,
                cpus: 4,
            },
        ),
        (
            "past the address space",
            |m| {
                m.cpufreq = Some(CpufreqRegion {
                    base: !0xffff,
                    size: 0x1_0001,
                })
            },
            FactsError::RegionWraps {
                base: !0xffff,
                size: 0x1_0001,
            },
        ),
    ]);
}

#[test]
fn the_edges_pass() {
    let rows: [(&str, Change); 5] = [
        ("exactly the pages that are needed", |m| {
            m.cpufreq = Some(CpufreqRegion {
                base: 0,
                size: 0x4000,
            });
        }),
        ("up to the end of the address space", |m| {
            m.cpufreq = Some(CpufreqRegion {
                base: !0xffff,
                size: 0x1_0000,
            });
        }),
        ("all affinity bits", |m| m.cpus[0].reg = 0xff_00ff_ffff),
        ("the largest power", |m| {
            m.opp_tables[0].opps[1].uw = Some(64_000_000)
        }),
        ("a table that no CPU uses", |m| {
            m.opp_tables.push(OppTable {
                opps: vec![opp(1, 1, 1)],
                shared: false,
            });
        }),
    ];
    for (name, change) in rows {
        let mut facts = little_big();
        change(&mut facts);
        assert_eq!(Machine::try_from(facts).err(), None, "{name}");
    }
}

#[test]
fn messages_name_rule_and_values() {
    let mut facts = little_big();
    facts.opp_tables[1].opps[1] = Opp {
        khz: 500_000,
        ..bare(0)
    };
    assert_eq!(
        Machine::try_from(facts).unwrap_err().to_string(),
        "OPP table 1, OPP 1: 500000 kHz after 700000 kHz, frequencies must rise"
    );
}
