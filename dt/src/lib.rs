// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Describes a guest's CPU performance in device tree nodes: capacities, clusters, OPP tables with
//! voltage and power, and the registers of the virtual cpufreq device.
//!
//! [`MachineFacts`] is plain, untrusted data from the host or the user. [`Machine`] is the checked
//! form: each broken rule is a [`FactsError`] with its values. A machine's nodes go into a VMM's
//! own tree ([`write_cpus`], [`write_opp_tables`], [`write_cpufreq`]), into the tree of another VMM
//! ([`merge()`]), or into a tree of their own ([`dtb`], [`dts`]). All come from the same node model.
//!
//! This crate reads no file and makes no host call: the caller brings the facts. The VMM writes the
//! rest of a guest's tree (memory, interrupt controller, timer, and `/psci`, which the CPUs'
//! enable-method refers to).
//!
//! ```
//! use vcpufreq_dt::{CpuFacts, CpuPlace, CpufreqRegion, Machine, MachineFacts, Opp, OppTable, RegionKind};
//!
//! let opp = |khz, uv, uw| Opp { khz, uv: Some(uv), uw: Some(uw) };
//! let machine = Machine::try_from(MachineFacts {
//!     cpus: vec![
//!         CpuFacts { reg: 0, capacity: 329, khz_max: 1_800_000, opp_table: Some(0), place: CpuPlace::default(), real_time: false },
//!         CpuFacts { reg: 1, capacity: 1024, khz_max: 2_800_000, opp_table: None, place: CpuPlace { cluster: 1, ..CpuPlace::default() }, real_time: true },
//!     ],
//!     opp_tables: vec![OppTable {
//!         opps: vec![opp(600_000, 600_000, 45_000), opp(1_800_000, 900_000, 305_000)],
//!         shared: true,
//!     }],
//!     standby: true,
//!     cpufreq: Some(CpufreqRegion { base: 0x0b00_0000, size: 0x1_0000, kind: RegionKind::Registers }),
//! })?;
//! assert_eq!(machine.guest_capacities(), [329, 1024]);
//! println!("{}", vcpufreq_dt::dts(&machine));
//! # Ok::<(), vcpufreq_dt::FactsError>(())
//! ```
//!
//! # Beside Linux' own drivers
//!
//! A cpufreq node needs nothing in the cpu nodes: the driver numbers the register pages by logical
//! CPU. `operating-points-v2` on the cpu nodes is for the energy model (see [`OppTable`]). It has a
//! side effect on the boot CPU: Linux (`cpufreq-dt-platdev.c`) also creates a `cpufreq-dt` platform
//! device. Its driver, if the guest has it, finds no clock for the CPU and gives up with a message.
//! Until then it occupies the one place for a cpufreq driver.

#![forbid(unsafe_code)]
#![deny(clippy::missing_errors_doc)]

mod base;
mod capacity;
mod checks;
mod cpu_map;
mod cpus;
mod emit;
mod error;
mod facts;
mod flat;
mod machine;
mod memory;
mod merge;
mod merge_error;
mod node;
mod phandles;
mod power;

pub use base::{MAX_TREE, TreeError};
pub use emit::{Nodes, dtb, dts, overlay, write_cpufreq, write_cpus, write_opp_tables};
pub use error::{FactsError, MAX_CPUS, MAX_OPP_UW, MAX_OPPS, REGION_ALIGN, REGION_STRIDE};
pub use facts::{
    CpuFacts, CpuPlace, CpufreqRegion, MachineFacts, Opp, OppTable, RESERVED, RegionKind,
};
pub use machine::Machine;
pub use memory::{initrd, memory, registers_in_ram};
pub use merge::{MergeNote, MergedTree, Seeds, merge};
pub use merge_error::MergeError;
pub use vm_fdt;

/// Its example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
