// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel threads of the real-time CPUs, which must come before a busy vCPU of theirs.

use std::collections::BTreeSet;

use super::{Sheet, Unit, UnitContext, by_value};
use vcpufreq_host::undo::{ReadHost, Target, ThreadStat, Unread};

pub(super) const UNITS: &[Unit] = &[
    Unit {
        name: "ktimers",
        reason: "on PREEMPT_RT it runs expired timers: below a busy vCPU they would wait for ever",
        plan: |cx, sheet| of_cpus(cx, sheet, "ktimers", cx.settings().ktimers.as_deref()),
        effect: by_value,
    },
    Unit {
        name: "rcuc",
        reason: "it runs RCU callbacks: below a busy vCPU memory would not be freed",
        plan: |cx, sheet| of_cpus(cx, sheet, "rcuc", cx.settings().rcuc.as_deref()),
        effect: by_value,
    },
    Unit {
        name: "rcub",
        reason: "it speeds up tasks that hold up RCU: below a busy vCPU memory would not be freed",
        plan: |cx, sheet| {
            let Some(want) = &cx.settings().rcub else {
                return;
            };
            scheduled(cx, sheet, "rcub", want, &|all| {
                let names = all.iter().map(|(_, name)| name.clone());
                let names = names.filter(|name| is_numbered(name, "rcub/"));
                names.collect::<BTreeSet<_>>().into_iter().collect()
            });
        },
        effect: by_value,
    },
    Unit {
        name: "ksoftirqd",
        reason: "it runs soft interrupts that others left",
        plan: |cx, sheet| of_cpus(cx, sheet, "ksoftirqd", cx.settings().ksoftirqd.as_deref()),
        effect: by_value,
    },
];

/// The threads of the real-time CPUs.
fn of_cpus(cx: &UnitContext, sheet: &mut Sheet, kind: &str, want: Option<&str>) {
    let names = |_: &[_]| cx.rt.iter().map(|cpu| format!("{kind}/{cpu}")).collect();
    if let Some(want) = want {
        scheduled(cx, sheet, kind, want, &names);
    }
}

/// Whether a name is as the kernel has it. Any process can have one, of any characters, and it is
/// printed.
fn is_numbered(name: &str, kind: &str) -> bool {
    let number = name.strip_prefix(kind).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Of all processes and kernel threads, the names of those that get another scheduling.
type ThreadNames<'a> = dyn Fn(&[(u32, String)]) -> Vec<String> + 'a;

fn scheduled(cx: &UnitContext, sheet: &mut Sheet, kind: &str, want: &str, names: &ThreadNames) {
    let all = match all(cx.look) {
        Ok(all) => all,
        Err(why) => return sheet.cannot(format!("/proc ({kind} threads)"), why),
    };
    let names = names(&all);
    if names.is_empty() {
        sheet.absent(kind, "this kernel has no such thread");
    }
    for name in names {
        let Some(found) = kernel_threads(sheet, &all, &name) else {
            continue;
        };
        if found.is_empty() {
            sheet.absent(name.clone(), "this kernel has no such thread");
        }
        for (pid, stat) in found {
            let target = Target::Thread {
                pid,
                name: name.clone(),
                start_ticks: stat.start_ticks,
            };
            sheet.add(target, Some(want.to_owned()));
        }
    }
}

/// The kernel threads with this name; `None` if one can't be looked at, which is on the sheet then.
/// Any process can have the name too: those are a finding.
pub(super) fn kernel_threads(
    sheet: &mut Sheet,
    all: &[(u32, String)],
    name: &str,
) -> Option<Vec<(u32, ThreadStat)>> {
    let (mut threads, mut others) = (Vec::new(), Vec::new());
    for (pid, _) in all.iter().filter(|(_, of)| of == name) {
        match ThreadStat::read(sheet.look, *pid) {
            Ok(stat) if stat.is_kernel_thread => threads.push((*pid, stat)),
            Ok(_) => others.push(*pid),
            // It has just ended.
            Err(Unread::Missing) => {}
            Err(why) => {
                sheet.cannot(format!("/proc/{pid}/stat"), why);
                return None;
            }
        }
    }
    sheet.impostors(name, "a kernel thread", &others);
    Some(threads)
}

/// All processes and kernel threads, with their names.
///
/// # Errors
/// When this user can't see those of others: with hidepid not even process 1.
pub(super) fn all(look: &dyn ReadHost) -> Result<Vec<(u32, String)>, Unread> {
    let names = look.list("/proc")?;
    let comm = |pid: u32| look.read(&format!("/proc/{pid}/comm"));
    if comm(1).is_err() {
        return Err(Unread::Denied);
    }
    let mut all = Vec::new();
    for pid in names.iter().filter_map(|name| name.parse().ok()) {
        match comm(pid) {
            Ok(name) => all.push((pid, name)),
            // It has just ended.
            Err(Unread::Missing) => {}
            Err(why) => return Err(why),
        }
    }
    Ok(all)
}
