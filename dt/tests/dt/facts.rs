// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: every rule that facts can break is found, and the error carries
//! the values that broke it; facts at the edge of each rule pass.

use vcpufreq_dt::{CpufreqRegion, Machine, MachineFacts, Opp, OppTable, RegionKind};

use crate::samples::{bare, cpus, largest, little_big, opp};

type Change = fn(&mut MachineFacts);

/// Breaks one rule of `little_big`; `error` is how the error is printed, with its values.
fn refused(name: &str, break_it: Change, error: &str) {
    let mut facts = little_big();
    break_it(&mut facts);
    let refused = Machine::try_from(facts).expect_err(name);
    assert_eq!(format!("{refused:?}"), error, "{name}");
}

/// Moves the region of the registers.
fn region(facts: &mut MachineFacts, base: u64, size: u64) {
    facts.cpufreq = Some(CpufreqRegion {
        base,
        size,
        kind: RegionKind::Registers,
    });
}

/// The same of shared memory.
fn shared(facts: &mut MachineFacts, base: u64, size: u64) {
    region(facts, base, size);
    facts.cpufreq.as_mut().unwrap().kind = RegionKind::SharedMemory;
}

#[test]
fn samples_pass() {
    for facts in [little_big(), largest()] {
        assert_eq!(Machine::try_from(facts.clone()).unwrap().facts(), &facts);
    }
}

#[test]
fn the_number_of_cpus_and_tables_is_checked() {
    refused("no CPU", |m| m.cpus.clear(), "NoCpus");
    refused(
        "513 CPUs",
        |m| *m = cpus(&[(1024, 1_000_000); 513]),
        "TooManyCpus { cpus: 513 }",
    );
    refused(
        "513 tables",
        |m| m.opp_tables = vec![m.opp_tables[0].clone(); 513],
        "TooManyTables { tables: 513 }",
    );
}

#[test]
fn cpus_are_checked() {
    refused(
        "twice the same reg",
        |m| m.cpus[3].reg = 1,
        "DuplicateReg { first: 1, second: 3, reg: 1 }",
    );
    refused(
        "the MPIDR bit that is always 1",
        |m| m.cpus[2].reg = 0x8000_0002,
        "RegNotAffinity { cpu: 2, reg: 2147483650 }",
    );
    refused(
        "capacity 0",
        |m| m.cpus[1].capacity = 0,
        "CapacityRange { cpu: 1, capacity: 0 }",
    );
    refused(
        "capacity 1025",
        |m| m.cpus[1].capacity = 1025,
        "CapacityRange { cpu: 1, capacity: 1025 }",
    );
    refused(
        "0 kHz",
        |m| m.cpus[0].khz_max = 0,
        "ZeroMaxFrequency { cpu: 0 }",
    );
    refused(
        "a table that isn't there",
        |m| m.cpus[0].opp_table = Some(2),
        "NoSuchTable { cpu: 0, table: 2, tables: 2 }",
    );
    refused(
        "another maximum than the table's",
        |m| m.cpus[0].khz_max = 1_700_000,
        "MaxNotInTable { cpu: 0, khz_max: 1700000, table: 0, khz: 1800000 }",
    );
}

#[test]
fn tables_are_checked() {
    refused(
        "empty",
        |m| m.opp_tables[1].opps.clear(),
        "EmptyTable { table: 1 }",
    );
    refused(
        "65 OPPs",
        |m| m.opp_tables[1].opps = (1..=65).map(bare).collect(),
        "TableTooLong { table: 1, opps: 65 }",
    );
    refused(
        "0 kHz",
        |m| m.opp_tables[0].opps[0].khz = 0,
        "ZeroFrequency { table: 0, opp: 0 }",
    );
    refused(
        "the same frequency twice",
        |m| m.opp_tables[0].opps[0].khz = 1_800_000,
        "NotRising { table: 0, opp: 1, khz: 1800000, previous: 1800000 }",
    );
    refused(
        "falling",
        |m| m.opp_tables[0].opps.reverse(),
        "NotRising { table: 0, opp: 1, khz: 600000, previous: 1800000 }",
    );
}

#[test]
fn voltages_and_powers_are_checked() {
    refused(
        "a voltage is missing",
        |m| m.opp_tables[0].opps[1].uv = None,
        "Partial { table: 0, what: \"voltage\", with: 1, opps: 2 }",
    );
    refused(
        "a power is missing",
        |m| m.opp_tables[0].opps[0].uw = None,
        "Partial { table: 0, what: \"power\", with: 1, opps: 2 }",
    );
    refused(
        "0 uV",
        |m| m.opp_tables[0].opps[1].uv = Some(0),
        "ZeroVoltage { table: 0, opp: 1 }",
    );
    refused(
        "0 uW",
        |m| m.opp_tables[1].opps[0].uw = Some(0),
        "PowerRange { table: 1, opp: 0, uw: 0 }",
    );
    refused(
        "more than the energy model takes",
        |m| m.opp_tables[1].opps[1].uw = Some(64_000_001),
        "PowerRange { table: 1, opp: 1, uw: 64000001 }",
    );
}

#[test]
fn the_register_region_is_checked() {
    refused(
        "4 KiB aligned",
        |m| region(m, 0x0b00_1000, 0x1_0000),
        "RegionMisaligned { base: 184553472, align: 65536 }",
    );
    refused(
        "a byte too small",
        |m| region(m, 0x0b00_0000, 0x3fff),
        "RegionTooSmall { size: 16383, needed: 16384, cpus: 4 }",
    );
    refused(
        "past the address space",
        |m| region(m, !0xffff, 0x1_0001),
        "RegionWraps { base: 18446744073709486080, size: 65537 }",
    );
    refused(
        "no room for a header",
        |m| shared(m, 0xb00_0000, 0x4000),
        "RegionTooSmall { size: 16384, needed: 20480, cpus: 4 }",
    );
    refused(
        "no room for a doorbell",
        |m| shared(m, 0xffff_ffff_ffff_0000, 0x1_0000),
        "RegionWraps { base: 18446744073709486080, size: 65536 }",
    );
}

#[test]
fn the_edges_pass() {
    let rows: [(&str, Change); 5] = [
        ("exactly the pages that are needed", |m| {
            region(m, 0, 0x4000)
        }),
        ("up to the end of the address space", |m| {
            region(m, !0xffff, 0x1_0000)
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
