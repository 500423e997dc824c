// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Watchdogs and tracing.

use super::{Unit, UnitContext, by_value};
use vcpufreq_host::undo::Format;

use crate::finding::Effect;

const TRACING: &str = "/sys/kernel/tracing";

pub(super) const UNITS: &[Unit] = &[
    Unit {
        name: "watchdog",
        reason: "no watchdog timer wakes a real-time CPU; housekeeping stays watched",
        plan: |cx, sheet| {
            if cx.settings().watchdog.is_some() {
                sheet.file(
                    "/proc/sys/kernel/watchdog_cpumask",
                    Format::List,
                    cx.housekeeping(),
                );
            }
        },
        effect: by_value,
    },
    Unit {
        name: "nmi-watchdog",
        reason: "no interrupt that can't be masked looks for lock-ups",
        plan: |cx, sheet| sheet.sysctl("kernel/nmi_watchdog", cx.settings().nmi_watchdog),
        effect: by_value,
    },
    Unit {
        name: "tracing",
        reason: "events are not written to the trace buffer",
        plan: |cx, sheet| {
            if let Some(want) = cx.settings().tracing {
                let path = format!("{TRACING}/tracing_on");
                // Where it isn't mounted it may have been used from elsewhere.
                match cx.look.list(TRACING) {
                    Ok(names) if names.is_empty() => sheet.unseen(
                        path,
                        "tracefs is not mounted; mount -t tracefs tracefs /sys/kernel/tracing",
                    ),
                    _ => sheet.file(path, Format::Text, want),
                }
            }
        },
        effect: untraced,
    },
];

/// A tracer that is chosen runs its hooks with the buffer off, too; and instances have switches of
/// their own.
fn untraced(cx: &UnitContext) -> Effect {
    match cx.look.read(&format!("{TRACING}/current_tracer")) {
        Ok(tracer) if tracer == "nop" => {}
        Ok(tracer) => {
            return Effect::Not(format!(
                "the {tracer} tracer is on; write nop to {TRACING}/current_tracer"
            ));
        }
        Err(_) => return Effect::Unseen(format!("{TRACING}/current_tracer can't be read")),
    }
    for name in cx
        .look
        .list(&format!("{TRACING}/instances"))
        .unwrap_or_default()
    {
        let dir = format!("{TRACING}/instances/{name}");
        let text = |file: &str| cx.look.read(&format!("{dir}/{file}")).unwrap_or_default();
        let writes =
            !text("set_event").is_empty() || !["", "nop"].contains(&&*text("current_tracer"));
        if text("tracing_on") == "1" && writes {
            return Effect::Not(format!(
                "the instance {name} traces; write 0 to {dir}/tracing_on, or remove {dir} with rmdir if it is not needed"
            ));
        }
    }
    Effect::Effective
}
