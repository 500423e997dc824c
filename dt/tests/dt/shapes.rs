// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: any tree that Linux boots merges, or one line names the node; all of it that isn't the
//! machine's stays, byte for byte and in its order.

use proptest::array;
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, proptest};
use proptest::sample::Index;
use vcpufreq_dt::{MergeError, MergeNote, Seeds, TreeError, merge};

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

pub fn four_cpus() -> Vec<OrderedNode> {
    (0..4).map(|reg| cpu(&format!("cpu@{reg}"), reg)).collect()
}

pub fn cpus(children: impl IntoIterator<Item = OrderedNode>) -> OrderedNode {
    let cells = node("cpus").cells("#address-cells", &[1]);
    cells.cells("#size-cells", &[0]).children(children)
}

/// A tree of four CPUs, with these nodes behind them.
pub fn tree(others: impl IntoIterator<Item = OrderedNode>) -> OrderedNode {
    node("").child(cpus(four_cpus())).children(others)
}

pub fn merged(base: &OrderedNode) -> Result<OrderedNode, MergeError> {
    let machine = machine(little_big()).without_cpufreq();
    let merged = merge(&base.blob(), &machine, Seeds::Keep)?;
    Ok(OrderedNode::read(&merged.blob))
}

/// All of `base` is in `merged`, in the same order, but for what describes a CPU's performance.
pub fn stays(base: &OrderedNode, merged: &OrderedNode) {
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
    let merged = merge(&blob, &machine, Seeds::Keep).unwrap().blob;
    stays(&tree([]), &OrderedNode::read(&merged));
}

/// The table of each CPU, by its node's name; and the notes.
fn tables(base: &OrderedNode, boot_cpu: u32) -> (Vec<(String, u32)>, Vec<MergeNote>) {
    let mut blob = base.blob();
    blob[28..32].copy_from_slice(&boot_cpu.to_be_bytes());
    let machine = machine(little_big()).without_cpufreq();
    let merged = merge(&blob, &machine, Seeds::Keep).unwrap();
    let tree = OrderedNode::read(&merged.blob);
    let number = |cpu: &OrderedNode, name| {
        let value = cpu.property(name).unwrap().try_into().unwrap();
        u32::from_be_bytes(value)
    };
    let tables = ["opp-table-0", "opp-table-1"].map(|table| number(tree.at(table), "phandle"));
    let cpus = tree.at("cpus").children.iter();
    let cpus = cpus.filter(|cpu| cpu.property("operating-points-v2").is_some());
    let cpus = cpus.map(|cpu| {
        let table = number(cpu, "operating-points-v2");
        let table = tables.iter().position(|&phandle| phandle == table);
        (cpu.name.clone(), u32::try_from(table.unwrap()).unwrap())
    });
    (cpus.collect(), merged.notes)
}

#[test]
fn cpus_are_numbered_as_linux_does() {
    let of = |regs: [u32; 4]| {
        let cpus_of = regs.map(|reg| cpu(&format!("cpu@{reg:x}"), reg));
        node("").child(cpus(cpus_of))
    };
    let (exynos, dynamiq) = ([0x100, 0x101, 0, 1], [0, 1, 0x100, 0x200]);
    let falls = |node: &str| {
        let node = node.to_owned();
        vec![MergeNote::CpuOrder { node }]
    };
    let rows = [
        ("rising", dynamiq, 0, [0, 0, 1, 1], vec![]),
        (
            "the little ones first",
            exynos,
            0,
            [0, 0, 1, 1],
            falls("/cpus/cpu@0"),
        ),
        (
            "the last one boots",
            dynamiq,
            0x200,
            [0, 1, 1, 0],
            falls("/cpus/cpu@0"),
        ),
        ("none of them boots", dynamiq, 7, [0, 0, 1, 1], vec![]),
    ];
    for (name, regs, boot, wanted, notes) in rows {
        let (tables, found) = tables(&of(regs), boot);
        let names = regs.map(|reg| format!("cpu@{reg:x}"));
        assert_eq!(
            tables,
            names.into_iter().zip(wanted).collect::<Vec<_>>(),
            "{name}"
        );
        assert_eq!(found, notes, "{name}");
    }
}

#[test]
fn cpus_are_found_as_linux_does() {
    let wide = |reg: [u32; 2]| node(&format!("cpu@{:x}", reg[1])).cells("reg", &reg);
    let wide_cpus = [[0, 0], [0, 1], [1, 0], [1, 1]].map(wide);
    let two_cells = || node("cpus").cells("#address-cells", &[2]);
    let status = |cpu: OrderedNode, status: &str| cpu.with("status", status);
    let spare = || cpu("cpu@9", 9);
    let with = |others: Vec<OrderedNode>| node("").child(cpus(four_cpus()).children(others));
    let rows = [
        (
            "two cells",
            node("").child(two_cells().children(wide_cpus.clone())),
        ),
        (
            "the root's cells",
            node("")
                .cells("#address-cells", &[2])
                .child(node("cpus").children(wide_cpus)),
        ),
        (
            "no cells",
            node("").child(node("cpus").children(four_cpus())),
        ),
        (
            "a CPU that fails",
            with(vec![
                status(spare(), "fail-cache\0"),
                status(spare(), "fail\0"),
            ]),
        ),
        (
            "a disabled CPU is there",
            node("").child(cpus(
                four_cpus().into_iter().map(|cpu| status(cpu, "disabled\0")),
            )),
        ),
        (
            "a reg of several",
            node("").child(cpus((0..4).map(|n| node("cpu").cells("reg", &[n, n + 1])))),
        ),
        (
            "other names",
            node("").child(cpus(
                ["cpu@000", "a57@1", "cpu", "PowerPC,970"]
                    .into_iter()
                    .zip(0..)
                    .map(|(name, reg)| cpu(name, reg)),
            )),
        ),
        ("two /cpus", with(vec![]).child(cpus([spare()]))),
        (
            "other nodes",
            with(vec![node("l2-cache").cells("reg", &[1]), node("cpus")]),
        ),
    ];
    for (name, base) in rows {
        let merged = merged(&base).unwrap_or_else(|why| panic!("{name}: {why}"));
        stays(&base, &merged);
        let with = merged.at("cpus").children.iter();
        let with = with.filter(|cpu| cpu.property("capacity-dmips-mhz").is_some());
        assert_eq!(with.count(), 4, "{name}");
    }
}

