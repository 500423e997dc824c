// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Idle states, and how long waking up may take.

use super::{CPU, Sheet, Unit, UnitContext, by_value};
use vcpufreq_host::undo::Format;

use crate::{finding::Effect, profile::IdleStates};

pub(super) const UNITS: &[Unit] = &[
    Unit {
        name: "idle-states-off",
        reason: "a CPU that sleeps deeply wakes up late",
        plan: states_off,
        effect: by_value,
    },
    Unit {
        name: "resume-latency-us",
        reason: "this CPU sleeps no deeper than this takes to wake up; others may",
        plan: latency,
        effect: heeded,
    },
];

/// The numbers of a CPU's states.
fn states(cx: &UnitContext, cpu: u32) -> Vec<u32> {
    let names = cx.look.list(&format!("{CPU}/cpu{cpu}/cpuidle"));
    let names = names.unwrap_or_default();
    let mut numbers: Vec<u32> = names
        .iter()
        .filter_map(|name| name.strip_prefix("state")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    numbers
}

fn states_off(cx: &UnitContext, sheet: &mut Sheet) {
    let Some(off) = &cx.settings().idle_states_off else {
        return;
    };
    for cpu in cx.cpus_of(cx.settings().idle_cpus).iter() {
        let known = states(cx, cpu);
        let wanted: Vec<u32> = match off {
            IdleStates::All => known.clone(),
            IdleStates::Deep => known.iter().copied().filter(|n| *n > 0).collect(),
            IdleStates::Numbers(numbers) => numbers.clone(),
        };
        if known.is_empty() {
            sheet.absent(
                format!("{CPU}/cpu{cpu}/cpuidle"),
                "this CPU has no idle states that can be switched off",
            );
            continue;
        }
        for state in wanted {
            let path = format!("{CPU}/cpu{cpu}/cpuidle/state{state}/disable");
            sheet.file(path, Format::Text, 1);
        }
    }
}

fn latency(cx: &UnitContext, sheet: &mut Sheet) {
    let Some(want) = &cx.settings().resume_latency_us else {
        return;
    };
    for cpu in cx.rt.iter() {
        let path = format!("{CPU}/cpu{cpu}/power/pm_qos_resume_latency_us");
        sheet.file(path, Format::Text, want);
    }
}

/// The idle governor has to obey the limit; haltpoll does not.
fn heeded(cx: &UnitContext) -> Effect {
    if cx.rt.iter().all(|cpu| states(cx, cpu).is_empty()) {
        return Effect::Not("without cpuidle nothing obeys it".to_owned());
    }
    match cx.look.read(&format!("{CPU}/cpuidle/current_governor")) {
        Ok(name) if ["menu", "teo", "ladder"].contains(&name.as_str()) => Effect::Effective,
        Ok(name) => Effect::Not(format!(
            "the idle governor {name} doesn't obey it; use menu or teo"
        )),
        Err(_) => Effect::Unseen(format!("{CPU}/cpuidle/current_governor can't be read")),
    }
}
