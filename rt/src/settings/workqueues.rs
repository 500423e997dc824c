// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel work that is bound to no CPU.

use vcpufreq_host::CpuList;

use super::{Sheet, Unit, UnitContext};
use vcpufreq_host::undo::{Format, Unread};

use crate::finding::Effect;

const DIR: &str = "/sys/devices/virtual/workqueue";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "workqueues",
    reason: "unbound kernel work runs on housekeeping CPUs",
    plan,
    effect,
}];

fn plan(cx: &UnitContext, sheet: &mut Sheet) {
    if cx.settings().workqueues.is_none() {
        return;
    }
    let names = match cx.look.list(DIR) {
        Ok(names) => names,
        Err(why) => return sheet.cannot(DIR.to_owned(), why),
    };
    let mask = cx.housekeeping().mask();
    // What was asked for; cpumask shows it without the CPUs of isolated cpusets.
    let requested = names.iter().any(|name| name == "cpumask_requested");
    let shown_in = requested.then(|| format!("{DIR}/cpumask_requested"));
    sheet.shown(
        format!("{DIR}/cpumask"),
        shown_in,
        Format::Mask,
        mask.clone(),
    );
    for path in own_masks(cx, &names) {
        sheet.file(path, Format::Mask, &mask);
    }
}

/// Of each queue that has a mask of its own.
fn own_masks(cx: &UnitContext, names: &[String]) -> Vec<String> {
    let paths = names.iter().map(|name| format!("{DIR}/{name}/cpumask"));
    paths.filter(|path| cx.look.writable(path)).collect()
}

/// A queue's work runs on its own mask's CPUs as far as the common mask has them.
fn effect(cx: &UnitContext) -> Effect {
    let mask = |path: &str| match cx.look.read(path) {
        Ok(text) => CpuList::from_mask(&text).ok_or(Unread::Refused),
        Err(why) => Err(why),
    };
    let Ok(common) = mask(&format!("{DIR}/cpumask")) else {
        return Effect::Unseen(format!("{DIR}/cpumask can't be read"));
    };
    for path in own_masks(cx, &cx.look.list(DIR).unwrap_or_default()) {
        let reached = match mask(&path) {
            Ok(own) => own.and(&common).and(&cx.rt),
            Err(Unread::Missing) => continue,
            Err(_) => return Effect::Unseen(format!("{path} can't be read")),
        };
        if !reached.is_empty() {
            return Effect::Not(format!("{path} still has CPU {reached}"));
        }
    }
    match common.and(&cx.rt) {
        reached if reached.is_empty() => Effect::Effective,
        reached => Effect::Not(format!("{DIR}/cpumask still has CPU {reached}")),
    }
}
