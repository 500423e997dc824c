// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The real-time side of a guest: its vCPUs and their changes of the host.
//!
//! ```text
//! options ─▶ RunConfig (pure) ─▶ RtGuest::of_host (looks) ─▶ record ─▶ begin ─▶ hooks on each thread
//! ```
//! Real-time vCPUs are pinned one to one. The VMM's other threads keep off their pCPUs, memory is
//! locked, idle latency is bounded as long as the guest runs. Where `vcpufreq rt apply` has made a
//! partition for these pCPUs, the threads go there.

use std::{fs, io, path::PathBuf, process};

use anyhow::{Context, bail};
use nix::sys::mman::{MlockAllFlags, mlockall};
use vcpufreq_device::host::CpuList;
use vcpufreq_device::{
    DomainId, Util, VcpuId,
    host::{HostActuator, HostRoot, KernelTree, PartitionGroups, Tid, pin, proc_field},
};
use vcpufreq_rt::{IdleBound, InPartition, Record, RtHostChanges, bound_file};

use crate::{
    config::{RunConfig, VcpuConfig, rt_pcpus},
    message::warn,
    options::rt_values::{ResumeLatency, RtPolicy},
};

/// The real-time side of one guest on this host.
#[derive(Debug)]
pub struct RtGuest {
    /// A lower bound for each vCPU's requests.
    floors: Vec<Util>,
    /// The wake-up latency of the real-time vCPUs' pCPUs.
    resume_latency: Option<ResumeLatency>,
    /// How each vCPU is scheduled, and its domain.
    policies: Vec<Option<RtPolicy>>,
    domains: Vec<DomainId>,
    /// The real-time vCPUs'.
    cpus: Vec<u32>,
    partition: Option<PartitionGroups>,
    /// The profile that was applied for these CPUs and makes no partition.
    without_cpuset: Option<String>,
}

impl RtGuest {
    /// Looks for the partition that these vCPUs go to, by the record of what is applied; changes
    /// nothing.
    ///
    /// # Errors
    /// When a partition has some of the pCPUs only, or a guest runs there, or a vCPU that isn't
    /// real-time is pinned there.
    pub fn of_host(
        config: &RunConfig,
        host: &HostRoot,
        applied: Option<&Record>,
    ) -> anyhow::Result<Self> {
        if let Some(record) = applied {
            check_others(&config.vcpus, record)?;
        }
        let cpus = rt_pcpus(&config.vcpus);
        let (top, without_cpuset) = applied_for(&cpus, host, applied)?;
        let partition = top
            .map(|top| {
                let rt = config.vcpus.iter().filter(|vcpu| vcpu.rt.is_some());
                let domains = rt.map(|vcpu| vcpu.domain).collect();
                PartitionGroups::here(&HostRoot::default(), top, process::id(), domains)
            })
            .transpose()?;
        Ok(Self {
            floors: config.floors.clone(),
            resume_latency: config.options.resume_latency_us,
            policies: config.vcpus.iter().map(|vcpu| vcpu.rt).collect(),
            domains: config.vcpus.iter().map(|vcpu| vcpu.domain).collect(),
            cpus,
            partition,
            without_cpuset,
        })
    }

    /// The groups in a partition, if there is one.
    pub fn partition(&self) -> Option<&PartitionGroups> {
        self.partition.as_ref()
    }

    /// The actuator as this guest needs it: no request undercuts a floor, and beside a real-time
    /// vCPU each vCPU asks for its own domain alone.
    pub fn actuator(&self, actuator: HostActuator) -> HostActuator {
        actuator
            .with_floors(self.floors.clone())
            .for_real_time_guest(!self.cpus.is_empty())
    }

    /// Takes this process off the real-time pCPUs; its later threads and the guardian with it.
    ///
    /// # Errors
    /// When it may run nowhere else.
    pub fn leave_cpus(&self, host: &HostRoot) -> anyhow::Result<()> {
        if self.cpus.is_empty() {
            return Ok(());
        }
        let status = host.text("proc/self/status").unwrap_or_default();
        let allowed = proc_field(&status, "Cpus_allowed_list");
        let allowed: CpuList = allowed
            .and_then(|list| list.parse().ok())
            .unwrap_or_default();
        let rest = allowed.without(&self.cpus.iter().copied().collect());
        pin(Tid::current(), rest.as_slice()).context(
            "this process may run on the real-time CPUs only; start it where it may run on others",
        )
    }

    /// What [`Self::begin`] will change.
    pub fn changes(&self, host: &HostRoot) -> Option<RtHostChanges> {
        if self.cpus.is_empty() {
            return None;
        }
        let bounds = self.cpus.iter().filter(|_| self.resume_latency.is_some());
        let idle = bounds.filter_map(|cpu| {
            let old = fs::read_to_string(bound_file(host, *cpu)).ok()?;
            let old = old.trim().to_owned();
            Some(IdleBound { cpu: *cpu, old })
        });
        Some(RtHostChanges {
            cpus: self.cpus.clone(),
            idle: idle.collect(),
            partition: self.partition.as_ref().map(|groups| InPartition {
                top: groups.top.clone(),
                origin: groups.origin.clone(),
            }),
        })
    }

