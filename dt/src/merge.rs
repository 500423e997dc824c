// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A machine's nodes in the tree that another VMM made.
//!
//! The base is not trusted: [`crate::base`] checks it whole before a node is used.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use crate::base::{Base, BaseNode};
use crate::cpu_map;
use crate::cpus::{CpuNodes, path};
use crate::emit::{Nodes, PERFORMANCE, RESERVED_MEMORY, STANDBY, reserved_memory};
use crate::flat::flatten;
use crate::machine::Machine;
use crate::merge_error::MergeError;
use crate::node::Node;
use crate::phandles::{PHANDLES, Phandles, cell, has_two_cells, phandle};

const SEEDS: [&str; 2] = ["kaslr-seed", "rng-seed"];

/// What becomes of the base's random seeds (`/chosen/kaslr-seed` and
/// `rng-seed`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seeds {
    /// They stay: the tree is for one boot.
    Keep,
    /// They are left out: a guest that boots the tree again would have the same
    /// random numbers.
    Drop,
}

/// A merged tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergedTree {
    /// Its flattened form, without padding.
    pub blob: Vec<u8>,
    /// What its user may not expect of it.
    pub notes: Vec<MergeNote>,
}

/// What the user of a merged tree may not expect of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MergeNote {
    /// The base's cpu-map stays, though it has less clusters than the machine.
    ClustersJoined {
        /// Which of its clusters has CPUs of more than one.
        cluster: String,
        /// Of how many.
        of: usize,
    },
    /// A CPU's `reg` is below that of the one before it.
    CpuOrder {
        /// The CPU's node.
        node: String,
    },
    /// The base's cpu-map is one of which Linux takes nothing, and is replaced.
    MapReplaced,
}

/// One line, as the error of a tree that can't be merged.
impl fmt::Display for MergeNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClustersJoined { cluster, of } => write!(
                f,
                "the guest sees the tree's cpu-map, whose {cluster} has CPUs of {of} clusters: ask \
                 the VMM for clusters to part them (QEMU: -smp clusters=)"
            ),
            Self::CpuOrder { node } => write!(
                f,
                "vCPUs are the nodes in /cpus in their order, as Linux numbers them: see that the VMM \
                 numbers {node} so, whose reg is below the one before it"
            ),
            Self::MapReplaced => write!(
                f,
                "/cpus/cpu-map is replaced: it is wrong or lacks a CPU, and Linux takes no part of \
                 such a map"
            ),
        }
    }
}

/// Adds the machine's performance nodes to `base`, the tree of another VMM; without padding.
///
/// The base's nodes, phandles, memory reservations and boot CPU stay. Its CPUs are the machine's in
/// the order in which Linux numbers them; they keep their `reg`, and [`CpuFacts::reg`](crate::CpuFacts::reg) isn't used.
/// The base's cpu-map stays if Linux would take it, and so do idle states and OPP tables that aren't
/// of a merge. The other nodes and properties of [`dtb`](crate::dtb) replace the base's: OPP tables
/// that only its CPUs use, and in their nodes capacity, power coefficient and references to these.
/// So a tree can be merged again.
///
/// # Errors
/// [`MergeError`] for a base that is invalid or has other CPUs than the machine, or a result that
/// is larger than [`MAX_TREE`](crate::MAX_TREE). There is no tree then.
pub fn merge(base: &[u8], machine: &Machine, seeds: Seeds) -> Result<MergedTree, MergeError> {
    let mut tree = Base::read(base)?;
    let cpus = CpuNodes::find(&tree, machine.facts().cpus.len())?;
    let used = Phandles::read(&tree.root);
    let own = own_phandles(&cpus, &tree, &used)?;
    let nodes = used.first_free(Nodes::count(machine));
    let nodes = nodes.and_then(|first| Nodes::new(machine, first));
    let nodes = nodes.ok_or(MergeError::NoPhandles)?;
    let map = BaseMap::read(&tree.root.children[cpus.parent], &own, &used);
    let phandles: Vec<u32> = (0..)
        .zip(own)
        .filter_map(|(index, own)| own.or_else(|| nodes.cpu_phandle(index)))
        .collect();
    let nodes = nodes.with_cpu_phandles(&phandles);
    if nodes.cpufreq().is_some() && !has_two_cells(&tree.root) {
        return Err(MergeError::RootCells);
    }
    let old = old_nodes(&tree, &cpus, &nodes);
    edit_cpus(
        &mut tree.root.children[cpus.parent],
        &cpus.places,
        &nodes,
        &map,
    );
    edit_root(&mut tree.root, &old, &nodes);
    if seeds == Seeds::Drop {
        drop_seeds(&mut tree.root);
    }
    let order = cpus.falls_at.map(|node| MergeNote::CpuOrder { node });
    Ok(MergedTree {
        blob: flatten(&tree)?,
        notes: order.into_iter().chain(map.note(machine)).collect(),
    })
}

