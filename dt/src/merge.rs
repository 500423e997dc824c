// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A machine's nodes in the tree that another VMM made.
//!
//! The base is not trusted: [`crate::base`] checks it whole before a node is used.

use std::collections::HashSet;

use thiserror::Error;
use vm_fdt::{FdtReserveEntry, FdtWriter, FdtWriterNode, FdtWriterResult};

use crate::base::{Base, BaseNode, MAX_DEPTH, MAX_TREE, TreeError};
use crate::emit::{Nodes, PERFORMANCE};
use crate::machine::Machine;
use crate::node::Node;

const PHANDLES: [&str; 2] = ["phandle", "linux,phandle"];
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

/// Why a tree can't be merged with a machine.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum MergeError {
    /// Base or result is larger than [`MAX_TREE`].
    #[error("a tree of {size} bytes, Linux takes {MAX_TREE}")]
    TooLarge {
        /// Its size.
        size: usize,
    },
    /// The base breaks the flattened form, or ends too soon.
    #[error("no whole flattened device tree: {0}")]
    NotATree(#[source] TreeError),
    /// Nodes are nested deeper than any machine's.
    #[error("nodes are nested deeper than {MAX_DEPTH}")]
    TooDeep,
    /// The base has no `/cpus`.
    #[error("no node /cpus")]
    NoCpus,
    /// The base has another number of CPUs than the machine.
    #[error("{found} CPUs in the tree, {wanted} asked for")]
    CpuCount {
        /// The base's.
        found: usize,
        /// The machine's.
        wanted: usize,
    },
    /// A CPU's `reg` is missing, or not above that of the CPU before it: the
    /// guest would number its CPUs otherwise than the VMM.
    #[error("the reg of {node} is missing or does not rise")]
    CpuOrder {
        /// The CPU's node.
        node: String,
    },
    /// The base's phandles leave too few numbers above them.
    #[error("not enough phandles left above {largest:#x}")]
    NoPhandles {
        /// The largest one in the base.
        largest: u32,
    },
    /// The machine has registers, for whose node the root needs 2 and 2 cells.
    #[error("the root's #address-cells and #size-cells are not 2, as the cpufreq node needs")]
    RootCells,
    /// The writer refuses a node of the base.
    #[error("node {node}: {error}")]
    Node {
        /// Its name.
        node: String,
        /// Why.
        error: vm_fdt::Error,
    },
    /// The writer refuses anything else.
    #[error("{0}")]
    Write(#[from] vm_fdt::Error),
}

impl From<TreeError> for MergeError {
    fn from(error: TreeError) -> Self {
        match error {
            TreeError::TooLarge { size } => Self::TooLarge { size },
            TreeError::TooDeep => Self::TooDeep,
            broken => Self::NotATree(broken),
        }
    }
}

/// Adds the machine's performance nodes to `base`, the tree of another VMM; without padding.
///
/// The base's nodes, phandles, memory reservations and boot CPU stay. Its CPUs are the machine's in
/// the same order; they keep their `reg`, and [`CpuFacts::reg`](crate::CpuFacts::reg) isn't used.
/// The nodes and properties of [`dtb`](crate::dtb) replace the base's: the cpu-map, idle states,
/// the OPP tables of its CPUs, and in their nodes capacity, power coefficient and references to
/// these. So a tree can be merged again.
///
/// # Errors
/// [`MergeError`] for a base that is invalid or has other CPUs than the machine, or a result that
/// is larger than [`MAX_TREE`]. There is no tree then.
pub fn merge(base: &[u8], machine: &Machine, seeds: Seeds) -> Result<Vec<u8>, MergeError> {
    let tree = Base::read(base)?;
    let root = &tree.root;
    let largest = largest_phandle(root);
    let cpus = cpus_in_order(root, machine)?;
    let nodes = largest.checked_add(1);
    let nodes = nodes.and_then(|first| Nodes::new(machine, first));
    let nodes = nodes.ok_or(MergeError::NoPhandles { largest })?;
    let phandles: Vec<u32> = (0..)
        .zip(&cpus)
        .filter_map(|(index, cpu)| phandle(cpu).or_else(|| nodes.cpu_phandle(index)))
        .collect();
    let nodes = nodes.with_cpu_phandles(&phandles);
    let added: Vec<Node> = nodes.opp_tables().chain(nodes.cpufreq()).collect();
    if nodes.cpufreq().is_some() && !has_two_cells(root) {
        return Err(MergeError::RootCells);
    }
    let merge = Merge {
        machine,
        nodes,
        replaced: replaced(root, &cpus, &added),
        seeds,
    };
    let merged = merge.write(&tree, &added)?;
    match merged.len() {
        size if size > MAX_TREE => Err(MergeError::TooLarge { size }),
        _ => Ok(merged),
    }
}

fn cell(value: &[u8]) -> Option<u32> {
    value.try_into().ok().map(u32::from_be_bytes)
}

/// A property of one cell.
fn cell_of(node: &BaseNode<'_>, name: &str) -> Option<u32> {
    cell(node.property(name)?)
}

fn phandle(node: &BaseNode<'_>) -> Option<u32> {
    let phandle = PHANDLES.iter().find_map(|name| cell_of(node, name));
    phandle.filter(|&phandle| phandle != 0)
}

/// 0 if no node has one.
fn largest_phandle(node: &BaseNode<'_>) -> u32 {
    let below = node.children.iter().map(largest_phandle).max();
    phandle(node).max(below).unwrap_or(0)
}

/// As Linux' `of_get_next_cpu_node` sees it.
fn is_cpu(node: &BaseNode<'_>) -> bool {
    let name = node.name.split('@').next();
    name == Some("cpu") || node.property("device_type") == Some(b"cpu\0")
}

/// The CPUs of the base, which are the machine's, one for one.
fn cpus_in_order<'b, 'a>(
    root: &'b BaseNode<'a>,
    machine: &Machine,
) -> Result<Vec<&'b BaseNode<'a>>, MergeError> {
    let node = root.children.iter().find(|child| child.name == "cpus");
    let node = node.ok_or(MergeError::NoCpus)?;
    let cpus: Vec<_> = node.children.iter().filter(|child| is_cpu(child)).collect();
    let (found, wanted) = (cpus.len(), machine.facts().cpus.len());
    if found != wanted {
        return Err(MergeError::CpuCount { found, wanted });
    }
    let mut previous = None;
    for &cpu in &cpus {
        let reg = cpu.property("reg").and_then(number);
        if reg <= previous {
            let node = cpu.name.to_owned();
            return Err(MergeError::CpuOrder { node });
        }
        previous = reg;
    }
    Ok(cpus)
}

/// A number of one or two cells.
fn number(value: &[u8]) -> Option<u64> {
    let wide = || value.try_into().ok().map(u64::from_be_bytes);
    cell(value).map(u64::from).or_else(wide)
}

fn has_two_cells(root: &BaseNode<'_>) -> bool {
    let names = ["#address-cells", "#size-cells"];
    names.iter().all(|name| cell_of(root, name) == Some(2))
}

/// The root's children that the result doesn't have: the OPP tables of the
/// base's CPUs, and what has the name of a node that is added.
fn replaced(root: &BaseNode<'_>, cpus: &[&BaseNode<'_>], added: &[Node]) -> HashSet<String> {
    let table = |cpu: &&BaseNode<'_>| cell_of(cpu, "operating-points-v2");
    let tables: HashSet<u32> = cpus.iter().filter_map(table).collect();
    let is_table = |node: &&BaseNode<'_>| phandle(node).is_some_and(|own| tables.contains(&own));
    let old = root.children.iter().filter(is_table);
    let added = added.iter().map(|node| node.name().to_owned());
    old.map(|node| node.name.to_owned()).chain(added).collect()
}

