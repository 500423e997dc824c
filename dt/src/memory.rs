// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The RAM that another VMM's tree describes.

use crate::base::{Base, BaseNode, TreeError};
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
    let ranges = nodes.flat_map(|node| {
        let reg = node.property("reg").unwrap_or_default();
        reg.chunks_exact(16).filter_map(range).collect::<Vec<_>>()
    });
    Ok(ranges.collect())
}

fn range(cells: &[u8]) -> Option<(u64, u64)> {
    let (address, size) = cells.split_first_chunk()?;
    let size = size.try_into().ok()?;
    Some((u64::from_be_bytes(*address), u64::from_be_bytes(size)))
}
