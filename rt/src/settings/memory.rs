// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory management that makes threads wait or moves pages below them, and KVM's own polling.

use super::{Sheet, Unit, UnitContext, by_value};
use vcpufreq_host::undo::Format;

use crate::finding::Effect;

const KSM: &str = "/sys/kernel/mm/ksm";
const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const MIN_FREE: &str = "vm/min_free_kbytes";

pub(super) const UNITS: &[Unit] = &[
    Unit {
        name: "ksm",
        reason: "a write to a merged page waits until it is copied",
        plan: |cx, sheet| sheet.switch(&format!("{KSM}/run"), cx.settings().ksm),
        effect: not_merged,
    },
    Unit {
        name: "transparent-hugepages",
        reason: "pages are not split and joined below a guest",
        plan: |cx, sheet| {
            if let Some(want) = &cx.settings().transparent_hugepages {
                hugepages(sheet, want);
            }
        },
        effect: by_value,
    },
    Unit {
        name: "swappiness",
        reason: "memory that isn't locked stays in memory as long as it can",
        plan: |cx, sheet| sheet.sysctl("vm/swappiness", cx.settings().swappiness),
        effect: by_value,
    },
    Unit {
        name: "compaction-proactiveness",
        reason: "the kernel moves no pages in advance",
        plan: |cx, sheet| {
            sheet.sysctl(
                "vm/compaction_proactiveness",
                cx.settings().compaction_proactiveness,
            )
        },
        effect: by_value,
    },
    Unit {
        name: "min-free-kbytes",
        reason: "a task that needs memory finds some free, and reclaims none by itself",
        plan: |cx, sheet| sheet.sysctl(MIN_FREE, cx.settings().min_free_kbytes),
        effect: by_value,
    },
    Unit {
        name: "watermark-scale-factor",
        reason: "kswapd starts earlier, so that others reclaim less by themselves",
        plan: |cx, sheet| {
            let want = cx.settings().watermark_scale_factor;
            sheet.sysctl("vm/watermark_scale_factor", want);
        },
        effect: by_value,
    },
    Unit {
        name: "watermark-boost-factor",
        reason: "how much kswapd frees in advance after memory was fragmented",
        plan: |cx, sheet| {
            let want = cx.settings().watermark_boost_factor;
            sheet.sysctl("vm/watermark_boost_factor", want);
        },
        effect: by_value,
    },
    Unit {
        name: "stat-interval",
        reason: "the work that sums up the memory's counters wakes a CPU less often",
        plan: |cx, sheet| sheet.sysctl("vm/stat_interval", cx.settings().stat_interval),
        effect: by_value,
    },
    Unit {
        name: "numa-balancing",
        reason: "pages are not unmapped to find their users",
        plan: |cx, sheet| sheet.sysctl("kernel/numa_balancing", cx.settings().numa_balancing),
        effect: by_value,
    },
    Unit {
        name: "halt-poll-ns",
        reason: "how long KVM polls before a vCPU's thread sleeps",
        plan: |cx, sheet| {
            let path = "/sys/module/kvm/parameters/halt_poll_ns";
            sheet.switch(path, cx.settings().halt_poll_ns);
        },
        effect: by_value,
    },
];

/// With each choice that is written the kernel sets vm.min_free_kbytes anew. So that is recorded
/// first, to be the last that comes back.
fn hugepages(sheet: &mut Sheet, want: &str) {
    let now = sheet.look.read(THP).map(|text| Format::Choice.value(&text));
    if now.is_ok_and(|now| now != want) {
        sheet.keep(format!("/proc/sys/{MIN_FREE}"));
    }
    sheet.file(THP, Format::Choice, want);
}

/// Stopped, it leaves what it has merged.
fn not_merged(cx: &UnitContext) -> Effect {
    match cx.look.number(&format!("{KSM}/pages_shared")) {
        Some(pages) if pages > 0 => Effect::Not(format!(
            "{pages} pages are still merged; write 2 to {KSM}/run to part them"
        )),
        _ => Effect::Effective,
    }
}
