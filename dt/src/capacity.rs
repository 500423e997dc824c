// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `capacity-dmips-mhz`: the numbers from which Linux arrives at the
//! capacities that it shall have.
//!
//! The host's `cpu_capacity` already contains the CPU's maximum frequency, and the guest multiplies
//! its own in again. The tree therefore has performance per MHz, `capacity / khz_max`, as an
//! integer: 329 at 1.8 GHz beside 1024 at 2.8 GHz is 512 beside 1024. Its scale is the smallest
//! power of two from 1024 (the usual value of the best CPU) at which the guest's integer
//! arithmetic, modelled here, comes out right.

use crate::error::FactsError;
use crate::facts::CpuFacts;

/// The tree's values and the guest's results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scaled {
    /// `capacity-dmips-mhz` per CPU, from 1 on.
    pub dmips_mhz: Vec<u32>,
    /// The guest's `cpu_capacity` per CPU.
    pub guest: Vec<u16>,
}

const CAPACITY_SHIFT: u32 = 10;
/// The kernel shifts raw capacity × kHz left by 10 in 64 bits.
const PRODUCT_LIMIT: u64 = 1 << (u64::BITS - CAPACITY_SHIFT);

/// Scales that are tried for the CPU with the most performance per MHz.
const SCALE_BITS: std::ops::RangeInclusive<u32> = CAPACITY_SHIFT..=u32::BITS - 1;

/// Finds the numbers for these CPUs: at least one, each with a capacity of 1 to 1024 and a highest
/// frequency from 1 kHz.
///
/// The first scale wins at which every CPU is exact; if none is, the first of
/// those that come nearest, which must be within 1.
pub(crate) fn scale(cpus: &[CpuFacts]) -> Result<Scaled, FactsError> {
    let wanted = wanted(cpus);
    let mut best: Option<(u16, Scaled)> = None;
    for bits in SCALE_BITS {
        let Some(dmips_mhz) = dmips_at(cpus, bits) else {
            continue;
        };
        let guest = linux_cpu_capacity(&dmips_mhz, cpus);
        let off = worst(&wanted, &guest).1;
        if best.as_ref().is_none_or(|(least, _)| off < *least) {
            best = Some((off, Scaled { dmips_mhz, guest }));
        }
        if off == 0 {
            break;
        }
    }
    match best {
        Some((0..=1, scaled)) => Ok(scaled),
        Some((_, scaled)) => Err(out_of_reach(cpus, &wanted, &scaled.guest)),
        None => Err(out_of_reach(cpus, &wanted, &vec![0; cpus.len()])),
    }
}

/// The capacities that the guest should compute: Linux calls its own largest CPU 1024.
fn wanted(cpus: &[CpuFacts]) -> Vec<u16> {
    let largest = cpus.iter().map(|cpu| cpu.capacity).max().unwrap_or(1);
    cpus.iter()
        .map(|cpu| {
            let scaled = (u32::from(cpu.capacity) << CAPACITY_SHIFT) / u32::from(largest);
            u16::try_from(scaled).unwrap_or(u16::MAX)
        })
        .collect()
}

/// Performance per MHz of each CPU, where the best one has `1 << bits`.
///
/// The largest CPU is rounded down and the others up: the guest rounds down
/// once more, and a CPU a hair under its capacity would lose a whole unit.
/// `None` where one would be 0 or the guest's 64 bits would overflow.
fn dmips_at(cpus: &[CpuFacts], bits: u32) -> Option<Vec<u32>> {
    let largest = cpus.iter().map(|cpu| cpu.capacity).max()?;
    // The most performance per MHz, as a fraction: compared by cross product.
    let best = cpus
        .iter()
        .max_by_key(|cpu| (u128::from(cpu.capacity) << 64) / u128::from(cpu.khz_max))?;
    cpus.iter()
        .map(|cpu| {
            // At most 2^10 × 2^32 × 2^31, and 2^32 × 2^10 below.
            let over = (u128::from(cpu.capacity) * u128::from(best.khz_max)) << bits;
            let under = u128::from(cpu.khz_max) * u128::from(best.capacity);
            let raw = if cpu.capacity == largest {
                over / under
            } else {
                over.div_ceil(under)
            };
            let raw = u32::try_from(raw).ok().filter(|&raw| raw != 0)?;
            (u64::from(raw) * u64::from(cpu.khz_max) < PRODUCT_LIMIT).then_some(raw)
        })
        .collect()
}

/// `topology_normalize_cpu_scale()` of Linux' `drivers/base/arch_topology.c`
/// after every CPU has its cpufreq policy, whose highest frequency in kHz is
/// `capacity_freq_ref`. Kernels before 6.8 count that frequency in MHz.
fn linux_cpu_capacity(dmips_mhz: &[u32], cpus: &[CpuFacts]) -> Vec<u16> {
    let products: Vec<u64> = dmips_mhz
        .iter()
        .zip(cpus)
        .map(|(&raw, cpu)| u64::from(raw) * u64::from(cpu.khz_max))
        .collect();
    let largest = products.iter().copied().max().unwrap_or(1).max(1);
    products
        .iter()
        .map(|product| u16::try_from((product << CAPACITY_SHIFT) / largest).unwrap_or(u16::MAX))
        .collect()
}

/// The CPU whose capacity is furthest off, and by how much.
fn worst(wanted: &[u16], guest: &[u16]) -> (usize, u16) {
    wanted
        .iter()
        .zip(guest)
        .map(|(wanted, guest)| wanted.abs_diff(*guest))
        .enumerate()
        .max_by_key(|&(_, off)| off)
        .unwrap_or((0, 0))
}

fn out_of_reach(cpus: &[CpuFacts], wanted: &[u16], guest: &[u16]) -> FactsError {
    let (cpu, _) = worst(wanted, guest);
    FactsError::CapacityOutOfReach {
        cpu,
        wanted: wanted[cpu],
        khz_max: cpus[cpu].khz_max,
        nearest: guest[cpu],
    }
}
