// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cpufreq governor, and whether the CPU's frequency follows it.

use vcpufreq_host::CpuList;

use super::{
    CPU, Sheet, Unit, UnitContext,
    frequency::highest,
    frequency_cap::{boost_off, policy_cap},
    policies::{can_be, policies, wanted},
};
use vcpufreq_host::undo::{Format, Unread};

use crate::finding::{Effect, Finding};

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
    let policies = policies(cx.look, &cx.rt);
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
        if self.text("auto_select").as_deref() == Ok("1") {
            return Effect::Not(format!(
                "firmware chooses the frequency of CPU {}, whatever the governor; echo 0 > {}/auto_select",
                self.own, self.dir
            ));
        }
        let driver = self.text("scaling_driver").unwrap_or_default();
        match (governor, BY_ITSELF.contains(&driver.as_str())) {
            ("performance", by_itself) => self.is_highest(by_itself),
            ("powersave", false) => self.runs_at_that_of("scaling_min_freq", |now, min| now > min),
            ("userspace", _) => self.runs_at_that_of("scaling_setspeed", |now, set| now != set),
            ("schedutil", _) => self.heeds_requests(),
            _ => Effect::Unseen(format!(
                "under {governor} CPU {}'s frequency follows the load, not the guest's requests: it may be too low; performance holds the highest, schedutil follows the guest",
                self.own
            )),
        }
    }

    /// Whether nothing keeps it from its highest frequency. That is the CPU's, or the profile's own
    /// limit; `scaling_max_freq` may be lower, for heat.
    fn is_highest(&self, by_itself: bool) -> Effect {
        let highest = highest(self.cx, self.dir);
        let cap = policy_cap(self.cx.look, self.dir, self.own);
        match (cap, &highest) {
            (Some(cap), Some((_, khz))) if cap.khz < *khz => Effect::Not(cap.to_string()),
            _ if by_itself => self.prefers_performance(),
            (_, Some((file, khz))) => self.runs_at((file, *khz), |now, max| now < max),
            (_, None) => self.unseen(),
        }
    }

    fn unseen(&self) -> Effect {
        Effect::Unseen(format!("{} doesn't show its frequency", self.dir))
    }

    /// As [`Self::runs_at`], beside the value of a file.
    fn runs_at_that_of(&self, file: &str, wrong: fn(u64, u64) -> bool) -> Effect {
        match self.khz(file) {
            Some(khz) => self.runs_at((file, khz), wrong),
            None => self.unseen(),
        }
    }

    fn khz(&self, name: &str) -> Option<u64> {
        self.text(name).ok()?.parse().ok()
    }

    /// Whether the frequency is right beside this file's value. A difference of 1 % is allowed: on
    /// x86 the frequency is measured.
    fn runs_at(&self, (file, khz): (&str, u64), wrong: fn(u64, u64) -> bool) -> Effect {
        match self.khz("scaling_cur_freq") {
            Some(now) if wrong(now, khz) && now.abs_diff(khz) > khz / 100 => {
                let boost = boost_off(self.cx.look, self.dir).filter(|_| now < khz);
                let boost = boost.map_or_else(String::new, |file| format!("; {file} is 0"));
                Effect::Not(format!(
                    "CPU {} runs at {now} of {khz} kHz ({file}){boost}",
                    self.own
                ))
            }
            Some(_) => Effect::Effective,
            None => self.unseen(),
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
