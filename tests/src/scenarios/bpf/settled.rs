// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The outcome of a request that the worker puts into force: when the guest changes its request all
//! the time, when the host fails, when writes were missed, and when the guest restarts meanwhile.

use anyhow::{Result, anyhow};
use serde_json::json;
use vcpufreq_device::{Clamp, Khz};
use vcpufreq_host_bpf::{ApplyOutcome, HostModule};
use vcpufreq_tests::LabVerdict;

use super::vcpu::{
    FLOOD, FROM_KHZ, ONE, STEP_KHZ, TinyVcpu, by_other, others_counters, own_clamp, set_limit,
    stores, the_one_that_waits,
};
use crate::harness::trace::now_us;

/// All cases by name.
pub(super) fn rows(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    Ok(LabVerdict::default()
        .part("changing", changing(vcpu, module)?)
        .part("failed", failed(vcpu, module)?)
        .part("assumed", assumed(vcpu, module)?)
        .part("reset", reset(vcpu, module)?))
}

/// Put into force by the module.
fn by(module: &HostModule) -> impl Fn(u32, Clamp) -> Result<()> {
    |domain, clamp| Ok(module.apply(domain, clamp)?)
}

fn min(settled: &ApplyOutcome<anyhow::Error>) -> Option<u32> {
    match settled {
        ApplyOutcome::InForce(clamp) | ApplyOutcome::Changing(clamp) => {
            Some(clamp.min.get().into())
        }
        ApplyOutcome::Failed(..) | ApplyOutcome::Nothing => None,
    }
}