    /// Changes the host; the record of that is written.
    ///
    /// # Errors
    /// When a group of the partition can't be made, an idle bound can't be written (`EACCES`:
    /// without root), or mlockall(2) fails (`EPERM`, `ENOMEM`: over RLIMIT_MEMLOCK). What was
    /// changed before stays, and is in the record.
    pub fn begin(&self, host: &HostRoot) -> anyhow::Result<()> {
        if self.cpus.is_empty() {
            return Ok(());
        }
        if let Some(groups) = &self.partition {
            groups
                .create(&KernelTree, &self.domains)
                .context("can't use the real-time partition; see vcpufreq rt check")?;
        } else {
            warn(&self.not_apart());
        }
        if let Some(bound) = self.resume_latency {
            for cpu in &self.cpus {
                let path = bound_file(host, *cpu);
                fs::write(&path, bound.to_string()).with_context(|| {
                    format!(
                        "can't bound the wake-up latency in {}; run as root",
                        path.display()
                    )
                })?;
            }
        }
        // What is mapped later is there at once, too.
        let locked = mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE);
        locked
            .map_err(io::Error::from)
            .context("can't lock this guest's memory; run as root, or raise the limit (ulimit -l)")
    }

    /// That others may run on these CPUs, and what keeps them off.
    fn not_apart(&self) -> String {
        let cpus: CpuList = self.cpus.iter().copied().collect();
        match &self.without_cpuset {
            Some(profile) => format!(
                "CPU {cpus} is not set apart for this guest: profile {profile}, which was applied, makes no cpuset; add cpuset = \"isolated\" to its settings, or boot with isolcpus={cpus}"
            ),
            None => format!(
                "CPU {cpus} is not set apart for this guest; vcpufreq rt apply --guest NAME={cpus} does that"
            ),
        }
    }

    /// Puts a vCPU's thread into the partition, if there is one: it is allowed on its pCPU only there.
    ///
    /// # Errors
    /// As a write of `cgroup.threads`: `ENOENT` without the group, `ESRCH` when the thread has
    /// ended, `EACCES`. The thread stays in its group.
    pub fn enter_partition(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        let (Some(groups), Some(domain)) = (&self.partition, self.domains.get(vcpu.index())) else {
            return Ok(());
        };
        let path = groups.domain(*domain).join("cgroup.threads");
        fs::write(&path, tid.to_string())
            .with_context(|| format!("vCPU {vcpu} can't be put into {}", path.display()))
    }

    /// Schedules a vCPU's thread as its policy asks for, if it has one.
    ///
    /// # Errors
    /// As [`SchedAttr::set`](vcpufreq_device::host::SchedAttr::set): `EPERM` without CAP_SYS_NICE,
    /// `EBUSY` when there is no bandwidth left. The thread keeps its policy.
    pub fn schedule(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        let Some(policy) = self.policies.get(vcpu.index()).copied().flatten() else {
            return Ok(());
        };
        policy.attr().set(tid).map_err(|error| {
            let why = refused(vcpu, policy, &error);
            anyhow::Error::new(error).context(why)
        })
    }
}

/// Whether no vCPU but real-time ones is pinned to CPUs that were given to real-time guests.
fn check_others(vcpus: &[VcpuConfig], record: &Record) -> anyhow::Result<()> {
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

/// What was applied for `cpus`: the cgroup of a partition, or a profile that makes no cpuset.
fn applied_for(
    cpus: &[u32],
    host: &HostRoot,
    applied: Option<&Record>,
) -> anyhow::Result<(Option<PathBuf>, Option<String>)> {
    let Some(record) = applied else {
        return Ok((None, None));
    };
    let has =
        |guest: &&vcpufreq_rt::PartitionGuest| cpus.iter().any(|cpu| guest.cpus.contains(*cpu));
    let Some(guest) = record.partition.guests.iter().find(has) else {
        return Ok((None, None));
    };
    let name = &guest.name;
    if let Some(other) = cpus.iter().find(|cpu| !guest.cpus.contains(**cpu)) {
        bail!(
            "CPU {other} is not in the real-time partition of {name}, which has CPU {}; pin real-time vCPUs to one partition",
            guest.cpus
        );
    }
    let top = host.path(format!("sys/fs/cgroup/vcpufreq-rt.{name}"));
    if !top.join("rt").is_dir() {
        return Ok((None, Some(record.profile_name.clone())));
    }
    if PartitionGroups::is_taken(&top) {
        bail!("a guest runs on {name}'s CPUs already; end it, or pin to other CPUs");
    }
    Ok((Some(top), None))
}

/// Why the kernel didn't schedule a vCPU's thread so.
fn refused(vcpu: VcpuId, policy: RtPolicy, error: &io::Error) -> String {
    match (policy, error.raw_os_error()) {
        (RtPolicy::Deadline { .. }, Some(libc::EBUSY)) => format!(
            "vCPU {vcpu} can't be SCHED_DEADLINE: its CPU has not that much bandwidth left; give it a smaller RUNTIME"
        ),
        (RtPolicy::Deadline { .. }, _) => format!(
            "vCPU {vcpu} can't be SCHED_DEADLINE: with admission control its thread has to be allowed on every CPU of its root domain; set its pCPU apart alone (vcpufreq rt apply with cpuset = \"root\" and one CPU for this guest), or write -1 to /proc/sys/kernel/sched_rt_runtime_us; and run as root"
        ),
        _ => format!("vCPU {vcpu} can't be real-time; run as root or with CAP_SYS_NICE"),
    }
}

#[cfg(test)]
#[path = "rt_tests.rs"]
mod tests;