/// What the base says of sockets, clusters, cores and threads.
enum BaseMap {
    /// Nothing.
    Absent,
    /// What Linux takes no part of.
    Wrong,
    /// The cluster of each CPU.
    Valid(Vec<String>),
}

impl BaseMap {
    fn read(cpus: &BaseNode<'_>, phandles: &[Option<u32>], used: &Phandles) -> Self {
        match place(cpus, "cpu-map") {
            None => Self::Absent,
            Some(at) => cpu_map::clusters(&cpus.children[at], phandles, used)
                .map_or(Self::Wrong, Self::Valid),
        }
    }

    fn note(self, machine: &Machine) -> Option<MergeNote> {
        let clusters = match self {
            Self::Absent => return None,
            Self::Wrong => return Some(MergeNote::MapReplaced),
            Self::Valid(clusters) => clusters,
        };
        let mut joined: BTreeMap<String, BTreeSet<_>> = BTreeMap::new();
        for (cluster, cpu) in clusters.into_iter().zip(&machine.facts().cpus) {
            let own = (cpu.place.socket, cpu.place.cluster);
            joined.entry(cluster).or_default().insert(own);
        }
        let mut joined = joined.into_iter();
        let joined = joined.find(|(_, clusters)| clusters.len() > 1);
        joined.map(|(cluster, clusters)| MergeNote::ClustersJoined {
            cluster,
            of: clusters.len(),
        })
    }
}

/// Where the first child of this name is, whatever its address.
fn place(node: &BaseNode<'_>, name: &str) -> Option<usize> {
    let mut children = node.children.iter();
    children.position(|child| child.base_name() == name)
}

/// Puts `new` in the place of the first child of its name, or before all others.
fn replace(node: &mut BaseNode<'_>, name: &str, new: Option<Node>) {
    let old = place(node, name);
    let at = old.unwrap_or_default();
    let new = new.map(Node::into_base);
    node.children
        .splice(at..at + usize::from(old.is_some()), new);
}

/// The phandles of the base's CPUs, as far as they have some.
fn own_phandles(
    cpus: &CpuNodes,
    base: &Base<'_>,
    used: &Phandles,
) -> Result<Vec<Option<u32>>, MergeError> {
    let own = cpus.nodes(base).map(|cpu| match phandle(cpu) {
        Some(phandle) if used.has_twice(phandle) => Err(MergeError::Phandle {
            node: path(cpu),
            phandle,
        }),
        own => Ok(own),
    });
    own.collect()
}

/// Where those of the root's children are that the result doesn't have: OPP tables that only the
/// base's CPUs use, and the machine's registers.
fn old_nodes(base: &Base<'_>, cpus: &CpuNodes, nodes: &Nodes<'_>) -> HashSet<usize> {
    let (mut users, mut cpu_users) = (HashMap::new(), HashMap::new());
    count_users(&base.root, &mut users);
    cpus.nodes(base)
        .for_each(|cpu| count_users(cpu, &mut cpu_users));
    let registers = nodes.cpufreq().map(Node::into_base);
    let is_old = |node: &BaseNode<'_>| {
        let of_cpus = phandle(node).filter(|table| cpu_users.contains_key(table));
        let only = of_cpus.is_some_and(|table| users.get(&table) == cpu_users.get(&table));
        // Who else refers to one of its OPPs can't be seen.
        let is_table = only && node.children.iter().all(|opp| phandle(opp).is_none());
        is_table || registers.as_ref().is_some_and(|own| own.name == node.name)
    };
    let children = base.root.children.iter().enumerate();
    let old = children.filter(|(_, node)| is_old(node));
    old.map(|(place, _)| place).collect()
}

