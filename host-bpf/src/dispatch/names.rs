// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The names of the shared programs and maps, in `bpf/dispatch.bpf.c`.

#![forbid(unsafe_code)]

/// The map by which a VMM finds the others.
pub(super) const SLOTS: &str = "dispatch_slots";
/// The others, in the order of their numbers in that one.
pub(super) const MAPS: [&str; 5] = [
    "dispatch_cpus",
    "threads",
    "on_switch",
    "on_frequency",
    "on_write",
];
/// Those of them that are a VM's programs by slot, in the order of [`PROGRAMS`].
pub(super) const BY_SLOT: std::ops::Range<usize> = 2..5;
pub(super) const PROGRAMS: [&str; 3] = ["dispatch_switch", "dispatch_frequency", "dispatch_write"];
