// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a VMM takes rights away from the threads of a bridge, and what they need of those then.

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;

use vcpufreq_host::HostRoot;

/// What a thread of a bridge is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BridgeThread {
    /// Carries out requests, and keeps cur_perf in pages true.
    Requests,
    /// Watches the host, and applies what was over a limit.
    Maintenance,
}

/// A VMM's way to confine threads.
///
/// A confined thread still uses what is open, reads files below `/sys/devices/system/cpu` (pCPUs
/// and cpufreq drivers come and go), and sets affinity and clamps of the vCPUs' threads.
pub trait Confinement: Debug + Send + Sync {
    /// Called by each thread of the bridge, before its first work.
    fn on_thread(&self, thread: BridgeThread);

    /// [`frequency_event`](crate::ioeventfd::frequency_event) of a pCPU that has come online:
    /// it takes CAP_PERFMON.
    ///
    /// # Errors
    /// As that. The bridge looks at that pCPU's frequency every 4 ms then.
    fn frequency_event(&self, host: &HostRoot, pcpu: u32) -> io::Result<OwnedFd>;
}