/// Another vCPU of the domain asks before each clamp is there: the worker goes on to others after
/// a few, and ends at the last one when it comes back.
fn changing(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    set_limit(vcpu, true)?;
    vcpu.vm.run(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let waiting = the_one_that_waits(vcpu)?;
    let (host, vm) = (&vcpu.host, &mut vcpu.vm);
    let mut asked = FROM_KHZ;
    let first = host.apply_waiting(&waiting, |domain, clamp| {
        asked += STEP_KHZ;
        vm.run(by_other(asked), |_, _| ())?;
        by(module)(domain, clamp)
    });
    let clamps = (asked - FROM_KHZ) / STEP_KHZ;
    let second = host.apply_pending(0, by(module));
    let clamp = own_clamp()?;
    set_limit(vcpu, false)?;
    let wanted = vcpu.policy.util(asked);
    let goes_on = matches!(first, ApplyOutcome::Changing(_));
    let ended = matches!(second, ApplyOutcome::InForce(_));
    let outcomes = [&first, &second].map(|one| format!("{one:?}"));
    let figures = json!({
        "clamps_at_once": clamps, "first": outcomes[0], "second": outcomes[1], "clamp": clamp,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("it goes on to others", goes_on, &outcomes[0])
        .check_eq("after a few", &clamps, 4)
        .check("it ends", ended, &outcomes[1])
        .check(
            "at the last one",
            min(&second) == Some(wanted),
            &outcomes[1],
        )
        .check_eq("which is in force", &clamp, wanted))
}

/// A failed request doesn't count as in force. The worker tries it again, as does a repeated write,
/// and a newer request of the domain isn't lost with it.
fn failed(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    set_limit(vcpu, true)?;
    vcpu.vm.run(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let waiting = the_one_that_waits(vcpu)?;
    let refused = vcpu
        .host
        .apply_waiting(&waiting, |_, _| Err(anyhow!("refused")));
    let unknown = vcpu.host.wanted(0).is_none();
    let settled = vcpu.host.apply_pending(0, by(module));
    let last = FROM_KHZ + STEP_KHZ * (u32::try_from(FLOOD)? - 1);
    let clamp = own_clamp()?;
    // Asked for again, what is in force is unchanged, and what failed isn't.
    let again = |vcpu: &mut TinyVcpu| {
        let before = others_counters(&vcpu.host)?;
        vcpu.vm.run(by_other(last), |_, _| ())?;
        let after = others_counters(&vcpu.host)?;
        anyhow::Ok((
            after.in_kernel - before.in_kernel,
            after.unchanged - before.unchanged,
        ))
    };
    let in_force = again(vcpu)?;
    // The module sees that nothing is in force, whatever it was asked for last.
    vcpu.host.apply_pending(0, |domain, _| {
        module.apply(domain, Clamp::NONE)?;
        Err(anyhow!("refused"))
    });
    let after_failure = again(vcpu)?;
    let last = vcpu.policy.util(last);
    // The newer request has an outcome of its own, and the failure doesn't undo it.
    vcpu.vm.run(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let waiting = the_one_that_waits(vcpu)?;
    let newer = FROM_KHZ + STEP_KHZ;
    let (host, vm) = (&vcpu.host, &mut vcpu.vm);
    let before = others_counters(host)?.in_kernel;
    let overtaken = host.apply_waiting(&waiting, |_, _| {
        vm.run(by_other(newer), |_, _| ())?;
        Err(anyhow!("refused"))
    });
    let by_kernel = others_counters(host)?.in_kernel - before;
    let newer_clamp = own_clamp()?;
    let newer_wanted = host.wanted(0).map(|clamp| u32::from(clamp.min.get()));
    set_limit(vcpu, false)?;
    let wanted = vcpu.policy.util(newer);
    let [refused, overtaken] =
        [refused, overtaken].map(|one| matches!(one, ApplyOutcome::Failed(..)));
    let (then, again) = (min(&settled), (in_force, after_failure));
    let newer = (by_kernel, newer_clamp, newer_wanted);
    let figures = json!({
        "unknown_after_failure": unknown, "then": format!("{settled:?}"),
        "clamp": clamp, "again_in_force": in_force, "again_after_failure": after_failure,
        "newer_by_kernel": by_kernel, "newer_clamp": newer_clamp,
        "newer_wanted": newer_wanted,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("a failure is told", refused, ())
        .check("nothing is known after it", unknown, ())
        .check_eq(
            "then the last one is in force",
            &(then, clamp),
            (Some(last), last),
        )
        .check_eq("asked for again", &again, ((0, 1), (1, 0)))
        .check("one that is overtaken fails", overtaken, ())
        .check_eq("the newer one stays", &newer, (1, wanted, Some(wanted))))
}

/// In a guest's place, for writes that no program saw: not where the guest has written since, and
/// not over what it writes later.
fn assumed(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    let asked = FROM_KHZ + STEP_KHZ;
    vcpu.vm.run(stores(1, asked, 0), |_, _| ())?;
    let seen = vcpu.host.seen(ONE);
    let max = Khz(vcpu.policy.max());
    vcpu.host.assume(ONE, max, seen - 1, now_ns());
    let settled = vcpu.host.apply_pending(0, by(module));
    let stale = (min(&settled), own_clamp()?);
    // What waits for a token is older than what is assumed.
    set_limit(vcpu, true)?;
    vcpu.vm.run(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let waiting = the_one_that_waits(vcpu)?;
    vcpu.host.assume(ONE, max, vcpu.host.seen(ONE), now_ns());
    let settled = vcpu.host.apply_waiting(&waiting, by(module));
    let in_place = (min(&settled), own_clamp()?);
    set_limit(vcpu, false)?;
    vcpu.vm.run(stores(1, asked, 0), |_, _| ())?;
    // The worker's own look at what was asked for last, not the program's.
    vcpu.host.forget(0);
    let settled = vcpu.host.apply_pending(0, by(module));
    let later = (min(&settled), own_clamp()?);
    let [asked, max] = [asked, max.0].map(|khz| vcpu.policy.util(khz));
    let figures = json!({
        "written_since": stale, "assumed": in_place, "written_later": later,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("what is written since counts", &stale, (Some(asked), asked))
        .check_eq("else what is assumed", &in_place, (Some(max), max))
        .check_eq("and what is written later", &later, (Some(asked), asked)))
}

/// A guest that starts anew has no part in what the old one was waiting for.
fn reset(vcpu: &mut TinyVcpu, module: &HostModule) -> Result<LabVerdict> {
    set_limit(vcpu, true)?;
    vcpu.vm.run(stores(FLOOD, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    let waiting = the_one_that_waits(vcpu)?;
    vcpu.host.reset()?;
    let settled = vcpu.host.apply_pending(0, by(module));
    let anew = own_clamp()?;
    let served = vcpu.host.apply_waiting(&waiting, by(module));
    let later = own_clamp()?;
    let asked = vcpu.host.asked(0);
    set_limit(vcpu, false)?;
    let none = u32::from(Clamp::NONE.min.get());
    let (first, clamps) = (min(&settled), [anew, later]);
    let asked = asked.map(|khz| khz.0);
    let figures = json!({
        "settled": format!("{settled:?}"), "clamp": anew,
        "served": format!("{served:?}"), "clamp_later": later, "asked": asked,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no clamp after a reset", &first, Some(none))
        .check_eq("nor later", &clamps, [none; 2])
        .check("nothing is asked for", asked.is_none(), asked))
}

/// Rounded up to the next us, so later than every request so far.
fn now_ns() -> u64 {
    (now_us() + 1) * 1_000
}
