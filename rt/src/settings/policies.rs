// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! cpufreq's policies: which CPUs share a frequency, and which governors they can have.

use vcpufreq_host::CpuList;

use super::{CPU, Sheet, UnitContext};
use vcpufreq_host::undo::ReadHost;

use crate::finding::Finding;

/// The folders of the policies that have one of these CPUs online, with their CPUs.
pub(super) fn policies(look: &dyn ReadHost, cpus: &CpuList) -> Vec<(String, CpuList)> {
    let mut names = look.list(&format!("{CPU}/cpufreq")).unwrap_or_default();
    names.retain(|name| name.starts_with("policy"));
    names.sort_by_key(|name| name["policy".len()..].parse::<u32>().unwrap_or(u32::MAX));
    let dirs = names.iter().map(|name| format!("{CPU}/cpufreq/{name}"));
    let with_cpus = dirs.filter_map(|dir| {
        let text = look.read(&format!("{dir}/affected_cpus")).ok()?;
        let cpus: CpuList = text.replace(' ', ",").parse().ok()?;
        Some((dir, cpus))
    });
    with_cpus
        .filter(|(_, own)| !own.and(cpus).is_empty())
        .collect()
}

/// Those whose frequencies are set.
pub(super) fn wanted(cx: &UnitContext, sheet: &mut Sheet) -> Vec<(String, CpuList)> {
    let cpus = cx.cpus_of(cx.settings().frequency_cpus);
    let found = policies(cx.look, cpus);
    if found.is_empty() {
        none(sheet);
    }
    for (dir, own) in &found {
        let others = own.without(&cx.rt);
        if !own.and(&cx.rt).is_empty() && !others.is_empty() {
            sheet.finding(Finding::Note(format!(
                "CPU {others} shares the frequency of real-time CPU {} ({dir})",
                own.and(&cx.rt)
            )));
        }
    }
    found
}

/// This host has no policy.
pub(super) fn none(sheet: &mut Sheet) {
    sheet.absent(
        format!("{CPU}/cpufreq"),
        "this host's frequencies can't be set",
    );
}

/// Whether a policy has this governor, or can have it.
pub(super) fn can_be(cx: &UnitContext, dir: &str, governor: &str) -> bool {
    let known = cx.look.read(&format!("{dir}/scaling_available_governors"));
    known.is_ok_and(|names| names.split_whitespace().any(|name| name == governor))
        || cx.look.read(&format!("{dir}/scaling_governor")).as_deref() == Ok(governor)
}