struct Merge<'a> {
    machine: &'a Machine,
    nodes: Nodes<'a>,
    replaced: HashSet<String>,
    seeds: Seeds,
}

impl Merge<'_> {
    fn write(&self, base: &Base<'_>, added: &[Node]) -> Result<Vec<u8>, MergeError> {
        let reserved = base.reservations.iter();
        let reserved = reserved.map(|&(address, size)| FdtReserveEntry::new(address, size));
        let reserved: Vec<_> = reserved.collect::<FdtWriterResult<_>>()?;
        let mut fdt = FdtWriter::new_with_mem_reserv(&reserved)?;
        fdt.set_boot_cpuid_phys(base.boot_cpu);
        let open = begin(&base.root, &mut fdt, &[])?;
        for child in &base.root.children {
            match child.name {
                "cpus" => self.write_cpus(child, &mut fdt)?,
                "chosen" if self.seeds == Seeds::Drop => copy(child, &mut fdt, &SEEDS)?,
                name if self.replaced.contains(name) => {}
                _ => copy(child, &mut fdt, &[])?,
            }
        }
        for node in added {
            node.write(&mut fdt)?;
        }
        fdt.end_node(open)?;
        Ok(fdt.finish()?)
    }

    fn write_cpus(&self, cpus: &BaseNode<'_>, fdt: &mut FdtWriter) -> Result<(), MergeError> {
        let open = begin(cpus, fdt, &[])?;
        self.nodes.cpu_map().write(fdt)?;
        if let Some(states) = self.nodes.idle_states() {
            states.write(fdt)?;
        }
        let mut facts = self.machine.facts().cpus.iter().enumerate();
        for child in &cpus.children {
            if is_cpu(child) {
                let Some((index, cpu)) = facts.next() else {
                    continue; // Both have as many.
                };
                let performance = self.nodes.performance(index, cpu);
                write_cpu(child, &performance, fdt)?;
            } else if !["cpu-map", "idle-states"].contains(&child.name) {
                copy(child, fdt, &[])?;
            }
        }
        Ok(fdt.end_node(open)?)
    }
}

