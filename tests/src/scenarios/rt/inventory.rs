// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All of a host that `vcpufreq rt` could change, decided here and not by it: far more files than a
//! plan lists, every cgroup, and the scheduling of kernel threads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::harness::kernel_threads::is_kernels;
use crate::harness::sysfs;
use crate::harness::thread_facts::scheduling;

/// The file of a pCPU's latency bound.
pub fn bound_file(cpu: u32) -> String {
    format!("/sys/devices/system/cpu/cpu{cpu}/power/pm_qos_resume_latency_us")
}

pub type Inventory = BTreeMap<String, String>;

/// Paths that are in only one of two states, or have another value there.
pub fn changes(before: &Inventory, after: &Inventory) -> Vec<String> {
    let paths: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let differ = paths
        .into_iter()
        .filter(|path| before.get(*path) != after.get(*path));
    differ.cloned().collect()
}

/// Folders below which every file counts, and how its name has to end.
const KEPT: &[(&str, &[&str])] = &[
    ("/proc/sys/kernel", &[""]),
    ("/proc/sys/vm", &[""]),
    ("/proc/irq", &["smp_affinity"]),
    ("/sys/devices/virtual/workqueue", &["cpumask", "_requested"]),
    (
        "/sys/devices/system/cpu",
        &[
            "_governor",
            "_min_freq",
            "_max_freq",
            "_setspeed",
            "boost",
            "no_turbo",
            "rate_limit_us",
            "disable",
            "latency_us",
        ],
    ),
    ("/sys/kernel/debug/sched", &["runtime", "period"]),
    ("/sys/kernel/mm/ksm", &["run"]),
    ("/sys/kernel/mm/transparent_hugepage", &["enabled"]),
    ("/sys/module/kvm/parameters", &[""]),
    (
        "/sys/fs/cgroup",
        &[
            "control",
            "type",
            "cpus",
            "exclusive",
            "partition",
            "isolated",
        ],
    ),
];
/// The value of a cgroup that is there.
const CGROUP: &str = "cgroup";
/// What changes by itself, or by looking.
const OWN_WAY: &[&str] = &[
    "ns_last_pid",
    "/random/",
    "detect_count",
    "/pty/nr",
    "/keys/",
];

/// All values, with every cgroup and every kernel thread's scheduling.
pub fn everything() -> Result<Inventory> {
    let mut state = Inventory::new();
    for (folder, ends) in KEPT {
        collect(Path::new(folder), ends, &mut state);
    }
    for path in [
        "/sys/kernel/tracing/tracing_on",
        "/sys/kernel/rcu_expedited",
    ] {
        state.insert(path.to_owned(), sysfs::text(path)?);
    }
    for entry in fs::read_dir("/proc")?.flatten() {
        let path = entry.path();
        let name = sysfs::text(path.join("comm")).unwrap_or_default();
        let fixed = ["ktimers/", "rcub/", "rcuc/", "ksoftirqd/"];
        if fixed.iter().any(|kind| name.starts_with(kind)) {
            let stat = sysfs::text(path.join("stat"))?;
            // Any process can have such a name.
            if !is_kernels(&stat) {
                continue;
            }
            state.insert(name, scheduling(&stat)?);
        }
    }
    Ok(state)
}

/// The values of some files and cgroups, of those that are there.
pub fn values_of(paths: &[String]) -> Inventory {
    let now = paths.iter().filter_map(|path| {
        let value = match Path::new(path).is_dir() {
            true => CGROUP.to_owned(),
            false => sysfs::text(path).ok()?,
        };
        Some((path.clone(), value))
    });
    now.collect()
}

fn collect(folder: &Path, ends: &[&str], state: &mut Inventory) {
    let cgroup = folder.starts_with("/sys/fs/cgroup");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.display().to_string();
        if OWN_WAY.iter().any(|part| name.contains(part)) {
            continue;
        }
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if kind.is_dir() {
            if cgroup {
                state.insert(name, CGROUP.to_owned());
            }
            collect(&path, ends, state);
        } else if kind.is_file() && ends.iter().any(|end| name.ends_with(end)) {
            // Some can only be written.
            if let Ok(text) = sysfs::text(&path) {
                state.insert(name, text);
            }
        }
    }
}
