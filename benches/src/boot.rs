// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long a guest takes to boot: from the start of the VMM to the first line of the guest's first
//! process, which is the load program. Each repeat is a guest of its own.

use anyhow::{Context as _, Result};
use vcpufreq_load::work::pin_to;

use crate::args::BenchArgs;
use crate::freq_limits::FreqLimits;
use crate::guest::Guest;
use crate::machine::BenchMachine;
use crate::progress::Progress;
use crate::scenario::Scenario;
use crate::variant::Variant;

/// The time of each repeat, in µs.
pub fn times(
    (machine, args): (&BenchMachine, &BenchArgs),
    (scenario, variant): (&Scenario, Variant),
    progress: &mut Progress,
) -> Result<Vec<Option<u64>>> {
    let shape = variant.guest().context("the host is no guest")?;
    let clamp = ["--clamp", &args.clamp];
    // A VMM starts where this program may run, and its load program may have left that.
    pin_to(&machine.cpus())?;
    let _held = FreqLimits::frequencies(scenario, machine)?;
    let mut times = Vec::new();
    for repeat in 0..progress.repeats_of(scenario) {
        progress.begins(scenario, variant, repeat);
        let guest = Guest::boot(machine, (shape, &clamp), scenario.cmdline, &args.guest)?;
        let us = u64::try_from(guest.first_process_after.as_micros())?;
        guest.console.end()?;
        progress.measured();
        times.push(Some(us));
    }
    Ok(times)
}
