// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of a vCPU's run.

/// Why a vCPU no longer runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VcpuEnd {
    /// Its machine stopped it.
    Stopped,
    /// It has halted for good: nothing can wake it (x86-64 without an
    /// interrupt controller).
    Halted,
    /// The guest has turned itself off.
    PowerOff,
    /// The guest wants to start again.
    Reset,
    /// The guest reports that it has crashed.
    Crashed,
    /// KVM can't go on; the text is its report.
    Failed(String),
}
