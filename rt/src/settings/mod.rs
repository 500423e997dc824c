// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings. Each is a unit with a name, a reason, its changes on this host, and a check that
//! they are effective on its CPUs.

mod boot;
mod context;
mod cpuset;
mod frequency;
mod frequency_cap;
mod governor;
mod hardware;
mod idle;
mod interrupts;
mod irqbalance;
mod memory;
mod policies;
mod rcu;
mod sched;
mod sheet;
mod threads;
mod unit;
mod watchdogs;
mod workqueues;

pub(crate) use context::{CPU, UnitContext};
pub(crate) use cpuset::{occupied, partition_group};
pub use frequency_cap::{FrequencyCap, frequency_caps};
pub(crate) use sheet::Sheet;
pub(crate) use unit::{Unit, by_value};

const UNITS: &[&[Unit]] = &[
    sched::UNITS,
    rcu::UNITS,
    memory::UNITS,
    watchdogs::UNITS,
    workqueues::UNITS,
    interrupts::UNITS,
    governor::UNITS,
    frequency::UNITS,
    idle::UNITS,
    threads::UNITS,
    cpuset::UNITS,
];

/// All units, in the order in which they are made.
pub(crate) fn units() -> impl Iterator<Item = &'static Unit> {
    UNITS.iter().flat_map(|units| units.iter())
}

/// The findings about the host that only a reboot or people can change, and the words that its
/// command line lacks.
pub(crate) fn by_boot(cx: &UnitContext, sheet: &mut Sheet) -> Option<String> {
    sheet.setting = "host";
    hardware::look(cx, sheet);
    sheet.setting = "cmdline";
    boot::missing(cx, sheet)
}
