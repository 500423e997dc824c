// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The RAM that another VMM's tree describes, and the registers in it.

use crate::base::{Base, BaseNode, TreeError};
use crate::emit::{OVERLAY, REGISTERS, RESERVED_MEMORY};
use crate::facts::{CpufreqRegion, RESERVED, RegionKind};
use crate::phandles::has_two_cells;

/// Address and size of each range of RAM in `base`, in the order of its nodes; without those of a
/// root whose addresses and sizes aren't two cells each.
///
/// # Errors
/// [`TreeError`] for a base that is invalid.
pub fn memory(base: &[u8]) -> Result<Vec<(u64, u64)>, TreeError> {
    let tree = Base::read(base)?;
    if !has_two_cells(&tree.root) {
        return Ok(Vec::new());
    }
    let is_memory = |node: &&BaseNode<'_>| node.property("device_type") == Some(b"memory\0");
    let nodes = tree.root.children.iter().filter(is_memory);
    Ok(nodes.flat_map(ranges).collect())
}

/// Address and end of the initrd that the `/chosen` of `base` names, in one cell or two each; none
/// if it names none.
///
/// # Errors
/// [`TreeError`] for a base that is invalid.
pub fn initrd(base: &[u8]) -> Result<Option<(u64, u64)>, TreeError> {
    let tree = Base::read(base)?;
    let chosen = tree.root.children.iter().find(|node| node.name == "chosen");
    let cells = |name| number(chosen?.property(name)?);
    Ok(cells("linux,initrd-start").zip(cells("linux,initrd-end")))
}

/// The registers that `tree` has in the guest's RAM, as [`merge`](crate::merge()) or
/// [`overlay`](crate::overlay()) writes them of a [`RegionKind::GuestRam`]; none if it has other
/// registers, or none.
///
/// # Errors
/// [`TreeError`] for a tree that is invalid.
pub fn registers_in_ram(tree: &[u8]) -> Result<Option<CpufreqRegion>, TreeError> {
    let tree = Base::read(tree)?;
    let overlays = tree.root.children.iter().flat_map(|node| &node.children);
    let overlays = overlays.filter(|node| node.name == OVERLAY);
    let mut roots = [&tree.root].into_iter().chain(overlays);
    Ok(roots.find_map(registers_below))
}

fn registers_below(root: &BaseNode<'_>) -> Option<CpufreqRegion> {
    let children = || root.children.iter();
    let compatible = [REGISTERS.as_bytes(), b"\0"].concat();
    let is_device = |node: &&BaseNode<'_>| node.property("compatible") == Some(&*compatible);
    let device = children().find(is_device);
    let (base, size) = ranges(device?).first().copied()?;
    let reserved = children().filter(|node| node.name == RESERVED_MEMORY);
    let mut reserved = reserved.flat_map(|node| &node.children).flat_map(ranges);
    let region = CpufreqRegion {
        base,
        size,
        kind: RegionKind::GuestRam,
    };
    reserved
        .any(|range| range == (base, RESERVED))
        .then_some(region)
}

/// Those of a node in whose parent they are two cells each.
fn ranges(node: &BaseNode<'_>) -> Vec<(u64, u64)> {
    let reg = node.property("reg").unwrap_or_default();
    reg.chunks_exact(16).filter_map(range).collect()
}

fn number(cells: &[u8]) -> Option<u64> {
    match cells.len() {
        4 => Some(u32::from_be_bytes(cells.try_into().ok()?).into()),
        8 => Some(u64::from_be_bytes(cells.try_into().ok()?)),
        _ => None,
    }
}

fn range(cells: &[u8]) -> Option<(u64, u64)> {
    let (address, size) = cells.split_first_chunk()?;
    let size = size.try_into().ok()?;
    Some((u64::from_be_bytes(*address), u64::from_be_bytes(size)))
}
