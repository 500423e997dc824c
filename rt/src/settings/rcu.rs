// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RCU's grace periods.

use super::{Context, Sheet, Unit};
use crate::{check::Effect, value::Format};

const EXPEDITED: &str = "/sys/kernel/rcu_expedited";
const NORMAL: &str = "/sys/kernel/rcu_normal";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "rcu-expedited",
    reason: "who waits for a grace period waits shorter",
    plan,
    effect,
}];

fn plan(cx: &Context, sheet: &mut Sheet) {
    if let Some(want) = cx.settings().rcu_expedited {
        sheet.file(EXPEDITED, Format::Text, want);
    }
}

/// `rcu_normal` wins where both are set, and PREEMPT_RT kernels set it at the end of their boot.
fn effect(cx: &Context) -> Effect {
    match (cx.settings().rcu_expedited, cx.look.number(NORMAL)) {
        (Some(1), Some(1)) => Effect::Not(format!(
            "{NORMAL} is 1, as PREEMPT_RT kernels set it, and wins"
        )),
        (Some(1), None) => Effect::Unseen(format!("{NORMAL} can't be read")),
        _ => Effect::Effective,
    }
}
