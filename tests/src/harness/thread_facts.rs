// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What procfs has of a thread: where it may run, where it ran, and how it is scheduled.

use anyhow::{Context, Result};
use vcpufreq_device::host::proc_field;

use super::sysfs;

/// The pCPUs that a thread of process `pid` may run on, as the kernel lists them.
pub fn allowed(pid: u32, tid: i32) -> Result<String> {
    let status = sysfs::text(format!("/proc/{pid}/task/{tid}/status"))?;
    let list = proc_field(&status, "Cpus_allowed_list");
    Ok(list.context("no Cpus_allowed_list")?.to_owned())
}

/// Field `number`, 3 and above, of the text of a proc_pid_stat(5). The name before them, in
/// parentheses, can hold anything.
pub fn stat_field(stat: &str, number: usize) -> Result<&str> {
    let (_, rest) = stat.rsplit_once(')').context("no name in stat")?;
    let mut fields = rest.split_whitespace();
    fields.nth(number - 3).context("stat is short")
}

/// Priority and policy in the text of a proc_pid_stat(5), as `1 2`.
pub fn scheduling(stat: &str) -> Result<String> {
    let [priority, policy] = [stat_field(stat, 40)?, stat_field(stat, 41)?];
    Ok(format!("{priority} {policy}"))
}
