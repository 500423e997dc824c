// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device tree of another VMM: what `dt --merge` makes of it can be merged again, to a tree of the
//! same size.

use vcpufreq_dt::{
    CpuFacts, CpuPlace, CpufreqRegion, Machine, MachineFacts, Opp, OppTable, RegionKind, Seeds,
    merge,
};

/// Merges a machine of one CPU, and of two, into the tree.
pub fn devicetree(data: &[u8]) {
    for cpus in [1, 2] {
        let machine = machine(cpus);
        if let Ok(merged) = merge(data, &machine, Seeds::Drop) {
            // Only the numbers of phandles may differ.
            let again = merge(&merged.blob, &machine, Seeds::Drop);
            let again = again.map(|again| again.blob.len());
            assert_eq!(again, Ok(merged.blob.len()));
        }
    }
}

fn machine(cpus: u64) -> Machine {
    let opp = |khz| Opp {
        khz,
        uv: Some(600_000),
        uw: None,
    };
    let cpu = |reg| CpuFacts {
        reg,
        capacity: 1024,
        khz_max: 2_800_000,
        opp_table: Some(0),
        place: CpuPlace::default(),
        real_time: false,
    };
    let facts = MachineFacts {
        cpus: (0..cpus).map(cpu).collect(),
        opp_tables: vec![OppTable {
            opps: vec![opp(700_000), opp(2_800_000)],
            shared: true,
        }],
        standby: true,
        cpufreq: Some(CpufreqRegion {
            base: 0x0a00_0000,
            size: 0x1_0000,
            kind: RegionKind::Registers,
        }),
    };
    Machine::try_from(facts).expect("facts that hold")
}
