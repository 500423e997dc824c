// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks facts before nodes are made from them.

use std::collections::HashMap;

use crate::error::{
    CAPACITY_SCALE, FactsError, MAX_CPUS, MAX_OPP_UW, MAX_OPPS, REGION_ALIGN, REGION_STRIDE,
};
use crate::facts::{CpuFacts, CpufreqRegion, MachineFacts, Opp, OppTable, RESERVED, RegionKind};

/// The affinity fields of MPIDR_EL1, Aff3 and Aff2 to Aff0.
pub(crate) const MPIDR_AFFINITY: u64 = 0xff_00ff_ffff;

/// Checks everything but the reach of `capacity-dmips-mhz`.
pub(crate) fn check(facts: &MachineFacts) -> Result<(), FactsError> {
    match facts.cpus.len() {
        0 => return Err(FactsError::NoCpus),
        cpus if cpus > MAX_CPUS => return Err(FactsError::TooManyCpus { cpus }),
        _ => {}
    }
    let tables = facts.opp_tables.len();
    if tables > MAX_CPUS {
        return Err(FactsError::TooManyTables { tables });
    }
    for (index, table) in facts.opp_tables.iter().enumerate() {
        check_table(index, table)?;
    }
    for (index, cpu) in facts.cpus.iter().enumerate() {
        check_cpu(index, cpu, &facts.opp_tables)?;
    }
    check_regs(&facts.cpus)?;
    match facts.cpufreq {
        Some(region) => check_region(region, facts.cpus.len()),
        None => Ok(()),
    }
}

fn check_cpu(index: usize, cpu: &CpuFacts, tables: &[OppTable]) -> Result<(), FactsError> {
    if cpu.reg & !MPIDR_AFFINITY != 0 {
        return Err(FactsError::RegNotAffinity {
            cpu: index,
            reg: cpu.reg,
        });
    }
    if !(1..=CAPACITY_SCALE).contains(&cpu.capacity) {
        return Err(FactsError::CapacityRange {
            cpu: index,
            capacity: cpu.capacity,
        });
    }
    if cpu.khz_max == 0 {
        return Err(FactsError::ZeroMaxFrequency { cpu: index });
    }
    match cpu.opp_table {
        Some(table) => check_max(index, cpu.khz_max, (table, tables)),
        None => Ok(()),
    }
}

fn check_max(
    cpu: usize,
    khz_max: u32,
    (table, tables): (usize, &[OppTable]),
) -> Result<(), FactsError> {
    let Some(last) = tables.get(table).and_then(|t| t.opps.last()) else {
        return Err(FactsError::NoSuchTable {
            cpu,
            table,
            tables: tables.len(),
        });
    };
    if last.khz != khz_max {
        return Err(FactsError::MaxNotInTable {
            cpu,
            khz_max,
            table,
            khz: last.khz,
        });
    }
    Ok(())
}

fn check_regs(cpus: &[CpuFacts]) -> Result<(), FactsError> {
    let mut seen = HashMap::new();
    for (second, cpu) in cpus.iter().enumerate() {
        if let Some(first) = seen.insert(cpu.reg, second) {
            return Err(FactsError::DuplicateReg {
                first,
                second,
                reg: cpu.reg,
            });
        }
    }
    Ok(())
}

fn check_table(index: usize, table: &OppTable) -> Result<(), FactsError> {
    match table.opps.len() {
        0 => return Err(FactsError::EmptyTable { table: index }),
        opps if opps > MAX_OPPS => return Err(FactsError::TableTooLong { table: index, opps }),
        _ => {}
    }
    let mut previous = 0;
    for (opp, &Opp { khz, uv, uw }) in table.opps.iter().enumerate() {
        if khz == 0 {
            return Err(FactsError::ZeroFrequency { table: index, opp });
        }
        if khz <= previous {
            return Err(FactsError::NotRising {
                table: index,
                opp,
                khz,
                previous,
            });
        }
        previous = khz;
        check_opp_power((index, opp), uv, uw)?;
    }
    check_complete(index, "voltage", table.opps.iter().map(|o| o.uv))?;
    check_complete(index, "power", table.opps.iter().map(|o| o.uw))
}

fn check_opp_power(
    (table, opp): (usize, usize),
    uv: Option<u32>,
    uw: Option<u32>,
) -> Result<(), FactsError> {
    if uv == Some(0) {
        return Err(FactsError::ZeroVoltage { table, opp });
    }
    match uw {
        Some(uw) if !(1..=MAX_OPP_UW).contains(&uw) => {
            Err(FactsError::PowerRange { table, opp, uw })
        }
        _ => Ok(()),
    }
}

/// Linux takes a missing value for 0 and then refuses the whole energy model,
/// with nothing but a debug message: so all or none.
fn check_complete(
    table: usize,
    what: &'static str,
    values: impl ExactSizeIterator<Item = Option<u32>>,
) -> Result<(), FactsError> {
    let opps = values.len();
    let with = values.flatten().count();
    if with != 0 && with != opps {
        return Err(FactsError::Partial {
            table,
            what,
            with,
            opps,
        });
    }
    Ok(())
}

fn check_region(region: CpufreqRegion, cpus: usize) -> Result<(), FactsError> {
    let CpufreqRegion { base, size, kind } = region;
    let align = match kind {
        RegionKind::GuestRam => RESERVED,
        _ => REGION_ALIGN,
    };
    if base % align != 0 {
        return Err(FactsError::RegionMisaligned { base, align });
    }
    let shared = kind == RegionKind::SharedMemory;
    // At most MAX_CPUS were counted before, so this is at most 2 MiB and a header.
    let needed = (cpus as u64 + u64::from(shared)) * REGION_STRIDE;
    if size < needed {
        return Err(FactsError::RegionTooSmall { size, needed, cpus });
    }
    let behind = if shared { REGION_STRIDE } else { 0 };
    let all = size.checked_add(behind);
    if all.and_then(|all| base.checked_add(all - 1)).is_none() {
        return Err(FactsError::RegionWraps { base, size });
    }
    Ok(())
}