fn write_cpu(
    node: &BaseNode<'_>,
    performance: &Node,
    fdt: &mut FdtWriter,
) -> Result<(), MergeError> {
    let open = begin(node, fdt, &[&PERFORMANCE[..], &PHANDLES].concat())?;
    performance.write_properties(fdt)?;
    end(node, fdt, open)
}

/// Copies a node with all below it, but for its properties of these names.
fn copy(node: &BaseNode<'_>, fdt: &mut FdtWriter, without: &[&str]) -> Result<(), MergeError> {
    let open = begin(node, fdt, without)?;
    end(node, fdt, open)
}

/// Begins a copy of a node: its properties, but for those of these names.
fn begin(
    node: &BaseNode<'_>,
    fdt: &mut FdtWriter,
    without: &[&str],
) -> Result<FdtWriterNode, MergeError> {
    let mut write = || {
        let open = fdt.begin_node(node.name)?;
        for &(name, value) in &node.properties {
            match (name, cell(value)) {
                _ if without.contains(&name) => {}
                // The writer finds one that is there twice.
                ("phandle", Some(phandle)) => fdt.property_phandle(phandle)?,
                _ => fdt.property(name, value)?,
            }
        }
        Ok(open)
    };
    let of_node = |error| MergeError::Node {
        node: node.name.to_owned(),
        error,
    };
    write().map_err(of_node)
}

/// Ends it: what is below the node.
fn end(node: &BaseNode<'_>, fdt: &mut FdtWriter, open: FdtWriterNode) -> Result<(), MergeError> {
    for child in &node.children {
        copy(child, fdt, &[])?;
    }
    Ok(fdt.end_node(open)?)
}
