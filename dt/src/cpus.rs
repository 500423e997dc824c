// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The CPUs of a base, as arm64 Linux finds and numbers them (`of_parse_and_init_cpus`).

use std::collections::HashSet;

use crate::base::{Base, BaseNode, shown};
use crate::checks::MPIDR_AFFINITY;
use crate::merge_error::MergeError;

/// The base's CPUs, which are the machine's, one for one.
pub struct CpuNodes {
    /// Where `/cpus` is among the root's children.
    pub parent: usize,
    /// Where they are among its children, in the order of their numbers.
    pub places: Vec<usize>,
    /// The first CPU whose `reg` is below that of the one before it: its VMM may number CPUs
    /// otherwise.
    pub falls_at: Option<String>,
}

impl CpuNodes {
    /// As many as are wanted.
    pub fn find(base: &Base<'_>, wanted: usize) -> Result<Self, MergeError> {
        let nodes = &base.root.children;
        let parent = nodes.iter().position(|child| child.name == "cpus");
        let parent = parent.ok_or(MergeError::NoCpus)?;
        let cpus = &nodes[parent];
        let places = cpus.children.iter().enumerate();
        let places: Vec<usize> = places
            .filter(|(_, node)| is_cpu(node))
            .map(|(place, _)| place)
            .collect();
        if places.len() != wanted {
            let found = places.len();
            return Err(MergeError::CpuCount { found, wanted });
        }
        let nodes = places.iter().map(|&place| &cpus.children[place]);
        let regs = regs(nodes.clone(), address_cells(&base.root, cpus))?;
        let mut places: Vec<_> = places.iter().copied().zip(regs.iter().copied()).collect();
        // The boot CPU is 0. Where it isn't known, compilers leave 0 in the header; then the first
        // one is.
        let boot = u64::from(base.boot_cpu);
        if boot != 0 {
            places.sort_by_key(|&(_, reg)| reg != boot);
        }
        let mut pairs = places.windows(2);
        let fall = pairs.find(|pair| pair[1].1 < pair[0].1);
        Ok(Self {
            parent,
            falls_at: fall.map(|pair| path(&cpus.children[pair[1].0])),
            places: places.into_iter().map(|(place, _)| place).collect(),
        })
    }

    /// Their nodes in `base`, where they were found.
    pub fn nodes<'b, 'a>(&self, base: &'b Base<'a>) -> impl Iterator<Item = &'b BaseNode<'a>> {
        let parent = &base.root.children[self.parent];
        self.places.iter().map(|&place| &parent.children[place])
    }
}

/// A CPU's path for a message.
pub fn path(cpu: &BaseNode<'_>) -> String {
    shown(&["cpus", &cpu.name])
}

/// As `of_get_next_cpu_node` sees it.
fn is_cpu(node: &BaseNode<'_>) -> bool {
    let fails = node.property("status").is_some_and(|status| {
        // With a reason, or without.
        status.starts_with(b"fail-") || status.starts_with(b"fail\0")
    });
    let is_cpu = node.base_name() == "cpu" || node.property("device_type") == Some(b"cpu\0");
    is_cpu && !fails
}

/// The affinity of each CPU: what Linux skips, and what two have, is refused.
fn regs<'b, 'a: 'b>(
    cpus: impl Iterator<Item = &'b BaseNode<'a>>,
    cells: usize,
) -> Result<Vec<u64>, MergeError> {
    let mut seen = HashSet::new();
    cpus.map(|cpu| {
        let reg = reg(cpu, cells).filter(|&reg| reg & !MPIDR_AFFINITY == 0 && seen.insert(reg));
        reg.ok_or_else(|| MergeError::CpuReg { node: path(cpu) })
    })
    .collect()
}

/// As `of_get_cpu_hwid` reads it: the first one of several.
fn reg(cpu: &BaseNode<'_>, cells: usize) -> Option<u64> {
    let value = cpu.property("reg")?.get(..cells.checked_mul(4)?)?;
    let wide = value.len().min(8);
    let low = value.get(value.len() - wide..)?;
    let mut reg = [0; 8];
    reg[8 - wide..].copy_from_slice(low);
    (wide != 0).then_some(u64::from_be_bytes(reg))
}

/// As `of_n_addr_cells`.
fn address_cells(root: &BaseNode<'_>, cpus: &BaseNode<'_>) -> usize {
    let cells = |node: &BaseNode<'_>| {
        let cells = node.property("#address-cells")?.first_chunk()?;
        usize::try_from(u32::from_be_bytes(*cells)).ok()
    };
    cells(cpus).or_else(|| cells(root)).unwrap_or(1)
}
