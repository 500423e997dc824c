// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A part of the last-level cache for the real-time CPUs alone, by resctrl.

use super::{Context, Sheet, Unit, by_value};
use crate::{host::Unread, plan::Finding, value::Format};

const DIR: &str = "/sys/fs/resctrl";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "cache-ways",
    reason: "others don't push a real-time CPU's lines out of the last-level cache",
    plan,
    effect: by_value,
}];

fn plan(cx: &Context, sheet: &mut Sheet) {
    let Some(ways) = cx.settings().cache_ways else {
        return;
    };
    let mask = match cx.look.read(&format!("{DIR}/info/L3/cbm_mask")) {
        Ok(mask) => u64::from_str_radix(&mask, 16).unwrap_or(0),
        Err(Unread::Missing) if can_mount(cx) => {
            return sheet.unseen(
                format!("{DIR}/info/L3"),
                "resctrl is not mounted; mount -t resctrl resctrl /sys/fs/resctrl",
            );
        }
        Err(Unread::Missing) => {
            return sheet.absent(
                format!("{DIR}/info/L3"),
                "this machine or kernel can't divide its L3 cache",
            );
        }
        Err(why) => return sheet.cannot(format!("{DIR}/info/L3/cbm_mask"), why),
    };
    let total = mask.count_ones();
    if ways == 0 || ways >= total {
        sheet.finding(Finding::Hand(format!(
            "cache-ways = {ways} can't be: the cache has {total}, of which 1 to {} can be set apart",
            total.saturating_sub(1)
        )));
        return;
    }
    // Masks have to be contiguous: the lowest ways are the real-time CPUs'.
    let ours = mask & ((1 << ways) - 1);
    let Some(both) = caches(cx).map(|ids| (line(&ids, ours), line(&ids, mask & !ours))) else {
        return sheet.absent(format!("{DIR}/schemata"), "it has no line for L3");
    };
    let group = format!("{DIR}/vcpufreq-rt");
    sheet.file(format!("{DIR}/schemata"), Format::Schemata, both.1);
    sheet.dir(group.clone());
    sheet.inside(format!("{group}/schemata"), Format::Schemata, both.0);
    sheet.inside(format!("{group}/cpus_list"), Format::List, &cx.rt);
}

/// The kernel knows the file system where the hardware has something to divide or to count.
fn can_mount(cx: &Context) -> bool {
    let known = cx.look.read("/proc/filesystems").unwrap_or_default();
    let mounted = cx.look.list(DIR).is_ok_and(|names| !names.is_empty());
    !mounted && known.split_whitespace().any(|name| name == "resctrl")
}

/// The caches' numbers, from the root group's line.
fn caches(cx: &Context) -> Option<Vec<String>> {
    let text = cx.look.read(&format!("{DIR}/schemata")).ok()?;
    let line = Format::Schemata.value(&text);
    let parts = line.strip_prefix("L3:")?.split(';');
    parts
        .map(|part| Some(part.split_once('=')?.0.to_owned()))
        .collect()
}

fn line(caches: &[String], mask: u64) -> String {
    let parts: Vec<String> = caches.iter().map(|id| format!("{id}={mask:x}")).collect();
    format!("L3:{}", parts.join(";"))
}
