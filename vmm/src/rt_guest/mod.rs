// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The real-time side of a guest: its vCPUs and their changes of the host.
//!
//! ```text
//! options ─▶ RtWish (pure) ─▶ RtGuest::of_host (looks) ─▶ record ─▶ begin ─▶ schedule each thread
//! ```
//! Real-time vCPUs are pinned one to one. The VMM's other threads keep off their pCPUs, memory is
//! locked, idle latency is bounded as long as the guest runs. Where `vcpufreq rt apply` has made a
//! partition for these pCPUs, the threads go there. The VMM is this program, or another one that it
//! serves.

pub mod adopted;
mod applied;
mod denied;

use std::{fs, io, path::PathBuf, process};

use anyhow::{Context, bail};
use nix::sys::mman::{MlockAllFlags, mlockall};
use vcpufreq_device::{DomainId, Util, VcpuId};
use vcpufreq_host::undo::{Format, JournalEntry, KernelHost, OldValue, Target};
use vcpufreq_host::{
    ActuatorChoice, ActuatorKind, CgroupError, Chosen, CpuList, HostActuator, HostRoot, KernelTree,
    PartitionGroups, Tid, pin, proc_field,
};

use crate::{
    config::{RtWish, rt_pcpus},
    message::warn,
    options::rt_values::{ResumeLatency, RtPolicy},
};
use applied::{AppliedFor, check_others};
pub use applied::{InForce, PartitionArgs, Record, Wanted};

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
    /// Looks for the partition that the vCPUs of this process go to, by the record of what is applied;
    /// changes nothing.
    ///
    /// # Errors
    /// When a partition has some of the pCPUs only, or a guest runs there, or a vCPU that isn't
    /// real-time is pinned there.
    pub fn of_host(
        wish: &RtWish<'_>,
        host: &HostRoot,
        applied: Option<&Record>,
    ) -> anyhow::Result<Self> {
        let groups =
            |top, domains| PartitionGroups::here(&HostRoot::default(), top, process::id(), domains);
        let guest = Self::with_groups(wish, host, applied, groups)?;
        guest.check_free()?;
        Ok(guest)
    }

    /// Checks what can be checked of a VM that this process will serve, before there is one.
    ///
    /// # Errors
    /// As [`Self::of_process`], but for a guest that runs in the partition.
    pub fn check_host(
        wish: &RtWish<'_>,
        host: &HostRoot,
        applied: Option<&Record>,
    ) -> anyhow::Result<()> {
        let guest = Self::before_vmm(wish, host, applied)?;
        guest.check_apart(host)?;
        guest.check_root_domain(host)
    }

    /// Checks that no guest runs in the partition, before there is a VMM.
    ///
    /// # Errors
    /// Where one does; when the partition has some of the pCPUs only.
    pub fn check_unused(
        wish: &RtWish<'_>,
        host: &HostRoot,
        applied: Option<&Record>,
    ) -> anyhow::Result<()> {
        Self::before_vmm(wish, host, applied)?.check_free()
    }

    fn before_vmm(
        wish: &RtWish<'_>,
        host: &HostRoot,
        applied: Option<&Record>,
    ) -> anyhow::Result<Self> {
        let groups = |top: PathBuf, rt| {
            let origin = top.clone();
            let (pid, process) = (process::id(), process::id());
            Ok(PartitionGroups {
                top,
                origin,
                pid,
                process,
                rt,
            })
        };
        Self::with_groups(wish, host, applied, groups)
    }

    /// The same for vCPUs of process `vmm`, which this one serves.
    ///
    /// # Errors
    /// As [`Self::of_host`]; when nothing sets the pCPUs of real-time vCPUs apart: threads of `vmm`
    /// that this process doesn't know would run there.
    pub fn of_process(
        wish: &RtWish<'_>,
        host: &HostRoot,
        applied: Option<&Record>,
        vmm: u32,
    ) -> anyhow::Result<Self> {
        let groups =
            |top, domains| PartitionGroups::of_process(host, top, (process::id(), vmm), domains);
        let guest = Self::with_groups(wish, host, applied, groups)?;
        guest.check_apart(host)?;
        guest.check_free()?;
        Ok(guest)
    }

    fn with_groups(
        wish: &RtWish<'_>,
        host: &HostRoot,
        applied: Option<&Record>,
        groups: impl FnOnce(PathBuf, Vec<DomainId>) -> Result<PartitionGroups, CgroupError>,
    ) -> anyhow::Result<Self> {
        if let Some(record) = applied {
            check_others(wish.vcpus, record)?;
        }
        let cpus = rt_pcpus(wish.vcpus);
        let AppliedFor {
            top,
            without_cpuset,
        } = AppliedFor::find(&cpus, host, applied)?;
        let rt = wish.vcpus.iter().filter(|vcpu| vcpu.rt.is_some());
        let rt = rt.map(|vcpu| vcpu.domain).collect();
        Ok(Self {
            floors: wish.floors.to_vec(),
            resume_latency: wish.resume_latency,
            policies: wish.vcpus.iter().map(|vcpu| vcpu.rt).collect(),
            domains: wish.vcpus.iter().map(|vcpu| vcpu.domain).collect(),
            cpus,
            partition: top.map(|top| groups(top, rt)).transpose()?,
            without_cpuset,
        })
    }

    /// Checks that nobody else's threads run on the real-time pCPUs: by a cpuset, or by isolcpus where
    /// the profile that is applied makes none.
    fn check_apart(&self, host: &HostRoot) -> anyhow::Result<()> {
        let isolated = || -> CpuList {
            let text = host.text("sys/devices/system/cpu/isolated");
            text.and_then(|text| text.parse().ok()).unwrap_or_default()
        };
        let by_boot = || {
            let left = self.cpus().without(&isolated());
            self.without_cpuset.is_some() && left.is_empty()
        };
        if self.cpus.is_empty() || self.partition.is_some() || by_boot() {
            return Ok(());
        }
        bail!("{}", self.not_apart())
    }

    /// Checks that a SCHED_DEADLINE vCPU has a root domain of its own, if the kernel has admission
    /// control (`sched_setscheduler` in `kernel/sched/syscalls.c`).
    fn check_root_domain(&self, host: &HostRoot) -> anyhow::Result<()> {
        let is_deadline = |policy: &Option<_>| matches!(policy, Some(RtPolicy::Deadline { .. }));
        let deadline = self.policies.iter().position(is_deadline);
        let Some(vcpu) = deadline.and_then(|vcpu| u16::try_from(vcpu).ok()) else {
            return Ok(());
        };
        let runtime = host.text("proc/sys/kernel/sched_rt_runtime_us");
        let kind = self.partition.as_ref().and_then(|groups| {
            fs::read_to_string(groups.top.join("rt/cpuset.cpus.partition")).ok()
        });
        let alone = self.cpus.len() == 1 && kind.is_some_and(|kind| kind.trim() == "root");
        if alone || runtime.is_some_and(|runtime| runtime.trim() == "-1") {
            return Ok(());
        }
        bail!("{}", denied::no_root_domain(VcpuId(vcpu)))
    }

    /// Checks that no other guest is in the partition.
    fn check_free(&self) -> anyhow::Result<()> {
        match &self.partition {
            Some(groups) if PartitionGroups::is_taken(&groups.top) => bail!(
                "a guest runs in {} already; end it, or pin to other CPUs",
                groups.top.display()
            ),
            _ => Ok(()),
        }
    }

    /// The pCPUs of the real-time vCPUs.
    pub fn cpus(&self) -> CpuList {
        self.cpus.iter().copied().collect()
    }

    /// How `vcpu` is scheduled, if it is real-time.
    fn policy(&self, vcpu: VcpuId) -> Option<RtPolicy> {
        self.policies.get(vcpu.index()).copied().flatten()
    }

    /// What clamps the vCPUs, if that are the groups of a partition: these need no place of their own.
    pub fn clamped_in_partition(&self, wish: ActuatorChoice) -> Option<Chosen> {
        let is_grouped = matches!(wish, ActuatorChoice::Auto | ActuatorChoice::Cgroup);
        let groups = self.partition.as_ref().filter(|_| is_grouped)?;
        Some(Chosen {
            kind: ActuatorKind::Partition(groups.clone()),
            reason: "the real-time partition has cgroups for it".to_owned(),
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
        Self::leave(&self.cpus, host)
    }

    /// The same of these pCPUs.
    ///
    /// # Errors
    /// As [`Self::leave_cpus`].
    pub fn leave(cpus: &[u32], host: &HostRoot) -> anyhow::Result<()> {
        if cpus.is_empty() {
            return Ok(());
        }
        let status = host.text("proc/self/status").unwrap_or_default();
        let allowed = proc_field(&status, "Cpus_allowed_list");
        let allowed: CpuList = allowed
            .and_then(|list| list.parse().ok())
            .unwrap_or_default();
        let rest = allowed.without(&cpus.iter().copied().collect());
        pin(Tid::current(), rest.as_slice()).context(
            "this process may run on the real-time CPUs only; start it where it may run on others",
        )
    }

    /// What [`Self::begin`] will change.
    pub fn changes(&self, host: &HostRoot) -> Vec<JournalEntry> {
        let look = KernelHost::from(host);
        let bounds = self.cpus.iter().filter(|_| self.resume_latency.is_some());
        let bounds = bounds.filter_map(|cpu| {
            // It goes with its CPU.
            let target = Target::Inside {
                path: bound_file(*cpu),
                format: Format::Text,
                or_at: None,
            };
            Some(JournalEntry::File(OldValue {
                old: target.now(&look).ok()?,
                target,
                only_if: None,
            }))
        });
        let partition = self.partition.clone().map(JournalEntry::Partition);
        partition.into_iter().chain(bounds).collect()
    }

    /// Changes the host; the record of that is written.
    ///
    /// # Errors
    /// When a group of the partition can't be made, or an idle bound can't be written (`EACCES`:
    /// without root). What was changed before stays, and is in the record.
    pub fn begin(&self, host: &HostRoot) -> anyhow::Result<()> {
        if self.cpus.is_empty() {
            return Ok(());
        }
        if let Some(groups) = &self.partition {
            groups
                .create(&KernelTree, &self.domains)
                .context("can't use the real-time partition; see vcpufreq rt check")?;
        } else if let Err(why) = self.check_apart(host) {
            warn(&why.to_string());
        }
        if let Some(bound) = self.resume_latency {
            for cpu in &self.cpus {
                let path = host.path(bound_file(*cpu));
                fs::write(&path, bound.to_string()).with_context(|| {
                    format!(
                        "can't bound the wake-up latency in {}; run as root",
                        path.display()
                    )
                })?;
            }
        }
        Ok(())
    }

    /// Locks the memory of this process, if its guest has real-time vCPUs.
    ///
    /// # Errors
    /// As mlockall(2): `EPERM`, `ENOMEM` over RLIMIT_MEMLOCK.
    pub fn lock_memory(&self) -> anyhow::Result<()> {
        if self.cpus.is_empty() {
            return Ok(());
        }
        // What is mapped later is there at once, too.
        let locked = mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE);
        locked
            .map_err(io::Error::from)
            .context("can't lock this guest's memory; run as root, or raise the limit (ulimit -l)")
    }

    /// That others may run on these CPUs, and what keeps them off.
    fn not_apart(&self) -> String {
        let cpus = self.cpus();
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

    /// Whether the kernel grants this process the policies of its guest.
    ///
    /// # Errors
    /// Which limit denies one.
    pub fn try_policies(wish: &RtWish<'_>) -> anyhow::Result<()> {
        let mut policies = (0..).map(VcpuId).zip(wish.vcpus);
        policies.try_for_each(|(vcpu, config)| match config.rt {
            Some(policy) => denied::try_out(vcpu, policy),
            None => Ok(()),
        })
    }

    /// Schedules a vCPU's thread as its policy asks for, if it has one.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_NICE, `EBUSY` when there is no bandwidth left. The thread keeps its policy.
    pub fn schedule(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        let Some(policy) = self.policy(vcpu) else {
            return Ok(());
        };
        if matches!(policy, RtPolicy::Deadline { .. }) && tid != Tid::current() {
            self.leave_old_cpu(vcpu);
        }
        denied::schedule(vcpu, policy, tid)
    }

    /// A thread that sleeps stays with the CPU on which it ran last, and with its root domain, by which
    /// the kernel judges SCHED_DEADLINE, until it is woken. To freeze its group wakes it.
    fn leave_old_cpu(&self, vcpu: VcpuId) {
        let (Some(groups), Some(domain)) = (&self.partition, self.domains.get(vcpu.index())) else {
            return;
        };
        let freeze = groups.domain(*domain).join("cgroup.freeze");
        for frozen in ["1", "0"] {
            // Without it the kernel refuses the policy, which has a line.
            let _ = fs::write(&freeze, frozen);
        }
    }
}

/// The file of a pCPU's latency bound: µs, or `n/a` for none.
fn bound_file(cpu: u32) -> String {
    format!("/sys/devices/system/cpu/cpu{cpu}/power/pm_qos_resume_latency_us")
}

#[cfg(test)]
mod tests;
