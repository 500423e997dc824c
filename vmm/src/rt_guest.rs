// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The real-time side of a guest: which vCPUs, what that asks of the host, and doing it.
//!
//! ```text
//! options ─▶ RtConfig (pure) ─▶ RtGuest::of_host (looks) ─▶ record ─▶ begin ─▶ hooks on each thread
//! ```
//! Real-time vCPUs are pinned one to one. The VMM's other threads keep off their pCPUs, memory is
//! locked, idle latency is bounded as long as the guest runs. Where `vcpufreq rt apply` has made a
//! partition for these pCPUs, the threads go there.

use std::{fs, io, path::PathBuf, process, sync::Arc};

use anyhow::{Context, bail};
use nix::sys::mman::{MlockAllFlags, mlockall};
use vcpufreq_device::host::CpuList;
use vcpufreq_device::{
    DomainId, VcpuId,
    host::{HostActuator, HostRoot, KernelTree, PartitionGroups, Tid},
    kvm::KvmOffload,
};
use vcpufreq_rt::{IdleBound, InPartition, Record, RtHostChanges, bound_file};

use crate::{
    config::{RunConfig, VcpuConfig, rt_pcpus},
    rt_config::RtConfig,
    rt_options::RtPolicy,
    run::warn,
    vm::{Hooks, sys::pin_thread},
};

/// The real-time side of one guest on this host.
#[derive(Debug)]
pub struct RtGuest {
    config: RtConfig,
    /// How each vCPU is scheduled, and its domain.
    policies: Vec<Option<RtPolicy>>,
    domains: Vec<DomainId>,
    /// The real-time vCPUs'.
    cpus: Vec<u32>,
    partition: Option<PartitionGroups>,
    /// The profile that was applied for these CPUs and makes no partition.
    without_cpuset: Option<String>,
}

/// What `vcpufreq rt apply` did for some CPUs.
#[derive(Debug)]
enum Applied {
    Nothing,
    /// By a profile that makes no cpuset.
    WithoutCpuset(String),
    /// A partition, whose cgroup this is.
    Partition(PathBuf),
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
        let (top, without_cpuset) = match applied_for(&cpus, host, applied)? {
            Applied::Nothing => (None, None),
            Applied::WithoutCpuset(profile) => (None, Some(profile)),
            Applied::Partition(top) => (Some(top), None),
        };
        let partition = top
            .map(|top| {
                let rt = config.vcpus.iter().filter(|vcpu| vcpu.rt.is_some());
                let domains = rt.map(|vcpu| vcpu.domain).collect();
                PartitionGroups::here(&HostRoot::default(), top, process::id(), domains)
            })
            .transpose()?;
        Ok(Self {
            config: config.rt.clone(),
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
            .with_floors(self.config.floors.clone())
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
        let mut lines = status.lines();
        let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed: CpuList = allowed
            .and_then(|list| list.parse().ok())
            .unwrap_or_default();
        let rest = allowed.without(&self.cpus.iter().copied().collect());
        pin_thread(rest.as_slice()).context(
            "this process may run on the real-time CPUs only; start it where it may run on others",
        )
    }

    /// What [`Self::begin`] will change.
    pub fn changes(&self, host: &HostRoot) -> Option<RtHostChanges> {
        if self.cpus.is_empty() {
            return None;
        }
        let bounds = self
            .cpus
            .iter()
            .filter(|_| self.config.resume_latency.is_some());
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
    /// What the host refused.
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
        if let Some(bound) = self.config.resume_latency {
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

    /// `inner`, and before it what each real-time thread needs.
    pub fn hooks(self, inner: Arc<dyn Hooks>) -> Arc<dyn Hooks> {
        match self.cpus.is_empty() {
            true => inner,
            false => Arc::new(RtHooks { rt: self, inner }),
        }
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

/// What was applied for `cpus`.
fn applied_for(cpus: &[u32], host: &HostRoot, applied: Option<&Record>) -> anyhow::Result<Applied> {
    let Some(record) = applied else {
        return Ok(Applied::Nothing);
    };
    let has = |guest: &&vcpufreq_rt::Guest| cpus.iter().any(|cpu| guest.cpus.contains(*cpu));
    let Some(guest) = record.partition.guests.iter().find(has) else {
        return Ok(Applied::Nothing);
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
        return Ok(Applied::WithoutCpuset(record.profile_name.clone()));
    }
    if PartitionGroups::is_taken(&top) {
        bail!("a guest runs on {name}'s CPUs already; end it, or pin to other CPUs");
    }
    Ok(Applied::Partition(top))
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

struct RtHooks {
    rt: RtGuest,
    inner: Arc<dyn Hooks>,
}

impl RtHooks {
    fn policy(&self, vcpu: VcpuId) -> Option<RtPolicy> {
        self.rt.policies.get(vcpu.index()).copied().flatten()
    }
}

impl Hooks for RtHooks {
    /// A thread is allowed on its pCPU only once it is in the partition.
    fn on_vcpu_thread_start(&self, vcpu: VcpuId, tid: i32) -> anyhow::Result<()> {
        if let (Some(groups), Some(domain)) =
            (&self.rt.partition, self.rt.domains.get(vcpu.index()))
        {
            let path = groups.domain(*domain).join("cgroup.threads");
            fs::write(&path, tid.to_string())
                .with_context(|| format!("vCPU {vcpu} can't be put into {}", path.display()))?;
        }
        self.inner.on_vcpu_thread_start(vcpu, tid)
    }

    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: i32) -> anyhow::Result<()> {
        if let Some(policy) = self.policy(vcpu) {
            let thread = Tid::new(tid).context("a thread's number is above 0")?;
            policy.attr().set(thread).map_err(|error| {
                let why = refused(vcpu, policy, &error);
                anyhow::Error::new(error).context(why)
            })?;
        }
        self.inner.on_vcpu_thread(vcpu, tid)
    }

    fn on_vcpu_moved(&self, vcpu: VcpuId) {
        self.inner.on_vcpu_moved(vcpu);
    }

    fn on_reset(&self) {
        self.inner.on_reset();
    }

    fn on_path_lost(&self) -> Option<Arc<KvmOffload>> {
        self.inner.on_path_lost()
    }

    fn on_end(&self) {
        self.inner.on_end();
    }

    fn on_warning(&self, text: &str) {
        self.inner.on_warning(text);
    }
}

#[cfg(test)]
#[path = "rt_guest_tests.rs"]
mod tests;
