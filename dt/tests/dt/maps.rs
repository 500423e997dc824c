// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: what a tree says of sockets, clusters, cores and threads stays; a map that Linux gives up
//! is replaced, and a line says so.

use vcpufreq_dt::{MergeNote, MergedTree, Seeds, merge};

use crate::ordered::{OrderedNode, node};
use crate::samples::{little_big, machine};
use crate::shapes::{cpus, four_cpus, merged, stays, tree};

fn refers(name: &str, cpu: u32) -> OrderedNode {
    node(name).cells("cpu", &[cpu + 10])
}

fn two_cores(first: u32) -> [OrderedNode; 2] {
    [refers("core0", first), refers("core1", first + 1)]
}

/// A tree with this map of four CPUs, whose phandles are from 10 on.
fn with_map(map: OrderedNode) -> OrderedNode {
    let cpus_with_phandles = four_cpus().into_iter().zip(10..);
    let four = cpus_with_phandles.map(|(cpu, phandle)| cpu.cells("phandle", &[phandle]));
    let other = node("other").cells("phandle", &[9]);
    node("").children([cpus([map].into_iter().chain(four)), other])
}

fn merged_map(map: &OrderedNode) -> (OrderedNode, Vec<MergeNote>) {
    let machine = machine(little_big()).without_cpufreq();
    let MergedTree { blob, notes } = merge(&with_map(map.clone()).blob(), &machine, Seeds::Keep)
        .unwrap_or_else(|why| panic!("{why}: {map:#?}"));
    (OrderedNode::read(&blob).at("cpus/cpu-map").clone(), notes)
}

#[test]
fn what_the_tree_says_of_sockets_clusters_cores_and_threads_stays() {
    let threads = |first| {
        let threads = [refers("thread0", first), refers("thread1", first + 1)];
        node("cluster0").child(node("core0").children(threads))
    };
    let sockets = [
        node("socket0").child(threads(0)),
        node("socket1").child(threads(2)),
    ];
    let nested = [
        node("cluster0").children(two_cores(0)),
        node("cluster1").children(two_cores(2)),
    ];
    let far = refers("core2", 0).cells("cpu", &[9]);
    let rows = [
        ("sockets and threads", node("cpu-map").children(sockets)),
        ("clusters", node("cpu-map").children(nested.clone())),
        (
            "clusters of clusters",
            node("cpu-map").child(node("cluster0").children(nested.clone())),
        ),
        (
            "with an address",
            node("cpu-map@0").children(nested.clone()),
        ),
        (
            "a core of another node",
            node("cpu-map").children(
                nested
                    .clone()
                    .map(|c| c.child(node("core2").cells("cpu", &[9]))),
            ),
        ),
        (
            "an empty cluster",
            node("cpu-map")
                .children(nested.clone())
                .child(node("cluster2")),
        ),
        (
            "anything else",
            node("cpu-map")
                .children(nested)
                .child(node("notes").child(far)),
        ),
    ];
    for (name, map) in rows {
        let base = with_map(map.clone());
        let machine = machine(little_big()).without_cpufreq();
        let merged = merge(&base.blob(), &machine, Seeds::Keep).unwrap();
        assert_eq!(merged.notes, [], "{name}");
        let tree = OrderedNode::read(&merged.blob);
        assert_eq!(*tree.at(&format!("cpus/{}", map.name)), map, "{name}");
        stays(&base, &tree);
    }
}

#[test]
fn a_tree_without_a_map_gets_the_machines() {
    let tree = merged(&tree([])).unwrap();
    let map = tree.at("cpus/cpu-map");
    assert_eq!(map.children.len(), 2);
    let phandle = tree.at("cpus/cpu@3").property("phandle");
    assert!(phandle.is_some());
    assert_eq!(map.at("cluster1/core1").property("cpu"), phandle);
}

#[test]
fn a_line_says_that_the_trees_clusters_join_the_machines() {
    let cores = [two_cores(0), two_cores(2)].concat().into_iter().zip(0..);
    let cores = cores.map(|(core, n)| OrderedNode {
        name: format!("core{n}"),
        ..core
    });
    let map = node("cpu-map").child(node("socket0").child(node("cluster0").children(cores)));
    let (kept, notes) = merged_map(&map);
    assert_eq!(kept, map);
    let cluster = "socket0/cluster0".to_owned();
    assert_eq!(notes, [MergeNote::ClustersJoined { cluster, of: 2 }]);
}

/// Linux gives up the whole map for each of these, and with it the capacities.
#[test]
fn a_map_that_linux_gives_up_is_replaced_with_a_line() {
    let cluster = |n: u32| node(&format!("cluster{n}")).children(two_cores(2 * n));
    let clusters = |others: Vec<OrderedNode>| node("cpu-map").child(cluster(0)).children(others);
    let both = node("core1")
        .cells("cpu", &[13])
        .child(refers("thread0", 3));
    let rows = [
        ("empty", node("cpu-map").child(node("socket0"))),
        ("lacks CPUs", clusters(vec![])),
        (
            "a gap",
            clusters(vec![OrderedNode {
                name: "cluster2".to_owned(),
                ..cluster(1)
            }]),
        ),
        (
            "a core without a cluster",
            clusters(vec![cluster(1), refers("core0", 0)]),
        ),
        (
            "a core beside clusters",
            clusters(vec![
                node("cluster1").child(cluster(0)).children(two_cores(2)),
            ]),
        ),
        (
            "a reference to no node",
            clusters(vec![node("cluster1").children([
                refers("core0", 2),
                node("core1").cells("cpu", &[99]),
            ])]),
        ),
        (
            "no reference",
            clusters(vec![
                node("cluster1").children([refers("core0", 2), node("core1")]),
            ]),
        ),
        (
            "a core and its thread",
            clusters(vec![node("cluster1").children([refers("core0", 2), both])]),
        ),
    ];
    for (name, map) in rows {
        let (new, notes) = merged_map(&map);
        assert_eq!(notes, [MergeNote::MapReplaced], "{name}");
        assert_eq!(new.at("cluster1/core1"), &refers("core1", 3), "{name}");
        assert!(!notes[0].to_string().contains('\n'));
    }
}
