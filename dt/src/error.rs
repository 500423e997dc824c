// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The rules for facts: their limits, and which of them was broken.

use thiserror::Error;

/// The most CPUs that a machine can have.
pub const MAX_CPUS: usize = 512;
/// The most entries of a performance table (`PERFTBL_MAX_ENTRIES` in Linux'
/// `virtual-cpufreq.c`), so of an OPP table too.
pub const MAX_OPPS: usize = 64;
/// The largest power in µW that Linux' energy model takes (`EM_MAX_POWER`).
pub const MAX_OPP_UW: u32 = 64_000_000;
/// Bytes of registers for each CPU.
pub const REGION_STRIDE: u64 = 0x1000;
/// Alignment of the register region's base: the largest page size of an arm64 host, because memory
/// slots are in host pages.
pub const REGION_ALIGN: u64 = 0x1_0000;
/// The largest CPU's capacity.
pub(crate) const CAPACITY_SCALE: u16 = 1024;

/// The rule that facts broke, and the values that broke it.
///
/// CPUs, tables and OPPs are given by their index.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FactsError {
    /// A machine without a CPU.
    #[error("no CPUs: a machine has 1 to {MAX_CPUS}")]
    NoCpus,
    /// More than [`MAX_CPUS`].
    #[error("{cpus} CPUs: a machine has 1 to {MAX_CPUS}")]
    TooManyCpus {
        /// How many there are.
        cpus: usize,
    },
    /// More OPP tables than [`MAX_CPUS`] CPUs can use.
    #[error("{tables} OPP tables: a machine has at most {MAX_CPUS}")]
    TooManyTables {
        /// How many there are.
        tables: usize,
    },
    /// Bits outside MPIDR_EL1's affinity fields.
    #[error("CPU {cpu}: reg {reg:#x} has bits outside MPIDR_EL1's affinity fields (39:32, 23:0)")]
    RegNotAffinity {
        /// Index of the CPU.
        cpu: usize,
        /// Its value.
        reg: u64,
    },
    /// Two CPUs with the same affinity.
    #[error("CPUs {first} and {second} both have reg {reg:#x}")]
    DuplicateReg {
        /// Index of the first CPU with it.
        first: usize,
        /// Index of the next one.
        second: usize,
        /// The value of both.
        reg: u64,
    },
    /// A capacity of 0 or above 1024.
    #[error("CPU {cpu}: capacity {capacity} is outside 1 to {CAPACITY_SCALE}")]
    CapacityRange {
        /// Index of the CPU.
        cpu: usize,
        /// Its capacity.
        capacity: u16,
    },
    /// A CPU whose highest frequency is 0.
    #[error("CPU {cpu}: its highest frequency is 0 kHz")]
    ZeroMaxFrequency {
        /// Index of the CPU.
        cpu: usize,
    },
    /// A reference to an OPP table that isn't there.
    #[error("CPU {cpu}: OPP table {table} doesn't exist, there are {tables}")]
    NoSuchTable {
        /// Index of the CPU.
        cpu: usize,
        /// The table that it refers to.
        table: usize,
        /// How many tables there are.
        tables: usize,
    },
    /// The CPU's highest frequency is not that of its fastest OPP.
    #[error("CPU {cpu}: highest frequency {khz_max} kHz, but OPP table {table} ends at {khz} kHz")]
    MaxNotInTable {
        /// Index of the CPU.
        cpu: usize,
        /// Its highest frequency.
        khz_max: u32,
        /// Its table.
        table: usize,
        /// The fastest OPP there.
        khz: u32,
    },
    /// An OPP table without an OPP.
    #[error("OPP table {table} is empty: a table has 1 to {MAX_OPPS} OPPs")]
    EmptyTable {
        /// Index of the table.
        table: usize,
    },
    /// More than [`MAX_OPPS`].
    #[error("OPP table {table} has {opps} OPPs: a table has 1 to {MAX_OPPS}")]
    TableTooLong {
        /// Index of the table.
        table: usize,
        /// How many it has.
        opps: usize,
    },
    /// An OPP of 0 kHz.
    #[error("OPP table {table}, OPP {opp}: 0 kHz")]
    ZeroFrequency {
        /// Index of the table.
        table: usize,
        /// Index of the OPP.
        opp: usize,
    },
    /// Frequencies that don't rise.
    #[error("OPP table {table}, OPP {opp}: {khz} kHz after {previous} kHz, frequencies must rise")]
    NotRising {
        /// Index of the table.
        table: usize,
        /// Index of the OPP.
        opp: usize,
        /// Its frequency.
        khz: u32,
        /// The one before it.
        previous: u32,
    },
    /// A voltage or power for some OPPs of a table only.
    #[error("OPP table {table}: {with} of {opps} OPPs have a {what}, give it for all or for none")]
    Partial {
        /// Index of the table.
        table: usize,
        /// `voltage` or `power`.
        what: &'static str,
        /// OPPs that have it.
        with: usize,
        /// OPPs in the table.
        opps: usize,
    },
    /// A voltage of 0.
    #[error("OPP table {table}, OPP {opp}: 0 uV")]
    ZeroVoltage {
        /// Index of the table.
        table: usize,
        /// Index of the OPP.
        opp: usize,
    },
    /// A power of 0 or above [`MAX_OPP_UW`].
    #[error("OPP table {table}, OPP {opp}: {uw} uW is outside 1 to {MAX_OPP_UW}")]
    PowerRange {
        /// Index of the table.
        table: usize,
        /// Index of the OPP.
        opp: usize,
        /// Its power.
        uw: u32,
    },
    /// A register region that doesn't start at a multiple of 64 KiB, or in RAM of 2 MiB.
    #[error("cpufreq region: base {base:#x} isn't a multiple of {align:#x}")]
    RegionMisaligned {
        /// Where it starts.
        base: u64,
        /// What it has to be a multiple of.
        align: u64,
    },
    /// A register region with less than a page for each CPU.
    #[error("cpufreq region: {size:#x} bytes, but {cpus} CPUs need {needed:#x}")]
    RegionTooSmall {
        /// Its size.
        size: u64,
        /// The least that it has to be.
        needed: u64,
        /// How many CPUs there are.
        cpus: usize,
    },
    /// A register region that goes past the end of the address space.
    #[error("cpufreq region: {size:#x} bytes at {base:#x} go past 64 bits")]
    RegionWraps {
        /// Where it starts.
        base: u64,
        /// Its size.
        size: u64,
    },
    /// Capacities and frequencies so far apart that no 32-bit
    /// `capacity-dmips-mhz` gives the guest the capacity that it shall have.
    #[error(
        "CPU {cpu}: no capacity-dmips-mhz gives a guest capacity {wanted} at {khz_max} kHz beside \
         the other CPUs (nearest: {nearest})"
    )]
    CapacityOutOfReach {
        /// Index of the CPU that is furthest off.
        cpu: usize,
        /// The value that the guest should see.
        wanted: u16,
        /// The CPU's highest frequency.
        khz_max: u32,
        /// The value that it would see.
        nearest: u16,
    },
}
