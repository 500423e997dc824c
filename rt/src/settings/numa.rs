// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! On which nodes a guest's CPUs are, and, while it runs, its memory.

use std::collections::BTreeMap;

use vcpufreq_device::host::CpuList;

use super::{Context, Sheet, cpuset};
use crate::{host::Look, plan::Finding};

const NODES: &str = "/sys/devices/system/node";
/// What is smaller is no guest's memory, but the VMM's own.
const MAPPING_KIB: u64 = 16 << 10;

pub(super) fn look(cx: &Context, sheet: &mut Sheet) {
    let nodes = nodes(cx.look);
    if nodes.len() < 2 {
        return;
    }
    for guest in &cx.partition.guests {
        let near = |(_, cpus): &(&u32, &CpuList)| !cpus.and(&guest.cpus).is_empty();
        let of: Vec<u32> = nodes.iter().filter(near).map(|(node, _)| *node).collect();
        let (name, list) = (&guest.name, listed(&of));
        if of.len() > 1 {
            sheet.finding(Finding::Hand(format!(
                "{name}'s CPUs are of {list}: memory of the one is far from the other's CPUs; choose CPUs of one"
            )));
        }
        let memory = memory_kib(cx.look, name);
        let far = memory.iter().filter(|(node, _)| !of.contains(node));
        let (far, kib) = far.fold((Vec::new(), 0), |(mut far, sum), (node, kib)| {
            far.push(*node);
            (far, kib + sum)
        });
        if kib > 0 {
            sheet.finding(Finding::Hand(format!(
                "{} MiB of {name}'s memory are on {}, its CPUs are of {list}: start it with numactl --membind",
                kib >> 10,
                listed(&far)
            )));
        } else if memory.is_empty() {
            sheet.finding(Finding::Note(format!(
                "{name}'s CPUs are of {list}: its memory belongs there too (numactl --membind), and its devices; check says where it is while it runs"
            )));
        }
    }
}

/// `node0 and node1`
fn listed(nodes: &[u32]) -> String {
    let names: Vec<String> = nodes.iter().map(|node| format!("node{node}")).collect();
    names.join(" and ")
}

fn nodes(look: &dyn Look) -> BTreeMap<u32, CpuList> {
    let names = look.list(NODES).unwrap_or_default();
    let cpus = |name: &String| {
        let node = name.strip_prefix("node")?.parse().ok()?;
        let text = look.read(&format!("{NODES}/{name}/cpulist")).ok()?;
        Some((node, text.parse().unwrap_or_default()))
    };
    names.iter().filter_map(cpus).collect()
}

/// The memory of the guest that runs in a partition, by node; none while none runs.
fn memory_kib(look: &dyn Look, guest: &str) -> BTreeMap<u32, u64> {
    let pids = look.read(&format!("{}/cgroup.procs", cpuset::group(guest)));
    let mut sums = BTreeMap::new();
    for pid in pids.unwrap_or_default().lines() {
        let maps = look.read(&format!("/proc/{pid}/numa_maps"));
        for (node, kib) in maps.unwrap_or_default().lines().flat_map(mapping) {
            *sums.entry(node).or_default() += kib;
        }
    }
    sums
}

/// `7f00 default anon=65536 dirty=65536 N0=32768 N1=32768 kernelpagesize_kB=4`, when it is large.
fn mapping(line: &str) -> Vec<(u32, u64)> {
    let value = |word: &str, key: &str| word.strip_prefix(key)?.parse::<u64>().ok();
    let mut words = line.split_whitespace();
    let page_kib = words.find_map(|word| value(word, "kernelpagesize_kB="));
    let on_node = |word: &str| {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        let pages: u64 = pages.parse().ok()?;
        Some((node.parse().ok()?, pages.saturating_mul(page_kib?)))
    };
    let nodes: Vec<(u32, u64)> = line.split_whitespace().filter_map(on_node).collect();
    match nodes.iter().map(|(_, kib)| kib).sum::<u64>() {
        MAPPING_KIB.. => nodes,
        _ => Vec::new(),
    }
}
