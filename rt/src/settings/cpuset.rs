// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A cpuset for each guest, whose CPUs no other cgroup has.
//!
//! ```text
//! /sys/fs/cgroup/vcpufreq-rt.GUEST   a threaded domain: the VMM's process goes here
//! ├── rt    the guest's CPUs, isolated: real-time vCPU threads
//! └── rest  the housekeeping CPUs: the VMM's other threads
//! ```
//! It is a remote partition (Linux 6.7): `cpuset.cpus.exclusive` takes the CPUs from the root, not
//! from a parent partition. Threaded, because a process' threads may only be in groups of one
//! threaded domain.

use vcpufreq_host::CpuList;

use super::{Sheet, Unit, UnitContext};
use vcpufreq_host::undo::{Format, ReadHost, Unread};

use crate::{
    finding::Effect,
    finding::Finding,
    partition::{self, Partition, PartitionGuest},
    profile::CpusetPartition,
};

const ROOT: &str = "/sys/fs/cgroup";
/// The CPUs of isolcpus.
const BOOT_ISOLATED: &str = "/sys/devices/system/cpu/isolated";
/// There with uclamp.
const CLAMPS: &str = "/proc/sys/kernel/sched_util_clamp_min";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "cpuset",
    reason: "the scheduler puts nothing else on the guest's CPUs and doesn't balance over them",
    plan,
    effect,
}];

/// A guest's cgroup.
pub(crate) fn partition_group(guest: &str) -> String {
    format!("{ROOT}/vcpufreq-rt.{guest}")
}

fn plan(cx: &UnitContext, sheet: &mut Sheet) {
    let Some(kind) = cx.settings().cpuset else {
        return;
    };
    let controllers = match cx.look.read(&format!("{ROOT}/cgroup.controllers")) {
        Ok(names) if names.split_whitespace().any(|name| name == "cpuset") => names,
        Ok(_) => {
            return by_boot(
                cx,
                sheet,
                "cgroup v2 has no cpuset here: cgroup v1 may have it, or the kernel lacks CONFIG_CPUSETS",
            );
        }
        Err(Unread::Missing) => {
            return by_boot(cx, sheet, "cgroup v2 is not mounted at /sys/fs/cgroup");
        }
        Err(why) => return sheet.cannot(format!("{ROOT}/cgroup.controllers"), why),
    };
    if cx.look.read(&format!("{ROOT}/cpuset.cpus.isolated")) == Err(Unread::Missing) {
        return by_boot(
            cx,
            sheet,
            "before Linux 6.7 a cpuset can't be cut off below a group",
        );
    }
    // Clamps of the guest's groups, where this kernel has them.
    let clamps = cx.look.read(CLAMPS).is_ok() && controllers.split_whitespace().any(|c| c == "cpu");
    control(sheet, ROOT, clamps);
    let word = match kind {
        CpusetPartition::Isolated => "isolated",
        CpusetPartition::Root => "root",
    };
    for guest in &cx.partition.guests {
        groups(sheet, guest, word, clamps);
    }
}

/// A guest's cgroups, cut off as `word` has it.
fn groups(sheet: &mut Sheet, guest: &PartitionGuest, word: &str, clamps: bool) {
    let top = partition_group(&guest.name);
    let cpus = &guest.cpus;
    sheet.dir(top.clone());
    inner_control(sheet, &top, true, clamps);
    sheet.inside(format!("{top}/cpuset.cpus.exclusive"), Format::List, cpus);
    for name in ["rest", "rt"] {
        let dir = format!("{top}/{name}");
        sheet.dir(dir.clone());
        sheet.inside(format!("{dir}/cgroup.type"), Format::Text, "threaded");
        inner_control(sheet, &dir, false, clamps);
    }
    let own = |name: &str| format!("{top}/rt/cpuset.cpus{name}");
    sheet.inside(own(""), Format::List, cpus);
    sheet.inside(own(".exclusive"), Format::List, cpus);
    sheet.inside(own(".partition"), Format::Text, word);
}

/// No cpuset can be made: then it is the command line that has to set the CPUs apart.
fn by_boot(cx: &UnitContext, sheet: &mut Sheet, why: &str) {
    let isolated = partition::list(cx.look, BOOT_ISOLATED).unwrap_or_default();
    let left = cx.rt.without(&isolated);
    if left.is_empty() {
        sheet.absent(ROOT, format!("{why}; isolcpus has set these CPUs apart"));
    } else {
        sheet.finding(Finding::Reboot(format!(
            "CPU {left} can't be set apart by a cpuset ({why}); boot with isolcpus={}",
            cx.rt
        )));
    }
}

/// The controllers of the root's children.
fn control(sheet: &mut Sheet, dir: &str, clamps: bool) {
    let file = || format!("{dir}/cgroup.subtree_control");
    sheet.file(file(), Format::CpusetController, "+cpuset");
    if clamps {
        sheet.file(file(), Format::CpuController, "+cpu");
    }
}

/// Of the children of a group that is made; and no cap on their clamps.
fn inner_control(sheet: &mut Sheet, dir: &str, cpuset: bool, clamps: bool) {
    let file = || format!("{dir}/cgroup.subtree_control");
    if cpuset {
        sheet.inside(file(), Format::CpusetController, "+cpuset");
    }
    if clamps {
        sheet.inside(file(), Format::CpuController, "+cpu");
        sheet.inside(format!("{dir}/cpu.uclamp.min"), Format::Text, "max");
    }
}

fn effect(cx: &UnitContext) -> Effect {
    let isolated = cx.look.read(&format!("{ROOT}/cpuset.cpus.isolated"));
    for guest in &cx.partition.guests {
        let top = partition_group(&guest.name);
        let path = format!("{top}/rt/cpuset.cpus.partition");
        match cx.look.read(&path).as_deref() {
            Ok("isolated") => {
                let cpus: Option<CpuList> =
                    isolated.as_ref().ok().and_then(|text| text.parse().ok());
                let left = guest.cpus.without(&cpus.unwrap_or_default());
                if !left.is_empty() {
                    return Effect::Not(format!(
                        "CPU {left} is not isolated: {ROOT}/cpuset.cpus.isolated lacks it"
                    ));
                }
            }
            Ok("root") => {}
            // "isolated invalid (why)".
            Ok(text) => return Effect::Not(format!("{path} is '{text}'")),
            Err(Unread::Missing) => return Effect::Not(format!("{top} doesn't exist")),
            Err(_) => return Effect::Unseen(format!("{path} can't be read")),
        }
    }
    Effect::Effective
}

/// The first of these guests' cgroups that has processes or threads in it.
pub(crate) fn occupied(look: &dyn ReadHost, partition: &Partition) -> Option<String> {
    let groups = partition
        .guests
        .iter()
        .map(|guest| partition_group(&guest.name));
    let all = groups.flat_map(|top| [format!("{top}/rt"), format!("{top}/rest"), top]);
    all.into_iter().find(|dir| {
        let events = look.read(&format!("{dir}/cgroup.events"));
        events.is_ok_and(|text| text.lines().any(|line| line.trim() == "populated 1"))
    })
}
