// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cpufreq governor, and whether the CPU's frequency follows it.

use vcpufreq_device::host::CpuList;

use super::{
    CPU, Sheet, Unit, UnitContext,
    policies::{can_be, policies, wanted},
};
use crate::{finding::Effect, finding::Finding, host::Unread, value::Format};

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "governor",
    reason: "it sets the frequency of a real-time CPU: performance holds the highest, schedutil follows the guest's requests",
    plan,
    effect,
}];

/// Drivers that choose by themselves, or let the hardware: what they call a governor is one of two
/// ways of theirs to do so (Documentation/admin-guide/pm/intel_pstate.rst, amd-pstate.rst).
const BY_ITSELF: [&str; 2] = ["intel_pstate", "amd-pstate-epp"];

/// There with uclamp.
const CLAMP: &str = "/proc/sys/kernel/sched_util_clamp_min";

fn plan(cx: &UnitContext, sheet: &mut Sheet) {
    let Some(want) = &cx.settings().governor else {
        return;
    };
    for (dir, _) in wanted(cx, sheet) {
        if !can_be(cx, &dir, want) {
            sheet.finding(Finding::Hand(format!(
                "{dir}: governor {want} is not there; load the module cpufreq_{want}"
            )));
            continue;
        }
        let now = cx.look.read(&format!("{dir}/scaling_governor"));
        if let Some(now) = now.ok().filter(|now| now != want) {
            keep_tunables(cx, sheet, &dir, &now);
        }
        sheet.file(format!("{dir}/scaling_governor"), Format::Text, want);
    }
}

/// A governor's tunables go with its last policy, and the speed that was set with `userspace`.
fn keep_tunables(cx: &UnitContext, sheet: &mut Sheet, dir: &str, governor: &str) {
    for folder in [
        format!("{dir}/{governor}"),
        format!("{CPU}/cpufreq/{governor}"),
    ] {
        for name in cx.look.list(&folder).unwrap_or_default() {
            let path = format!("{folder}/{name}");
            if cx.look.writable(&path) && !sheet.has(&path) {
                sheet.keep(path);
            }
        }
    }
    if governor == "userspace" {
        sheet.keep(format!("{dir}/scaling_setspeed"));
    }
}

/// On the policies that have it; others are a finding.
fn effect(cx: &UnitContext) -> Effect {
    let Some(want) = &cx.settings().governor else {
        return Effect::Effective;
    };
    let has = |dir: &str| cx.look.read(&format!("{dir}/scaling_governor")).as_ref() == Ok(want);
    let policies = policies(cx, &cx.rt);
    let mut effects = policies
        .iter()
        .filter(|(dir, _)| has(dir))
        .map(|(dir, own)| GovernorPolicy { cx, dir, own }.effect(want));
    let not = effects.find(|effect| *effect != Effect::Effective);
    not.unwrap_or(Effect::Effective)
}

struct GovernorPolicy<'a> {
    cx: &'a UnitContext<'a>,
    dir: &'a str,
    own: &'a CpuList,
}

impl GovernorPolicy<'_> {
    fn text(&self, name: &str) -> Result<String, Unread> {
        self.cx.look.read(&format!("{}/{name}", self.dir))
    }

    fn effect(&self, governor: &str) -> Effect {
        let driver = self.text("scaling_driver").unwrap_or_default();
        match (governor, BY_ITSELF.contains(&driver.as_str())) {
            ("performance", true) => self.prefers_performance(),
            ("performance", false) => self.runs_at("scaling_max_freq", |now, max| now < max),
            ("powersave", false) => self.runs_at("scaling_min_freq", |now, min| now > min),
            ("userspace", _) => self.runs_at("scaling_setspeed", |now, set| now != set),
            ("schedutil", _) => self.heeds_requests(),
            _ => Effect::Unseen(format!(
                "under {governor} CPU {}'s frequency follows the load, not the guest's requests: it may be too low; performance holds the highest, schedutil follows the guest",
                self.own
            )),
        }
    }

    /// Whether the frequency is right beside this file's value. A difference of 1 % is allowed: on
    /// x86 the frequency is measured.
    fn runs_at(&self, file: &str, wrong: fn(u64, u64) -> bool) -> Effect {
        let khz = |name: &str| self.text(name).ok()?.parse::<u64>().ok();
        match (khz("scaling_cur_freq"), khz(file)) {
            (Some(now), Some(khz)) if wrong(now, khz) && now.abs_diff(khz) > khz / 100 => {
                Effect::Not(format!(
                    "CPU {} runs at {now} of {khz} kHz ({file})",
                    self.own
                ))
            }
            (Some(_), Some(_)) => Effect::Effective,
            _ => Effect::Unseen(format!("{} doesn't show its frequency", self.dir)),
        }
    }

    /// The frequency that such a driver shows is measured, and of a sleeping CPU an old one: the
    /// hardware's preference counts. Without one the driver itself asks for the highest.
    fn prefers_performance(&self) -> Effect {
        const FILE: &str = "energy_performance_preference";
        match self.text(FILE).as_deref() {
            Ok("performance" | "0") | Err(Unread::Missing) => Effect::Effective,
            Ok(other) => Effect::Not(format!(
                "{}/{FILE} is '{other}': the hardware saves energy",
                self.dir
            )),
            Err(_) => Effect::Unseen(format!("{}/{FILE} can't be read", self.dir)),
        }
    }

    /// Without uclamp no request reaches it, and it gives real-time threads the maximum.
    fn heeds_requests(&self) -> Effect {
        match self.cx.look.read(CLAMP) {
            Err(Unread::Missing) => Effect::Not(
                "this kernel has no uclamp (CONFIG_UCLAMP_TASK): schedutil runs real-time vCPUs at the maximum, whatever the guest requests".to_owned(),
            ),
            _ => Effect::Effective,
        }
    }
}
