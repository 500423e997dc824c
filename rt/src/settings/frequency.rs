// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frequencies: limits, utilization clamps, schedutil's rate limit.

use super::{
    CPU, Sheet, Unit, UnitContext, by_value,
    policies::{can_be, none, policies, wanted},
};
use vcpufreq_host::undo::Format;

use crate::{
    finding::Finding,
    policy_frequencies::{Frequency, PolicyFrequencies},
};

pub(super) const UNITS: &[Unit] = &[
    Unit {
        name: "min-freq",
        reason: "the frequency never falls below this",
        plan: |cx, sheet| {
            limit(
                cx,
                sheet,
                "scaling_min_freq",
                cx.settings().min_freq.as_ref(),
            )
        },
        effect: by_value,
    },
    Unit {
        name: "max-freq",
        reason: "the frequency never rises above this",
        plan: |cx, sheet| {
            limit(
                cx,
                sheet,
                "scaling_max_freq",
                cx.settings().max_freq.as_ref(),
            )
        },
        effect: by_value,
    },
    Unit {
        name: "schedutil-rate-limit-us",
        reason: "how soon after a change schedutil makes the next",
        plan: rate_limit,
        effect: by_value,
    },
    Unit {
        name: "util-clamp-min",
        reason: "the highest uclamp.min that has effect",
        plan: |cx, sheet| sheet.sysctl("kernel/sched_util_clamp_min", cx.settings().util_clamp_min),
        effect: by_value,
    },
    Unit {
        name: "util-clamp-max",
        reason: "the highest uclamp.max that has effect",
        plan: |cx, sheet| sheet.sysctl("kernel/sched_util_clamp_max", cx.settings().util_clamp_max),
        effect: by_value,
    },
    Unit {
        name: "util-clamp-min-rt-default",
        reason: "real-time threads without a clamp of their own request this; 1024 is the maximum, whatever the guest requests",
        plan: |cx, sheet| {
            sheet.sysctl(
                "kernel/sched_util_clamp_min_rt_default",
                cx.settings().util_clamp_min_rt_default,
            )
        },
        effect: by_value,
    },
];

fn limit(cx: &UnitContext, sheet: &mut Sheet, file: &str, want: Option<&PolicyFrequencies>) {
    let Some(want) = want else { return };
    for (dir, want) in limited(cx, sheet, want) {
        match khz_of(cx, &dir, want) {
            Some(khz) => sheet.file(format!("{dir}/{file}"), Format::Text, khz),
            None => sheet.absent(
                format!("{dir}/cpuinfo_max_freq"),
                "the CPU's range can't be read",
            ),
        }
    }
}

/// The policies that get a limit, each with its own.
fn limited(
    cx: &UnitContext,
    sheet: &mut Sheet,
    want: &PolicyFrequencies,
) -> Vec<(String, Frequency)> {
    let each = match want {
        PolicyFrequencies::All(want) => {
            let found = wanted(cx, sheet).into_iter();
            return found.map(|(dir, _)| (dir, *want)).collect();
        }
        PolicyFrequencies::Each(each) => each,
    };
    let found: Vec<String> = policies(cx.look, &cx.online)
        .into_iter()
        .map(|(dir, _)| dir)
        .collect();
    if found.is_empty() {
        none(sheet);
        return Vec::new();
    }
    let mut limited = Vec::new();
    for (name, want) in each {
        let dir = format!("{CPU}/cpufreq/{name}");
        if found.contains(&dir) {
            limited.push((dir, *want));
            continue;
        }
        let there: Vec<&str> = found.iter().map(|dir| policy_of(dir)).collect();
        sheet.finding(Finding::Hand(format!(
            "{} names {name}, which this host doesn't have; it has {}",
            sheet.setting,
            there.join(", ")
        )));
    }
    limited
}

/// `policy4`, of its folder.
fn policy_of(dir: &str) -> &str {
    dir.rsplit('/').next().unwrap_or(dir)
}

fn khz_of(cx: &UnitContext, dir: &str, want: Frequency) -> Option<i64> {
    let end = |name: &str| cx.look.number(&format!("{dir}/{name}"));
    match want {
        Frequency::Max => end("cpuinfo_max_freq"),
        Frequency::Min => end("cpuinfo_min_freq"),
        Frequency::Khz(khz) => Some(khz.into()),
    }
}

/// The highest frequency that a policy is to have, kHz, and the file that has it: its CPUs' own, or
/// the profile's limit.
pub(super) fn highest(cx: &UnitContext, dir: &str) -> Option<(&'static str, u64)> {
    let khz = |want| u64::try_from(khz_of(cx, dir, want)?).ok();
    let own = khz(Frequency::Max)?;
    let limit = cx.settings().max_freq.as_ref();
    let limit = limit
        .and_then(|limit| limit.get(policy_of(dir)))
        .and_then(khz);
    Some(match limit.filter(|limit| *limit < own) {
        Some(limit) => ("scaling_max_freq", limit),
        None => ("cpuinfo_max_freq", own),
    })
}

fn rate_limit(cx: &UnitContext, sheet: &mut Sheet) {
    const GOVERNOR: &str = "schedutil";
    let Some(want) = cx.settings().schedutil_rate_limit_us else {
        return;
    };
    let common = format!("{CPU}/cpufreq/{GOVERNOR}/rate_limit_us");
    for (dir, _) in wanted(cx, sheet) {
        let own = format!("{dir}/{GOVERNOR}/rate_limit_us");
        let now = cx.look.read(&format!("{dir}/scaling_governor"));
        let is_now = now.as_deref() == Ok(GOVERNOR);
        let will_be = match cx.settings().governor.as_deref() {
            Some(want) if can_be(cx, &dir, want) => want == GOVERNOR,
            _ => is_now,
        };
        if !will_be {
            sheet.absent(
                own,
                "a tunable of schedutil, which this policy doesn't have",
            );
        } else if cx.look.read(&common).is_ok() {
            if !sheet.has(&common) {
                sheet.file(common.clone(), Format::Text, want);
            }
        } else if is_now {
            sheet.file(own, Format::Text, want);
        } else {
            // It is there once the governor is.
            sheet.made_later(own, Some(common.clone()), Format::Text, want);
        }
    }
}
