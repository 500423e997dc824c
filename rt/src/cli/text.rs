// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plans and checks as text for people.

use crate::{
    check::Checked,
    finding::{Absent, Effect, Finding},
    partition::Partition,
    plan::{PlannedSetting, RtPlan},
};

/// `for plc on CPU 3; housekeeping on 0-2; profile kvm-rt`
fn heading(partition: &Partition, profile: &str) -> String {
    if partition.guests.is_empty() {
        return format!("for CPU {}; profile {profile}\n", partition.housekeeping);
    }
    let guests = partition.guests.iter();
    let guests: Vec<String> = guests
        .map(|guest| format!("{} on CPU {}", guest.name, guest.cpus))
        .collect();
    let housekeeping = &partition.housekeeping;
    let guests = guests.join(", ");
    format!("for {guests}; housekeeping on {housekeeping}; profile {profile}\n")
}

/// A plan.
pub(super) fn plan(plan: &RtPlan, profile: &str) -> String {
    let mut text = heading(&plan.partition, profile);
    for PlannedSetting {
        name,
        reason,
        changes,
    } in &plan.settings
    {
        text += &format!("\n{name}: {reason}\n");
        for change in changes {
            let target = change.target.name();
            let now = change.now.as_deref().unwrap_or("new");
            text += &match &change.want {
                None => format!("  {target}: {now}, brought back with restore\n"),
                Some(_) if change.is_set() => format!("  {target}: {now} already\n"),
                Some(want) => format!("  {target}: {now} → {want}\n"),
            };
        }
    }
    text + &not_by_us(plan)
}

/// Lists what this program can't change or see.
fn not_by_us(plan: &RtPlan) -> String {
    let mut text = String::new();
    if let Some(words) = &plan.cmdline {
        text += &format!("\nreboot: add to the kernel's command line: {words}\n");
    }
    for finding in &plan.findings {
        let (kind, line) = match finding {
            Finding::Reboot(line) => ("reboot", line),
            Finding::Firmware(line) => ("firmware", line),
            Finding::Hand(line) => ("by hand", line),
            Finding::Note(line) => ("note", line),
            Finding::Impostor(line) => ("impostor", line),
        };
        text += &format!("{kind}: {line}\n");
    }
    for (kind, absents) in [("not here", &plan.absent), ("not seen", &plan.unseen)] {
        for Absent { setting, path, why } in absents {
            text += &format!("{kind}: {setting}: {path}: {why}\n");
        }
    }
    text
}

/// The result of check.
pub(super) fn check(plan: &RtPlan, checked: &[Checked], profile: &str) -> String {
    let mut text = heading(&plan.partition, profile);
    for one in checked {
        let (mark, state) = match &one.effect {
            _ if !one.unset.is_empty() => (
                "NOT SET  ",
                format!("{} of {} not set", one.unset.len(), one.of),
            ),
            Effect::Effective => ("effective", format!("{} set", one.of)),
            Effect::Not(why) => ("NO EFFECT", why.clone()),
            Effect::Unseen(why) => ("unseen   ", why.clone()),
        };
        text += &format!("{mark}  {:<26}{state}\n", one.name);
        for (name, now, want) in &one.unset {
            text += &format!("{:13}{name}: {now}, not {want}\n", "");
        }
    }
    text + &not_by_us(plan)
}
