// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The CPUs of a base.

use crate::base::{Base, BaseNode, shown};
use crate::merge_error::MergeError;
use crate::phandles::cell;

/// The base's CPUs, which are the machine's, one for one.
pub struct CpuNodes {
    /// Where `/cpus` is among the root's children.
    pub parent: usize,
    /// Where they are among its children.
    pub places: Vec<usize>,
}

impl CpuNodes {
    /// As many as are wanted.
    pub fn find(base: &Base<'_>, wanted: usize) -> Result<Self, MergeError> {
        let nodes = &base.root.children;
        let parent = nodes.iter().position(|child| child.name == "cpus");
        let parent = parent.ok_or(MergeError::NoCpus)?;
        let nodes = nodes[parent].children.iter().enumerate();
        let places = nodes.filter(|(_, node)| is_cpu(node));
        let found = Self {
            parent,
            places: places.map(|(place, _)| place).collect(),
        };
        match found.places.len() {
            found if found != wanted => Err(MergeError::CpuCount { found, wanted }),
            _ => found.in_order(base),
        }
    }

    /// Their nodes in `base`, where they were found.
    pub fn nodes<'b, 'a>(&self, base: &'b Base<'a>) -> impl Iterator<Item = &'b BaseNode<'a>> {
        let parent = &base.root.children[self.parent];
        self.places.iter().map(|&place| &parent.children[place])
    }

    fn in_order(self, base: &Base<'_>) -> Result<Self, MergeError> {
        let mut previous = None;
        for cpu in self.nodes(base) {
            let reg = cpu.property("reg").and_then(number);
            if reg <= previous {
                let node = path(cpu);
                return Err(MergeError::CpuOrder { node });
            }
            previous = reg;
        }
        Ok(self)
    }
}

/// A CPU's path for a message.
pub fn path(cpu: &BaseNode<'_>) -> String {
    shown(&["cpus", &cpu.name])
}

/// As Linux' `of_get_next_cpu_node` sees it.
fn is_cpu(node: &BaseNode<'_>) -> bool {
    node.base_name() == "cpu" || node.property("device_type") == Some(b"cpu\0")
}

/// A number of one or two cells.
fn number(value: &[u8]) -> Option<u64> {
    let wide = || value.try_into().ok().map(u64::from_be_bytes);
    cell(value).map(u64::from).or_else(wide)
}
