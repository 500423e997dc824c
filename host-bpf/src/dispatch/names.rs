// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The names of the shared programs and maps, in `bpf/dispatch.bpf.c`.

#![forbid(unsafe_code)]

/// The program by which a VMM finds a set: it uses the next map alone.
pub(super) const SET: &str = "dispatch_set";
/// The map that has the numbers of the others.
pub(super) const SLOTS: &str = "dispatch_slots";
/// The others, in the order of their numbers in that one.
pub(super) const MAPS: [&str; 6] = [
    "dispatch_cpus",
    "dispatch_vcpus",
    "threads",
    "on_switch",
    "on_frequency",
    "on_write",
];
/// Those of them with an entry for each pCPU.
pub(super) const BY_PCPU: std::ops::Range<usize> = 0..2;
/// Those of them that are a VM's programs by slot, in the order of [`PROGRAMS`].
pub(super) const BY_SLOT: std::ops::Range<usize> = 3..6;
pub(super) const PROGRAMS: [&str; 3] = ["dispatch_switch", "dispatch_frequency", "dispatch_write"];