fn table(name: &str, phandle: u32) -> OrderedNode {
    let opp = node("opp-1000000").with("opp-hz", 1_000_000_u64.to_be_bytes());
    let table = node(name).with("compatible", b"operating-points-v2\0");
    table.cells("phandle", &[phandle]).child(opp)
}

#[test]
fn opp_tables_that_others_use_stay() {
    let uses = |node: OrderedNode, table: u32| node.cells("operating-points-v2", &[table]);
    let of_cpus = four_cpus().into_iter().zip([1, 1, 2, 3]);
    let cpus = cpus(of_cpus.map(|(cpu, table)| uses(cpu, table)));
    let mut labelled = table("opp-table-3", 3);
    labelled.children[0] = labelled.children[0].clone().cells("phandle", &[5]);
    let kept = [
        table("opp-table-1", 2),
        labelled,
        table("opp-table-gpu", 4),
        uses(node("cache"), 2),
        uses(node("gpu"), 4),
        node("opp-table-5").with("about", b"nobody's"),
    ];
    let base = node("")
        .child(cpus)
        .child(table("opp-table-0", 1))
        .children(kept);
    let merged = merged(&base).unwrap();
    let mut without = base.clone();
    without.children.remove(1);
    stays(&without, &merged);
    // The machine's two tables take the names that are free.
    for (cpu, name) in [("cpu@0", "opp-table-0"), ("cpu@3", "opp-table-2")] {
        let table = merged.at(name);
        assert!(table.children.len() == 2, "{table:?}");
        let cpu = merged.at("cpus").at(cpu);
        assert_eq!(
            cpu.property("operating-points-v2"),
            table.property("phandle")
        );
    }
    let names = merged.children.iter().map(|child| child.name.as_str());
    assert_eq!(
        names.filter(|name| name.starts_with("opp-table-")).count(),
        6
    );
}

#[test]
fn idle_states_of_a_vmm_stay() {
    let state = node("cpu-sleep-0").cells("phandle", &[1]);
    let states = node("idle-states")
        .with("entry-method", b"psci\0")
        .child(state);
    let sleeping = four_cpus()
        .into_iter()
        .map(|cpu| cpu.cells("cpu-idle-states", &[1]));
    let base = node("").child(cpus(sleeping).child(states.clone()));
    let merged = merged(&base).unwrap();
    stays(&base, &merged);
    assert_eq!(*merged.at("cpus/idle-states"), states);
    for cpu in ["cpu@0", "cpu@3"] {
        let cpu = merged.at("cpus").at(cpu);
        assert_eq!(
            cpu.property("cpu-idle-states"),
            Some([0, 0, 0, 1].as_slice())
        );
    }
}

/// A name that Linux takes: of any printable characters, and of any length below its limit.
fn any_name() -> impl Strategy<Value = String> {
    "[ -~&&[^ /]]{1,12}|[a-z]{30,60}|__[a-z]{1,8}|cpu-map|idle-states|opp-table-[0-9]|chosen|socket[0-2]"
}

/// A node of up to five levels.
fn any_node() -> impl Strategy<Value = OrderedNode> {
    let of = |(name, properties, children)| OrderedNode {
        name,
        properties,
        children,
    };
    let leaf = (any_name(), any_properties(), Just(Vec::new())).prop_map(of);
    leaf.prop_recursive(4, 24, 4, move |inner| {
        (any_name(), any_properties(), vec(inner, 0..4)).prop_map(of)
    })
}

/// Without phandles, which have a test of their own.
fn any_properties() -> impl Strategy<Value = Vec<(String, Vec<u8>)>> {
    let name = any_name().prop_filter("a phandle", |name| !name.contains("phandle"));
    vec((name, vec(any::<u8>(), 0..9)), 0..4)
}

/// `base` with CPUs, of these regs, at these places among the children of `/cpus`.
fn with_cpus(mut base: OrderedNode, places: &[Index], regs: &[u32; 4]) -> OrderedNode {
    base.name = String::new();
    let mut parent = node("cpus").cells("#address-cells", &[1]);
    parent.children = base.children.split_off(base.children.len() / 2);
    for (at, &reg) in places.iter().zip(regs) {
        let at = at.index(parent.children.len() + 1);
        parent
            .children
            .insert(at, cpu(&format!("cpu@{reg:x}"), reg));
    }
    base.children.push(parent);
    base
}

proptest! {
    #[test]
    fn all_of_any_tree_stays(
        base in any_node(),
        places in array::uniform4(any::<Index>()),
        regs in Just([0, 1, 0x100, 0x10000]).prop_shuffle(),
    ) {
        let mut base = with_cpus(base, &places, &regs);
        let merged = merged(&base).unwrap();
        // What a merge may replace.
        let parent = base.children.last_mut().unwrap();
        parent.children.retain(|child| !["cpu-map", "idle-states"].contains(&child.name.as_str()));
        stays(&base, &merged);
        let again = self::merged(&merged).unwrap();
        assert_eq!(again.blob().len(), merged.blob().len());
    }
}
