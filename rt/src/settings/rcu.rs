// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RCU's grace periods.

use super::{Sheet, Unit, UnitContext};
use vcpufreq_host::undo::Format;

use crate::finding::Effect;

const EXPEDITED: &str = "/sys/kernel/rcu_expedited";
const NORMAL: &str = "/sys/kernel/rcu_normal";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "rcu-expedited",
    reason: "RCU's grace periods are shorter",
    plan,
    effect,
}];

fn plan(cx: &UnitContext, sheet: &mut Sheet) {
    let Some(want) = cx.settings().rcu_expedited else {
        return;
    };
    let version = cx.look.read("/proc/version").unwrap_or_default();
    let wins = cx.look.number(NORMAL) == Some(1);
    if want == 1 && wins && version.contains("PREEMPT_RT") {
        sheet.absent(
            EXPEDITED,
            "PREEMPT_RT kernels set rcu_normal, which wins: to hurry a grace period is to interrupt every CPU",
        );
        return;
    }
    sheet.file(EXPEDITED, Format::Text, want);
}

/// `rcu_normal` wins where both are set.
fn effect(cx: &UnitContext) -> Effect {
    match (cx.settings().rcu_expedited, cx.look.number(NORMAL)) {
        (Some(1), Some(1)) => Effect::Not(format!("{NORMAL} is 1 and wins; write 0 to it")),
        (Some(1), None) => Effect::Unseen(format!("{NORMAL} can't be read")),
        _ => Effect::Effective,
    }
}
