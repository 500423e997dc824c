// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A cpuset for each guest, that nobody else has CPUs of.
//!
//! ```text
//! /sys/fs/cgroup/vcpufreq-rt.GUEST   a threaded domain: the VMM's process goes here
//! ├── rt    the guest's CPUs, isolated: real-time vCPU threads
//! └── rest  the housekeeping CPUs: the VMM's other threads
//! ```
//! It is a remote partition (Linux 6.7): `cpuset.cpus.exclusive` takes the CPUs from the root, not
//! from a parent partition. Threaded, because a process' threads may only be in groups of one
//! threaded domain.

use super::{Context, Sheet, Unit};
use crate::{
    check::Effect,
    cpus::Cpus,
    host::{Look, Unread},
    partition::Partition,
    profile::CpusetPartition,
    value::Format,
};

const ROOT: &str = "/sys/fs/cgroup";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "cpuset",
    reason: "the scheduler puts nothing else on the guest's CPUs and doesn't balance over them",
    plan,
    effect,
}];

/// A guest's cgroup.
fn group(guest: &str) -> String {
    format!("{ROOT}/vcpufreq-rt.{guest}")
}

fn plan(cx: &Context, sheet: &mut Sheet) {
    let Some(kind) = cx.settings().cpuset else {
        return;
    };
    match cx.look.read(&format!("{ROOT}/cgroup.controllers")) {
        Ok(names) if names.split_whitespace().any(|name| name == "cpuset") => {}
        Ok(_) => {
            return sheet.absent(
                format!("{ROOT}/cpuset"),
                "cgroup v2 has no cpuset here; cgroup v1 may have it",
            );
        }
        Err(why) => return sheet.cannot(format!("{ROOT}/cgroup.controllers"), why),
    }
    if cx.look.read(&format!("{ROOT}/cpuset.cpus.isolated")) == Err(Unread::Missing) {
        return sheet.absent(
            format!("{ROOT}/cpuset.cpus.isolated"),
            "before Linux 6.7 a cpuset can't be cut off below a group; boot with isolcpus",
        );
    }
    sheet.file(
        format!("{ROOT}/cgroup.subtree_control"),
        Format::CpusetController,
        "+cpuset",
    );
    for guest in &cx.partition.guests {
        let top = group(&guest.name);
        let cpus = &guest.cpus;
        sheet.dir(top.clone());
        let control = format!("{top}/cgroup.subtree_control");
        sheet.inside(control, Format::CpusetController, "+cpuset");
        sheet.inside(format!("{top}/cpuset.cpus.exclusive"), Format::List, cpus);
        for name in ["rest", "rt"] {
            sheet.dir(format!("{top}/{name}"));
            sheet.inside(
                format!("{top}/{name}/cgroup.type"),
                Format::Text,
                "threaded",
            );
        }
        let own = |name: &str| format!("{top}/rt/cpuset.cpus{name}");
        sheet.inside(own(""), Format::List, cpus);
        sheet.inside(own(".exclusive"), Format::List, cpus);
        let word = match kind {
            CpusetPartition::Isolated => "isolated",
            CpusetPartition::Root => "root",
        };
        sheet.inside(own(".partition"), Format::Text, word);
    }
}

fn effect(cx: &Context) -> Effect {
    let isolated = cx.look.read(&format!("{ROOT}/cpuset.cpus.isolated"));
    for guest in &cx.partition.guests {
        let top = group(&guest.name);
        let path = format!("{top}/rt/cpuset.cpus.partition");
        match cx.look.read(&path).as_deref() {
            Ok("isolated") => {
                let cpus: Option<Cpus> = isolated.as_ref().ok().and_then(|text| text.parse().ok());
                let left = guest.cpus.without(&cpus.unwrap_or_default());
                if !left.is_empty() {
                    return Effect::Not(format!(
                        "CPU {left} is not isolated: {ROOT}/cpuset.cpus.isolated lacks it"
                    ));
                }
            }
            Ok("root") => {}
            // "isolated invalid (why)": the kernel says it.
            Ok(text) => return Effect::Not(format!("{path} is '{text}'")),
            Err(Unread::Missing) => return Effect::Not(format!("{top} doesn't exist")),
            Err(_) => return Effect::Unseen(format!("{path} can't be read")),
        }
    }
    Effect::Effective
}

/// The first of these guests' cgroups that has processes or threads in it.
pub(crate) fn occupied(look: &dyn Look, partition: &Partition) -> Option<String> {
    let groups = partition.guests.iter().map(|guest| group(&guest.name));
    let all = groups.flat_map(|top| [format!("{top}/rt"), format!("{top}/rest"), top]);
    all.into_iter().find(|dir| {
        let events = look.read(&format!("{dir}/cgroup.events"));
        events.is_ok_and(|text| text.lines().any(|line| line.trim() == "populated 1"))
    })
}
