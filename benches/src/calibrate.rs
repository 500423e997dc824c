// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Measures what makes a guest's cycles for each job those of the host.

use anyhow::{Context, Result};

use crate::args::BenchArgs;
use crate::cycles::{ALL_WORK, JobScale, JobScales, rescaled};
use crate::machine::BenchMachine;
use crate::scenario::Scenario;
use crate::session::Session;
use crate::trace::RepeatTrace;
use crate::variant::Variant;

/// What calibration takes: machine, trace and options.
type Calibration<'a> = (&'a BenchMachine, &'a RepeatTrace, &'a BenchArgs);
/// A scenario whose job can't be measured, and why.
pub type NotScaled = (&'static Scenario, String);

/// The scales of these scenarios' jobs, and the scenarios without one. If no guest is measured, both are
/// empty.
/// Each job is done once on the host and twice in a guest without the bridge: the second time shows
/// how far the first scale is off, for what a guest pays for a wake-up does not shrink with the work.
pub fn scales(
    calibration: Calibration,
    scenarios: &[&'static Scenario],
) -> (JobScales, Vec<NotScaled>) {
    let (mut scales, mut without) = (JobScales::default(), Vec::new());
    let equal = scenarios.iter().filter(|one| one.equal_cycles);
    let equal: Vec<&'static Scenario> = equal.copied().collect();
    if equal.is_empty() || calibration.2.guests().is_none() {
        return (scales, without);
    }
    eprintln!(
        "vcpufreq: cycles of {} jobs at the highest frequency",
        equal.len()
    );
    let mut sides = [None, None];
    for scenario in equal {
        match of_job(calibration, &mut sides, scenario) {
            Ok(scale) => scales.insert(scenario.title(), scale),
            Err(error) => {
                without.push((scenario, format!("{error:#}")));
                // What failed may have left them unusable.
                sides = [None, None];
            }
        }
    }
    for (session, side) in sides.into_iter().flatten().zip(["host", "guest"]) {
        if let Err(error) = session.end() {
            eprintln!("vcpufreq: the {side} of the calibration did not end well: {error:#}");
        }
    }
    (scales, without)
}

fn of_job<'a>(
    (machine, trace, args): Calibration<'a>,
    [host, guest]: &mut [Option<Session<'a>>; 2],
    scenario: &'static Scenario,
) -> Result<JobScale> {
    let start = |variant| Session::start(machine, variant, ("", false), args);
    let no_time = || format!("{} took no time", scenario.title());
    if host.is_none() {
        (*host, *guest) = (Some(start(Variant::Host)?), Some(start(Variant::Vm)?));
    }
    let (host, guest) = host.as_mut().zip(guest.as_mut()).context("no sessions")?;
    let host_us = host.job_us(scenario, trace)?;
    guest.scale(ALL_WORK);
    let all = guest.job_us(scenario, trace)?;
    let first = rescaled(ALL_WORK, host_us, all).with_context(no_time)?;
    guest.scale(first);
    let scaled = guest.job_us(scenario, trace)?;
    Ok(JobScale {
        per_10_000: rescaled(first, host_us, scaled).with_context(no_time)?,
        first_try: rescaled(1000, scaled, host_us).with_context(no_time)?,
    })
}
