// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why two trees can't be merged.

use thiserror::Error;

use crate::base::{MAX_TREE, TreeError};

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
    /// A CPU's `reg` is missing, outside MPIDR_EL1's affinity fields, or that of another CPU:
    /// Linux leaves out such a CPU, but not its number.
    #[error("the reg of {node} is missing, no affinity of MPIDR_EL1, or another CPU's")]
    CpuReg {
        /// The CPU's node.
        node: String,
    },
    /// Another node has the phandle of a CPU's: a reference could mean either.
    #[error("{node} has the phandle {phandle:#x} of another node")]
    Phandle {
        /// The CPU's node.
        node: String,
        /// What both have.
        phandle: u32,
    },
    /// The base's phandles leave too few numbers in a row.
    #[error("not enough phandles left")]
    NoPhandles,
    /// The machine has registers, for whose node the root needs 2 and 2 cells.
    #[error("the root's #address-cells and #size-cells are not 2, as the cpufreq node needs")]
    RootCells,
}

impl From<TreeError> for MergeError {
    fn from(error: TreeError) -> Self {
        match error {
            TreeError::TooLarge { size } => Self::TooLarge { size },
            broken => Self::NotATree(broken),
        }
    }
}
