// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: any tree that Linux boots merges, or one line names the node; all of it that isn't the
//! machine's stays, byte for byte and in its order.

use vcpufreq_dt::{MergeError, Seeds, TreeError, merge};

use crate::ordered::{OrderedNode, node};
use crate::samples::{little_big, machine};

/// What the machine's nodes replace.
const OURS: [&str; 4] = [
    "cpu-idle-states",
    "capacity-dmips-mhz",
    "operating-points-v2",
    "dynamic-power-coefficient",
];

fn cpu(name: &str, reg: u32) -> OrderedNode {
    node(name)
        .with("device_type", b"cpu\0")
        .cells("reg", &[reg])
}

fn four_cpus() -> Vec<OrderedNode> {
    (0..4).map(|reg| cpu(&format!("cpu@{reg}"), reg)).collect()
}

fn cpus(children: impl IntoIterator<Item = OrderedNode>) -> OrderedNode {
    let cells = node("cpus").cells("#address-cells", &[1]);
    cells.cells("#size-cells", &[0]).children(children)
}

/// A tree of four CPUs, with these nodes behind them.
fn tree(others: impl IntoIterator<Item = OrderedNode>) -> OrderedNode {
    node("").child(cpus(four_cpus())).children(others)
}

fn merged(base: &OrderedNode) -> Result<OrderedNode, MergeError> {
    let machine = machine(little_big()).without_cpufreq();
    let blob = merge(&base.blob(), &machine, Seeds::Keep)?;
    Ok(OrderedNode::read(&blob))
}

/// All of `base` is in `merged`, in the same order, but for what describes a CPU's performance.
fn stays(base: &OrderedNode, merged: &OrderedNode) {
    let mut left = merged.properties.iter();
    let kept = base.properties.iter();
    for property in kept.filter(|(name, _)| !OURS.contains(&name.as_str())) {
        let found = left.any(|other| other == property);
        assert!(found, "{property:?} of {}", base.name);
    }
    let mut left = merged.children.iter();
    for child in &base.children {
        let found = left.find(|other| other.name == child.name);
        let found = found.unwrap_or_else(|| panic!("{} of {}", child.name, base.name));
        stays(child, found);
    }
}

#[test]
fn a_tree_of_any_names_stays_as_it_is() {
    let long = "vendor,a-name-of-more-than-31-characters";
    let rows = [
        (
            "what dtc -@ adds",
            tree([
                node("__symbols__").with("cpu0", b"/cpus/cpu@0\0"),
                node("__fixups__").with("gic", b"/:interrupt-parent:0\0"),
                node("__local_fixups__").child(node("soc").cells("clocks", &[0])),
            ]),
        ),
        (
            "long names",
            tree([node(&format!("{long}@1000")).with(long, b"")]),
        ),
        (
            "the longest property name",
            tree([node("a").with(&"p".repeat(255), b"\0")]),
        ),
        (
            "odd names",
            tree([node("1wire").with("Caps_&_more!", b"x"), node("a@b@c")]),
        ),
        (
            "an older phandle",
            tree([node("a").cells("linux,phandle", &[7])]),
        ),
        (
            "a property twice",
            tree([node("a").with("b", b"1").with("b", b"2")]),
        ),
        (
            "a node twice",
            tree([node("a").with("b", b"1"), node("a").with("b", b"2")]),
        ),
        (
            "the same phandle twice",
            tree([
                node("a").cells("phandle", &[7]),
                node("b").cells("phandle", &[7]),
            ]),
        ),
    ];
    for (name, base) in rows {
        let merged = merged(&base).unwrap_or_else(|why| panic!("{name}: {why}"));
        stays(&base, &merged);
        assert!(
            merged
                .at("cpus/cpu@3")
                .property("capacity-dmips-mhz")
                .is_some(),
            "{name}"
        );
    }
}

#[test]
fn a_line_names_the_node_that_is_not_taken() {
    let deep = || node("outer").child(node("inner@7"));
    let inner = || "/outer/inner@7".to_owned();
    let name = |node: &str, at| TreeError::Name {
        node: node.to_owned(),
        at,
    };
    let mut named = tree([]);
    named.children.insert(0, deep());
    let mut rows = Vec::new();
    for property in ["p".repeat(256), "two words".to_owned(), String::new()] {
        let mut base = named.clone();
        base.children[0].children[0] = node("inner@7").with(&property, b"");
        rows.push((base.blob(), name(&inner(), 40)));
    }
    let mut base = named.clone();
    base.children[0].children[0].name = "two words".to_owned();
    rows.push((base.blob(), name("/outer", 24)));
    // The tag of the second child becomes a property's.
    let mut late = tree([]);
    late.children
        .insert(0, node("outer").child(node("in")).child(node("a")));
    let mut blob = late.blob();
    let child = blob
        .windows(4)
        .position(|bytes| bytes == b"a\0\0\0")
        .unwrap();
    blob[child - 4..child].copy_from_slice(&3_u32.to_be_bytes());
    rows.push((
        blob,
        TreeError::LateProperty {
            node: "/outer".to_owned(),
            at: 32,
        },
    ));
    for (blob, error) in rows {
        let machine = machine(little_big()).without_cpufreq();
        let found = merge(&blob, &machine, Seeds::Drop).unwrap_err();
        assert!(!found.to_string().contains('\n'), "{found}");
        assert_eq!(found, MergeError::NotATree(error));
    }
}

#[test]
fn phandles_may_be_the_last_ones() {
    let base = tree([
        node("a").cells("phandle", &[u32::MAX - 1]),
        node("b").cells("phandle", &[3]),
    ]);
    let merged = merged(&base).unwrap();
    stays(&base, &merged);
    let phandle = merged.at("opp-table-1").property("phandle").unwrap();
    assert_eq!(
        merged.at("cpus/cpu@3").property("operating-points-v2"),
        Some(phandle)
    );
    let phandle = u32::from_be_bytes(phandle.try_into().unwrap());
    assert!((4..100).contains(&phandle), "{phandle}");
}

#[test]
fn a_tree_of_the_version_before_merges() {
    let mut blob = tree([]).blob();
    blob[20..24].copy_from_slice(&16_u32.to_be_bytes());
    // Where the size of the structure is in the next version.
    blob[36..40].fill(0xff);
    let machine = machine(little_big()).without_cpufreq();
    let merged = merge(&blob, &machine, Seeds::Keep).unwrap();
    stays(&tree([]), &OrderedNode::read(&merged));
}
