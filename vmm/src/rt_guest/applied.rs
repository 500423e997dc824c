// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `vcpufreq rt apply` has set for the pCPUs of a guest.

use std::path::PathBuf;

use anyhow::bail;
use vcpufreq_host::HostRoot;
use vcpufreq_rt::PartitionGuest;
pub use vcpufreq_rt::{
    InForce, Record,
    cli::{PartitionArgs, Wanted},
};

use crate::config::VcpuConfig;

/// Whether no vCPU but real-time ones is pinned to CPUs that were given to real-time guests.
///
/// # Errors
/// Which one is, and to whom the CPU was given.
pub fn check_others(vcpus: &[VcpuConfig], record: &Record) -> anyhow::Result<()> {
    let others = vcpus.iter().enumerate();
    for (vcpu, of) in others.filter(|(_, of)| of.rt.is_none()) {
        for cpu in &of.pin {
            let mut guests = record.partition.guests.iter();
            if let Some(guest) = guests.find(|guest| guest.cpus.contains(*cpu)) {
                bail!(
                    "vCPU {vcpu} is pinned to CPU {cpu}, which vcpufreq rt apply has given to real-time guest {}; give it --rt, or pin it to other CPUs",
                    guest.name
                );
            }
        }
    }
    Ok(())
}

/// What was applied for a guest's real-time pCPUs.
#[derive(Debug, Default)]
pub struct AppliedFor {
    /// The cgroup of a partition.
    pub top: Option<PathBuf>,
    /// The profile, if it makes no cpuset.
    pub without_cpuset: Option<String>,
}

impl AppliedFor {
    /// What was for `cpus`.
    ///
    /// # Errors
    /// When these aren't all of one guest's.
    pub fn find(cpus: &[u32], host: &HostRoot, applied: Option<&Record>) -> anyhow::Result<Self> {
        let has = |guest: &&PartitionGuest| cpus.iter().any(|cpu| guest.cpus.contains(*cpu));
        let found = applied.and_then(|record| {
            let guest = record.partition.guests.iter().find(has)?;
            Some((record, guest))
        });
        let Some((record, PartitionGuest { name, cpus: given })) = found else {
            return Ok(Self::default());
        };
        if let Some(other) = cpus.iter().find(|cpu| !given.contains(**cpu)) {
            bail!(
                "CPU {other} is not in the real-time partition of {name}, which has CPU {given}; pin real-time vCPUs to one partition"
            );
        }
        let top = host.path(format!("sys/fs/cgroup/vcpufreq-rt.{name}"));
        let has_cpuset = top.join("rt").is_dir();
        Ok(Self {
            without_cpuset: (!has_cpuset).then(|| record.profile_name.clone()),
            top: Some(top).filter(|_| has_cpuset),
        })
    }
}
