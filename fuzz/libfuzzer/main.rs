// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A target with libFuzzer: `FUZZ_TARGET=NAME fuzz CORPUS`. `./run` builds and starts it.

#![no_main]

use std::sync::LazyLock;

use vcpufreq_fuzz::{FuzzTarget, TARGETS, operations};

static TARGET: LazyLock<FuzzTarget> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(one, _)| *one == name);
    *found.unwrap_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
        eprintln!(
            "no target '{name}'; set FUZZ_TARGET to one of {}",
            names.join(", ")
        );
        std::process::exit(2)
    })
});

/// After how many operations their number is printed.
const EACH: u64 = 100_000;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let before = operations();
    (TARGET.1)(data);
    let after = operations();
    if after / EACH > before / EACH {
        eprintln!("operations: {after}");
    }
});
