// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the pCPU of a vCPU has to do, as far as a backend tells.

use vcpufreq_device::Util;

/// Utilization of a vCPU's pCPU, as the host's scheduler tracks it, when it was last looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcpuLoad {
    /// Of the vCPU's thread.
    pub own: Util,
    /// What is added to a request: 1.25 times the utilization of everything else and, of each vCPU
    /// that waits for the pCPU, what it requests above its own utilization.
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
