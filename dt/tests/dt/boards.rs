// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promise: the trees of real boards, as Debian's kernels bring them, merge, and keep all that isn't
//! the machine's.

use std::fs;

use vcpufreq_dt::{MergeNote, Seeds, merge};

use crate::debian_trees::debian_trees;
use crate::ordered::OrderedNode;
use crate::samples::{cpus, machine};
use crate::shapes::stays;

fn cpu_nodes(base: &OrderedNode) -> Vec<&OrderedNode> {
    let cpus = base.children.iter().find(|node| node.name == "cpus");
    let children = cpus.iter().flat_map(|cpus| &cpus.children);
    // Linux leaves out a CPU that has failed.
    let works = |node: &OrderedNode| node.property("status") != Some(b"fail\0");
    let found = children.filter(|node| node.name.starts_with("cpu@") && works(node));
    found.collect()
}

/// Whether the numbers of a cluster's cores have a gap, behind which Linux sees none: of such a map, as
/// MT8370's, it takes nothing.
fn has_gap(map: &OrderedNode) -> bool {
    let names = map.children.iter().map(|child| child.name.as_str());
    let cores: Vec<_> = names.filter(|name| name.starts_with("core")).collect();
    let is_there = |number: usize| cores.contains(&format!("core{number}").as_str());
    !(0..cores.len()).all(is_there) || map.children.iter().any(has_gap)
}

/// Without the tables of its CPUs, in whose place the machine's are.
fn without_tables_of_cpus(base: &OrderedNode) -> OrderedNode {
    let tables = cpu_nodes(base).into_iter();
    let tables = tables.filter_map(|cpu| cpu.property("operating-points-v2"));
    let tables: Vec<&[u8]> = tables.flat_map(|cells| cells.chunks(4)).collect();
    let is_table = |node: &OrderedNode| {
        let phandle = node.property("phandle");
        phandle.is_some_and(|phandle| tables.contains(&phandle))
    };
    let mut base = base.clone();
    retain(&mut base, &|node| !is_table(node));
    base
}

fn retain(node: &mut OrderedNode, keep: &dyn Fn(&OrderedNode) -> bool) {
    node.children.retain(keep);
    let children = node.children.iter_mut();
    children.for_each(|child| retain(child, keep));
}

#[test]
fn trees_of_real_boards_keep_what_is_theirs() {
    let Some(boards) = debian_trees() else {
        return;
    };
    let mut refused = Vec::new();
    let mut merged_count = 0;
    for file in &boards {
        let blob = fs::read(file).unwrap();
        let base = OrderedNode::read(&blob);
        let facts = cpus(&vec![(1024, 1_000_000); cpu_nodes(&base).len()]);
        match merge(&blob, &machine(facts), Seeds::Keep) {
            Ok(merged) => {
                let mut base = without_tables_of_cpus(&base);
                if merged.notes.contains(&MergeNote::MapReplaced) {
                    assert!(has_gap(base.at("cpus/cpu-map")), "{}", file.display());
                    retain(&mut base, &|node| node.name != "cpu-map");
                }
                stays(&base, &OrderedNode::read(&merged.blob));
                merged_count += 1;
            }
            Err(error) => refused.push(format!("{}: {error}", file.display())),
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
    assert!(merged_count > 100, "{merged_count} of {}", boards.len());
}
