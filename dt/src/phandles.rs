// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The numbers by which a base's nodes refer to each other.

use std::iter;

use crate::base::BaseNode;

pub const PHANDLES: [&str; 2] = ["phandle", "linux,phandle"];

/// All phandles of a tree, rising.
pub struct Phandles(Vec<u32>);

impl Phandles {
    pub fn read(root: &BaseNode<'_>) -> Self {
        let mut all = Vec::new();
        collect(root, &mut all);
        all.sort_unstable();
        Self(all)
    }

    /// The first of so many free numbers in a row, above those in use if they fit there.
    pub fn first_free(&self, count: u32) -> Option<u32> {
        let last = self.0.last().copied().unwrap_or_default();
        let above = last.checked_add(1);
        let above = above.filter(|first| first.checked_add(count).is_some());
        above.or_else(|| {
            let starts = iter::once(1).chain(self.0.iter().map(|used| used + 1));
            let mut gaps = starts.zip(&self.0);
            let gap = gaps.find(|&(start, &used)| used.saturating_sub(start) >= count);
            gap.map(|(start, _)| start)
        })
    }

    pub fn has(&self, phandle: u32) -> bool {
        self.0.binary_search(&phandle).is_ok()
    }

    pub fn has_twice(&self, phandle: u32) -> bool {
        let from = self.0.partition_point(|&other| other < phandle);
        self.0.get(from + 1) == Some(&phandle)
    }
}

fn collect(node: &BaseNode<'_>, all: &mut Vec<u32>) {
    all.extend(phandle(node));
    node.children.iter().for_each(|child| collect(child, all));
}

/// The first one that is valid, as Linux takes it.
pub fn phandle(node: &BaseNode<'_>) -> Option<u32> {
    let properties = node.properties.iter();
    let own = properties.filter(|(name, _)| PHANDLES.contains(name));
    own.filter_map(|(_, value)| cell(value))
        .find(|phandle| ![0, u32::MAX].contains(phandle))
}

pub fn cell(value: &[u8]) -> Option<u32> {
    value.try_into().ok().map(u32::from_be_bytes)
}

/// Whether addresses and sizes of a node's children are two cells each.
pub fn has_two_cells(node: &BaseNode<'_>) -> bool {
    let names = ["#address-cells", "#size-cells"];
    names.iter().all(|name| cell_of(node, name) == Some(2))
}

/// A property of one cell.
fn cell_of(node: &BaseNode<'_>, name: &str) -> Option<u32> {
    cell(node.property(name)?)
}
