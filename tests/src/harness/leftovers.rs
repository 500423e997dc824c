// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of `vcpufreq` is on the host, found without asking it.

use std::ffi::OsStr;
use std::fs;

use anyhow::Result;

use crate::harness::wait::{SOON, settled};

const PROGRAM: &str = "vcpufreq";
/// What the names of a guest's QEMU begin with.
const QEMU: &str = "qemu-system";
pub const CGROUPS: &str = "/sys/fs/cgroup";

/// Everything of vcpufreq's that is on the host now.
pub fn leftovers() -> Result<Vec<String>> {
    let mut found = own_cgroups()?;
    found.extend(processes()?.iter().map(|pid| format!("process {pid}")));
    if let Ok(entries) = fs::read_dir("/run/vcpufreq") {
        found.extend(
            entries
                .flatten()
                .map(|entry| entry.path().display().to_string()),
        );
    }
    #[cfg(feature = "bpf")]
    found.extend(bpf_objects());
    Ok(found)
}

/// What is left soon after an end.
pub fn left_soon() -> Result<Vec<String>> {
    settled(SOON, leftovers, Vec::is_empty)
}

/// Its cgroups, those at the top.
pub fn own_cgroups() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(CGROUPS)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("vcpufreq") {
            found.push(entry.path().display().to_string());
        }
    }
    Ok(found)
}

/// Processes of the program; one that has ended but isn't reaped is none.
pub fn processes() -> Result<Vec<u32>> {
    processes_named(|name| name == PROGRAM)
}

/// QEMUs, whosever they are.
pub fn qemus() -> Result<Vec<u32>> {
    processes_named(|name| name.starts_with(QEMU))
}

/// Processes by the file names of their programs.
fn processes_named(is_wanted: impl Fn(&str) -> bool) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        let target = fs::read_link(entry.path().join("exe"));
        let target = target.unwrap_or_default();
        if target
            .file_name()
            .and_then(OsStr::to_str)
            .is_some_and(&is_wanted)
        {
            found.push(pid);
        }
    }
    Ok(found)
}

/// How many programs, links and maps the kernel has, whosever they are.
#[cfg(feature = "bpf")]
pub fn bpf_counts() -> (usize, usize, usize) {
    use libbpf_rs::query::{LinkInfoIter, ProgInfoIter};
    (
        ProgInfoIter::default().count(),
        LinkInfoIter::default().count(),
        maps_listed(),
    )
}

/// Whether there are no more of each. What was there at first may go meanwhile: the kernel frees it
/// later than it was closed.
#[cfg(feature = "bpf")]
pub fn no_more(now: (usize, usize, usize), before: (usize, usize, usize)) -> bool {
    now.0 <= before.0 && now.1 <= before.1 && now.2 <= before.2
}

/// How many maps the kernel has. It opens none: that can keep an array of programs for ever.
#[cfg(feature = "bpf")]
#[expect(unsafe_code, reason = "libbpf is C")]
fn maps_listed() -> usize {
    let after = |id: u32| {
        let mut next = 0;
        // SAFETY: the kernel writes one number.
        let found = unsafe { libbpf_rs::libbpf_sys::bpf_map_get_next_id(id, &raw mut next) };
        (found == 0).then_some(next)
    };
    std::iter::successors(after(0), |id| after(*id)).count()
}

/// Programs of the host's that are loaded now; maps if there are none, since to look at maps opens
/// them.
#[cfg(feature = "bpf")]
pub fn bpf_objects() -> Vec<String> {
    use libbpf_rs::query::{MapInfoIter, ProgInfoIter};
    let programs = ProgInfoIter::default().filter_map(|program| program.name.into_string().ok());
    let programs: Vec<_> = programs
        .filter(|name| name.starts_with("vcpufreq") || name.starts_with("dispatch"))
        .map(|name| format!("BPF program {name}"))
        .collect();
    if !programs.is_empty() {
        return programs;
    }
    let maps = MapInfoIter::default();
    let maps = maps.filter(|map| map.name == "policies" || map.name == "dispatch_slots");
    maps.map(|map| format!("BPF map {}", map.id)).collect()
}
