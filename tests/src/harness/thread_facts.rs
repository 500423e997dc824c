// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What procfs has of a thread: where it may run, where it ran, and how it is scheduled.

use anyhow::{Context, Result};
use vcpufreq_host::{proc_field, stat_field};

use super::sysfs;

/// The pCPUs that a thread of process `pid` may run on, as the kernel lists them.
pub fn allowed(pid: u32, tid: i32) -> Result<String> {
    let status = sysfs::text(format!("/proc/{pid}/task/{tid}/status"))?;
    let list = proc_field(&status, "Cpus_allowed_list");
    Ok(list.context("no Cpus_allowed_list")?.to_owned())
}

/// Priority and policy in the text of a proc_pid_stat(5), as `1 2`.
pub fn scheduling(stat: &str) -> Result<String> {
    let both = stat_field(stat, 40).zip(stat_field(stat, 41));
    let (priority, policy) = both.context("a short stat")?;
    Ok(format!("{priority} {policy}"))
}
