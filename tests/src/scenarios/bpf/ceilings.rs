// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ceilings by the programs: in force at once, told to the worker once, held for as long as they are
//! written again, and ended by the worker. One that has to wait for a token is none, nor is any value in
//! another mode.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_device::{CEILING_SHIFT, ClampMode, SET_PERF_KHZ, Util};
use vcpufreq_host_bpf::{ApplyOutcome, BpfEvent, HostModule};
use vcpufreq_tests::LabVerdict;

use super::vcpu::{FLOOD, FROM_KHZ, ONE, STEP_KHZ, TinyVcpu, own_clamps, set_limit, stores};

/// For so many ms.
const CEILING: u32 = 5 << CEILING_SHIFT;
const FREE: u32 = 1024;

/// Whether all hold, and what was seen.
pub(super) fn row(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    let before = vcpu.how.clone();
    set_mode(vcpu, ClampMode::Ceilings)?;
    let util = vcpu.policy.util(FROM_KHZ);
    let ceiling = stores(1, FROM_KHZ | CEILING, 0);
    vcpu.vm.run(ceiling, |_, _| ())?;
    let (in_force, told) = (own_clamps()?, ceilings_told(vcpu)?);
    let first = vcpu.host.ceiling_until(0).context("no ceiling")?;
    vcpu.vm.run(ceiling, |_, _| ())?;
    let renewed = vcpu.host.ceiling_until(0).context("no ceiling")?;
    let (told_again, too_early) = (ceilings_told(vcpu)?, vcpu.host.lift_ceiling(0, first));
    let ended = vcpu.host.lift_ceiling(0, renewed);
    vcpu.host
        .apply_pending(0, |domain, clamp| module.apply(domain, clamp));
    let after = own_clamps()?;
    let (left, twice) = (
        vcpu.host.ceiling_until(0),
        vcpu.host.lift_ceiling(0, renewed),
    );
    let (waited_max, waited) = one_that_waits(vcpu, module)?;

    set_mode(vcpu, ClampMode::Floor)?;
    vcpu.vm.run(stores(1, u32::MAX, 0), |_, _| ())?;
    let (floor, top) = (own_clamps()?, vcpu.policy.util(vcpu.policy.max()));
    let latest = vcpu.host.latest(ONE).context("no vCPU")?.khz.0;

    vcpu.how = before;
    vcpu.host.set_policy(ONE, vcpu.how.clone())?;
    vcpu.vm.run(stores(1, FROM_KHZ, 0), |_, _| ())?;
    let figures = json!({
        "in_force": in_force, "told": [told, told_again], "renewed_by_ns": renewed - first,
        "too_early": too_early, "ended": ended, "after": after, "left": left, "twice": twice,
        "waited": waited, "in_mode_floor": floor, "latest_in_mode_floor": latest,
    });
    let told = (told, told_again);
    Ok(LabVerdict::with_figures(figures)
        .check_eq("a ceiling is in force", &in_force, (util, util))
        .check_eq("it is told once", &told, (1, 0))
        .check("it is renewed", renewed > first, (renewed, first))
        .check("it isn't lifted early", !too_early, ())
        .check("it ends", ended, ())
        .check_eq("then there is none", &after, (util, FREE))
        .check("nothing is left of it", left.is_none(), left)
        .check("it isn't lifted twice", !twice, ())
        .check(
            "one that waits has none",
            waited_max == Some(Util::MAX),
            &waited,
        )
        .check_eq("none in mode floor", &floor, (top, FREE))
        .check_eq("the latest in mode floor", &latest, SET_PERF_KHZ))
}

fn set_mode(vcpu: &mut TinyVcpu, mode: ClampMode) -> Result<()> {
    vcpu.how.clamp = mode;
    Ok(vcpu.host.set_policy(ONE, vcpu.how.clone())?)
}

/// The events of ceilings since the last call.
fn ceilings_told(vcpu: &TinyVcpu) -> Result<usize> {
    let worker = vcpu.host.worker()?;
    let events = worker.wait(Duration::from_millis(10))?;
    let ceilings = events.filter(|event| *event == BpfEvent::Ceiling(0));
    Ok(ceilings.count())
}

/// The maximum that the last of many ceilings gets when it has a token, and its outcome.
fn one_that_waits(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<(Option<Util>, String)> {
    // The first ones have a token, whatever was taken before.
    std::thread::sleep(Duration::from_secs(1));
    set_limit(vcpu, true)?;
    let flood = stores(FLOOD, FROM_KHZ | CEILING, STEP_KHZ);
    vcpu.vm.run(flood, |_, _| ())?;
    let worker = vcpu.host.worker()?;
    let mut events = worker.wait(Duration::from_millis(100))?;
    let waiting = events.find_map(|event| match event {
        BpfEvent::Waiting(request) => Some(request),
        _ => None,
    });
    let waiting = waiting.context("no request waits")?;
    let outcome = vcpu
        .host
        .apply_waiting(&waiting, |domain, clamp| module.apply(domain, clamp));
    set_limit(vcpu, false)?;
    let until = vcpu.host.ceiling_until(0);
    let until = until.context("no ceiling had a token")?;
    vcpu.host.lift_ceiling(0, until);
    let max = match &outcome {
        ApplyOutcome::InForce(clamp) => Some(clamp.max),
        _ => None,
    };
    Ok((max, format!("{outcome:?}")))
}