/// How many references there are to each OPP table, from this node and all below it.
fn count_users(node: &BaseNode<'_>, users: &mut HashMap<u32, usize>) {
    let tables = node.property("operating-points-v2").unwrap_or_default();
    for table in tables.chunks_exact(4).filter_map(cell) {
        *users.entry(table).or_default() += 1;
    }
    let children = node.children.iter();
    children.for_each(|child| count_users(child, users));
}

/// Whether a VMM gives its CPUs idle states.
fn has_own_states(cpus: &BaseNode<'_>) -> bool {
    place(cpus, "idle-states").is_some_and(|at| {
        let mut states = cpus.children[at].children.iter();
        states.any(|state| !STANDBY.contains(&state.base_name()))
    })
}

/// Puts what the machine has beside `/cpus` in the place of the old; tables get names that are free.
fn edit_root(root: &mut BaseNode<'_>, old: &HashSet<usize>, nodes: &Nodes<'_>) {
    let mut places = 0..;
    root.children
        .retain(|_| places.next().is_some_and(|place| !old.contains(&place)));
    let children = root.children.iter();
    let taken: HashSet<_> = children.map(|child| child.name.to_string()).collect();
    let names = (0_usize..).map(|n| format!("opp-table-{n}"));
    let names = names.filter(|name| !taken.contains(name));
    let tables = nodes.opp_tables().zip(names);
    let tables = tables.map(|(table, name)| table.named(name));
    let added = tables.chain(nodes.cpufreq()).map(Node::into_base);
    root.children.extend(added);
    if let Some(range) = nodes.reserved() {
        reserve(root, range);
    }
}

/// Adds a range to `/reserved-memory`, unless it is there.
fn reserve(root: &mut BaseNode<'_>, range: Node) {
    let Some(at) = place(root, RESERVED_MEMORY) else {
        return root.children.push(reserved_memory(range).into_base());
    };
    let range = range.into_base();
    let ranges = &mut root.children[at].children;
    ranges.retain(|own| own.name != range.name);
    ranges.push(range);
}

/// Puts what the machine has in `/cpus` there; its CPUs are at these places.
fn edit_cpus(cpus: &mut BaseNode<'_>, places: &[usize], nodes: &Nodes<'_>, map: &BaseMap) {
    let keep_states = has_own_states(cpus);
    let replaced = &PERFORMANCE[usize::from(keep_states)..];
    for (index, &place) in places.iter().enumerate() {
        let cpu = &mut cpus.children[place];
        let has_phandle = phandle(cpu).is_some();
        let is_new = |name: &str| match PHANDLES.contains(&name) {
            true => !has_phandle,
            false => replaced.contains(&name),
        };
        cpu.properties.retain(|(name, _)| !is_new(name));
        let new = nodes.performance(index).into_base().properties;
        let new = new.into_iter().filter(|(name, _)| is_new(name));
        cpu.properties.extend(new);
    }
    if !matches!(map, BaseMap::Valid(_)) {
        replace(cpus, "cpu-map", Some(nodes.cpu_map()));
    }
    if !keep_states {
        replace(cpus, "idle-states", nodes.idle_states());
    }
}

/// From `/chosen`, which may have an address.
fn drop_seeds(root: &mut BaseNode<'_>) {
    let children = root.children.iter_mut();
    for chosen in children.filter(|child| child.base_name() == "chosen") {
        chosen.properties.retain(|(name, _)| !SEEDS.contains(name));
    }
}
