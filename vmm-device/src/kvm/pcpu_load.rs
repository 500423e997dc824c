// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the pCPU of a vCPU has to do, as far as a backend tells.

use crate::Util;

/// Utilization of a vCPU's pCPU, as the host's scheduler tracks it, when it was last looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcpuLoad {
    /// Of the vCPU's thread.
    pub own: Util,
    /// Of everything else, and what vCPUs that wait ask for above theirs, with the quarter that
    /// schedutil adds: as it is added to a request.
    pub others: Util,
}

/// A target that a scheduler sets on a vCPU's pCPU; schedutil adds it to the pCPU's utilization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcpuTarget {
    /// The sum over all runnable vCPUs on it, of any VM.
    pub sum: u32,
    /// The target that the kernel was given, at most `sum`.
    pub target: Util,
}
