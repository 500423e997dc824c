// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long an access blocks a vCPU, on this machine's KVM, by each path that x86-64 has. A few
//! instructions of 16-bit code: a loop, and the same loop with a load, with a read of cur_perf, and
//! with a write of set_perf.
//!
//! The host's side is a directory that stands for sysfs, and nothing is
//! clamped: what is measured is KVM, and the library's way from there. Prints
//! a line of JSON for each benchmark with its exits; `make bench-paths` joins
//! them with criterion's figures.

use criterion::Criterion;

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
use x86_64::paths;

#[cfg(not(target_arch = "x86_64"))]
fn paths(_: &mut Criterion) {
    println!("SKIP: the guest's code is for x86-64; see `lab run paths`");
}

/// As criterion's macros have it, which make a function without documentation.
fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    paths(&mut criterion);
    criterion.final_summary();
}
