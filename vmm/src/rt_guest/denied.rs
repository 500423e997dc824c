// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the kernel says to real-time policies: whether it grants them, and which limit denies them.

use std::{io, thread};

use caps::{CapSet, Capability};
use nix::sys::resource::{Resource, getrlimit};
use vcpufreq_device::VcpuId;
use vcpufreq_host::Tid;

use crate::options::rt_values::RtPolicy;

/// What this process may ask the kernel for.
#[derive(Clone, Copy, Debug)]
pub struct RtRights {
    /// It has CAP_SYS_NICE.
    pub has_nice: bool,
    /// Its RLIMIT_RTPRIO, which counts without that.
    pub priority: u64,
}

impl RtRights {
    /// Those that it has.
    fn of_process() -> Self {
        let has_nice = caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_NICE);
        let priority = getrlimit(Resource::RLIMIT_RTPRIO).map_or(0, |(soft, _)| soft);
        Self {
            has_nice: has_nice.unwrap_or(false),
            priority,
        }
    }
}

/// Schedules the thread of `vcpu` so.
///
/// # Errors
/// As [`SchedAttr::set`](vcpufreq_host::SchedAttr::set): `EPERM` without CAP_SYS_NICE,
/// `EBUSY` when there is no bandwidth left. The thread keeps its policy.
pub fn schedule(vcpu: VcpuId, policy: RtPolicy, tid: Tid) -> anyhow::Result<()> {
    policy.attr().set(tid).map_err(|error| {
        let why = refused(vcpu, policy, &error, RtRights::of_process());
        anyhow::Error::new(error).context(why)
    })
}

/// Whether the kernel grants a thread of this process the policy of `vcpu`. SCHED_DEADLINE is not
/// tried: it takes the vCPU's own place. `check_host` looks for the root domain that it needs.
///
/// # Errors
/// As [`schedule`].
pub fn try_out(vcpu: VcpuId, policy: RtPolicy) -> anyhow::Result<()> {
    if matches!(policy, RtPolicy::Deadline { .. }) {
        return Ok(());
    }
    let tried = thread::Builder::new().name("rt-probe".to_owned());
    let tried = tried.spawn(move || schedule(vcpu, policy, Tid::current()))?;
    let tried = tried.join();
    tried.unwrap_or_else(|_| Err(anyhow::anyhow!("the probe panicked")))
}

/// Why the kernel didn't schedule a vCPU's thread so.
pub fn refused(vcpu: VcpuId, policy: RtPolicy, error: &io::Error, rights: RtRights) -> String {
    let priority = match policy {
        RtPolicy::Deadline { .. } => return deadline_refused(vcpu, error),
        RtPolicy::Fifo(priority) | RtPolicy::Rr(priority) => priority,
    };
    let limit = rights.priority;
    match rights.has_nice {
        false if limit < u64::from(priority) => format!(
            "vCPU {vcpu} can't be real-time: without CAP_SYS_NICE its priority {priority} is over the limit rtprio, which is {limit}; run as root, or raise the limit (ulimit -r {priority}, LimitRTPRIO={priority})"
        ),
        true if error.raw_os_error() == Some(libc::EPERM) => format!(
            "vCPU {vcpu} can't be real-time: its cgroup has no real-time group bandwidth; boot with rt_group_sched=0, or a kernel without CONFIG_RT_GROUP_SCHED"
        ),
        _ => format!("vCPU {vcpu} can't be real-time; run as root or with CAP_SYS_NICE"),
    }
}

fn deadline_refused(vcpu: VcpuId, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EBUSY) => format!(
            "vCPU {vcpu} can't be SCHED_DEADLINE: its CPU has not that much bandwidth left; give it a smaller RUNTIME"
        ),
        _ => format!("{}; and run as root", no_root_domain(vcpu)),
    }
}

/// What SCHED_DEADLINE asks for beside rights.
pub fn no_root_domain(vcpu: VcpuId) -> String {
    format!(
        "vCPU {vcpu} can't be SCHED_DEADLINE: with admission control its thread has to be allowed on every CPU of its root domain; set its pCPU apart alone (vcpufreq rt apply with cpuset = \"root\" and one CPU for this guest), or write -1 to /proc/sys/kernel/sched_rt_runtime_us"
    )
}

#[cfg(test)]
mod tests {
    //! Promise: the line names the limit that denies a policy.
    use super::*;

    fn said(policy: RtPolicy, number: i32, has_nice: bool, priority: u64) -> String {
        let error = io::Error::from_raw_os_error(number);
        let rights = RtRights { has_nice, priority };
        refused(VcpuId(1), policy, &error, rights)
    }

    #[test]
    fn a_refused_deadline_says_what_the_kernel_asks_for() {
        let policy = RtPolicy::Deadline {
            runtime_us: 500,
            period_us: 1000,
        };
        let root_domain = said(policy, libc::EPERM, true, 0);
        for part in [
            "vCPU 1",
            "every CPU of its root domain",
            "one CPU",
            "sched_rt_runtime_us",
        ] {
            assert!(root_domain.contains(part), "{part}: {root_domain}");
        }
        assert!(said(policy, libc::EBUSY, true, 0).contains("smaller RUNTIME"));
    }

    #[test]
    fn a_refused_priority_names_its_limit() {
        for (has_nice, limit, named) in [
            (false, 0, "the limit rtprio, which is 0"),
            (false, 4, "ulimit -r 5"),
            (true, 0, "real-time group bandwidth"),
            (false, 5, "CAP_SYS_NICE"),
        ] {
            let line = said(RtPolicy::Fifo(5), libc::EPERM, has_nice, limit);
            assert!(line.contains(named) && line.contains("vCPU 1"), "{line}");
            assert_eq!(line.lines().count(), 1);
        }
    }
}
