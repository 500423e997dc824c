// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a guest has to know of its CPUs' performance, as device tree nodes:
//! capacities, clusters, OPP tables with voltage and power, and the registers
//! of the virtual cpufreq device.
//!
//! The way through is [`MachineFacts`] (plain data from the host or the user,
//! not trusted) → [`Machine`] (checked; every rule that was broken is a
//! [`FactsError`] with the values in it) → nodes, either into a VMM's own tree
//! ([`write_cpus`], [`write_opp_tables`], [`write_cpufreq`]), or into the tree
//! that another VMM made ([`merge`]), or as a tree of their own ([`dtb`],
//! [`dts`]). All come from the same node model.
//!
//! Nothing here reads a file or asks the host: whoever has the facts brings
//! them. The rest of a guest's tree (memory, interrupt controller, timer,
//! `/psci`, which the CPUs' enable-method refers to) is the VMM's.
//!
//! ```
//! use vcpufreq_dt::{CpuFacts, CpufreqRegion, Machine, MachineFacts, Opp, OppTable};
//!
//! let opp = |khz, uv, uw| Opp { khz, uv: Some(uv), uw: Some(uw) };
//! let machine = Machine::try_from(MachineFacts {
//!     cpus: vec![
//!         CpuFacts { reg: 0, capacity: 329, khz_max: 1_800_000, opp_table: Some(0), cluster: 0, real_time: false },
//!         CpuFacts { reg: 1, capacity: 1024, khz_max: 2_800_000, opp_table: None, cluster: 1, real_time: true },
//!     ],
//!     opp_tables: vec![OppTable {
//!         opps: vec![opp(600_000, 600_000, 45_000), opp(1_800_000, 900_000, 305_000)],
//!         shared: true,
//!     }],
//!     standby: true,
//!     cpufreq: Some(CpufreqRegion { base: 0x0b00_0000, size: 0x1_0000, shared: false }),
//! })?;
//! assert_eq!(machine.guest_capacities(), [329, 1024]);
//! println!("{}", vcpufreq_dt::dts(&machine));
//! # Ok::<(), vcpufreq_dt::FactsError>(())
//! ```
//!
//! # Beside Linux' own drivers
//!
//! A cpufreq node needs nothing in the cpu nodes: the driver numbers the
//! register pages by logical CPU. `operating-points-v2` on the cpu nodes is
//! for the energy model (see [`OppTable`]) and has a side effect: where it is
//! on the boot CPU, Linux (`cpufreq-dt-platdev.c`) creates a `cpufreq-dt`
//! platform device too, whose driver, if the guest has it, finds no clock for
//! the CPU and gives up with a message. It changes nothing, but for that
//! moment it holds the one place for a cpufreq driver.

#![forbid(unsafe_code)]

mod capacity;
mod checks;
mod emit;
mod error;
mod facts;
mod machine;
mod merge;
mod node;
mod power;

pub use emit::{Nodes, dtb, dts, write_cpufreq, write_cpus, write_opp_tables};
pub use error::{FactsError, MAX_CPUS, MAX_OPP_UW, MAX_OPPS, REGION_ALIGN, REGION_STRIDE};
pub use facts::{CpuFacts, CpufreqRegion, MachineFacts, Opp, OppTable};
pub use machine::Machine;
pub use merge::{MAX_TREE, MergeError, Seeds, merge};
pub use vm_fdt;
