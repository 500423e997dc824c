// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scheduler's own switches: where timers go, and how much of a CPU real-time tasks may have.

use vcpufreq_host::{CpuList, SCHED_DEBUG};

use super::{Sheet, Unit, UnitContext, by_value};
use vcpufreq_host::undo::{Format, Unread};

use crate::finding::Effect;

/// Both keep a share of each CPU from real-time tasks: since 6.12, and for sched_ext since 6.20.
const SERVERS: [&str; 2] = ["fair_server", "ext_server"];

pub(super) const UNITS: &[Unit] = &[
    Unit {
        name: "timer-migration",
        reason: "timers of other CPUs are not moved to where they disturb",
        plan: |cx, sheet| sheet.sysctl("kernel/timer_migration", cx.settings().timer_migration),
        effect: by_value,
    },
    Unit {
        name: "rt-runtime-us",
        reason: "a busy real-time vCPU is not stopped for a share of each second",
        plan: |cx, sheet| sheet.sysctl("kernel/sched_rt_runtime_us", cx.settings().rt_runtime_us),
        effect: unthrottled,
    },
    Unit {
        name: "fair-server-runtime-ns",
        reason: "since Linux 6.12 it is this that stops real-time tasks for others' sake, and schedutil \
                 keeps a busy CPU's frequency above it",
        plan: servers,
        effect: by_value,
    },
];

/// The servers' runtimes on these CPUs; none on a kernel without servers.
///
/// # Errors
/// While debugfs is hidden or not mounted: which kernel it is can't be seen then.
fn server_files(cx: &UnitContext, cpus: &CpuList) -> Result<Vec<String>, Unread> {
    let names = match cx.look.list(SCHED_DEBUG) {
        Err(Unread::Missing) if is_mounted(cx) => Vec::new(),
        Err(Unread::Missing) => return Err(Unread::Refused),
        names => names?,
    };
    let servers = SERVERS
        .into_iter()
        .filter(|server| names.iter().any(|name| name == server));
    let of = |server| {
        cpus.iter()
            .map(move |cpu| format!("{SCHED_DEBUG}/{server}/cpu{cpu}/runtime"))
    };
    Ok(servers.flat_map(of).collect())
}

fn is_mounted(cx: &UnitContext) -> bool {
    let top = cx.look.list("/sys/kernel/debug");
    top.is_ok_and(|names| !names.is_empty())
}

fn servers(cx: &UnitContext, sheet: &mut Sheet) {
    let Some(want) = cx.settings().fair_server_runtime_ns else {
        return;
    };
    match server_files(cx, cx.cpus_of(cx.settings().fair_server_cpus)) {
        Ok(files) if files.is_empty() => {
            sheet.absent(
                format!("{SCHED_DEBUG}/fair_server"),
                "before Linux 6.12 there is none",
            );
        }
        Ok(files) => {
            for path in files {
                sheet.file(path, Format::Text, want);
            }
        }
        Err(Unread::Denied) => sheet.cannot(SCHED_DEBUG.to_owned(), Unread::Denied),
        Err(_) => sheet.unseen(
            SCHED_DEBUG,
            "debugfs is not mounted; mount -t debugfs debugfs /sys/kernel/debug",
        ),
    }
}

/// Without a limit only if no server takes its share.
fn unthrottled(cx: &UnitContext) -> Effect {
    if cx.settings().rt_runtime_us != Some(-1) {
        return Effect::Effective;
    }
    let Ok(files) = server_files(cx, &cx.rt) else {
        return Effect::Unseen(format!(
            "{SCHED_DEBUG} can't be read: the fair servers are there"
        ));
    };
    for path in files {
        match cx.look.read(&path).as_deref() {
            Ok("0") | Err(Unread::Missing) => {}
            Ok(ns) => {
                return Effect::Not(format!(
                    "{path} is {ns}: fair tasks still get a share of this CPU"
                ));
            }
            Err(_) => return Effect::Unseen(format!("{path} can't be read")),
        }
    }
    Effect::Effective
}
