// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's groups in a real-time partition, which `vcpufreq rt apply` has made.
//!
//! ```text
//! <top>/                         a threaded domain
//!   rt/                          the isolated CPUs
//!     vcpufreq.<pid>.domain<N>   the threads of real-time vCPUs; clamped
//!   rest/                        the other CPUs
//!     vcpufreq.<pid>.domain<N>   the threads of other vCPUs; clamped
//!     vcpufreq.<pid>.rest        all threads that run no vCPU
//! ```
//! `top`, `rt` and `rest` have the cpu controller for their children, and no cap on
//! `cpu.uclamp.min`. Removal kills nothing. It may run in another process, and again.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use vcpufreq_device::DomainId;

use super::HostRoot;
use super::cgroup::{CgroupTree, DOMAIN_PREFIX, GROUP_PREFIX, REST_NAME, make_threaded, unmake};
use super::cgroup_error::CgroupError;
use super::cgroup_fs::{cgroup_mount, children, group_of, read, write};
use super::limits::check_kept;
use super::sys::Tid;

/// Where a VM's groups are. They need not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PartitionGroups {
    /// The partition's group.
    pub top: PathBuf,
    /// Where the VM's process came from.
    pub origin: PathBuf,
    /// The process that makes the groups: the VM's, or its server. They have its number.
    pub pid: u32,
    /// The VM's process.
    pub process: u32,
    /// The domains of real-time vCPUs; a record does without.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub rt: Vec<DomainId>,
}

impl PartitionGroups {
    /// For process `pid`, the calling one, in the partition `top`.
    ///
    /// # Errors
    /// [`CgroupError::NotMounted`] or [`CgroupError::OutsideNamespace`] when its own group is
    /// unknown, [`CgroupError::LeavesLimit`] or [`CgroupError::UnknownLimits`] when a limit would
    /// or might end with the move, [`CgroupError::File`] when one of these files can't be read.
    pub fn here(
        root: &HostRoot,
        top: PathBuf,
        pid: u32,
        rt: Vec<DomainId>,
    ) -> Result<Self, CgroupError> {
        Self::at(root, &root.own_process(), (top, pid, pid), rt)
    }

    /// The same for a VM of process `process`, which process `pid` serves.
    ///
    /// # Errors
    /// As [`Self::here`].
    pub fn of_process(
        root: &HostRoot,
        top: PathBuf,
        (pid, process): (u32, u32),
        rt: Vec<DomainId>,
    ) -> Result<Self, CgroupError> {
        let dir = root.path(format!("proc/{process}"));
        Self::at(root, &dir, (top, pid, process), rt)
    }

    /// For the VM's process, which has this directory in procfs.
    fn at(
        root: &HostRoot,
        dir: &Path,
        (top, pid, process): (PathBuf, u32, u32),
        rt: Vec<DomainId>,
    ) -> Result<Self, CgroupError> {
        let mount = cgroup_mount(root)?;
        let origin = group_of(dir, &mount)?;
        check_kept(&mount, &origin, &top)?;
        Ok(Self {
            top,
            origin,
            pid,
            process,
            rt,
        })
    }

    /// The group of `domain`.
    #[must_use]
    pub fn domain(&self, domain: DomainId) -> PathBuf {
        let side = if self.rt.contains(&domain) {
            "rt"
        } else {
            "rest"
        };
        let name = format!("{}{DOMAIN_PREFIX}{domain}", self.prefix());
        self.top.join(side).join(name)
    }

    /// The group of the threads that run no vCPU.
    #[must_use]
    pub fn rest(&self) -> PathBuf {
        let name = format!("{}{REST_NAME}", self.prefix());
        self.top.join("rest").join(name)
    }

    fn prefix(&self) -> String {
        format!("{GROUP_PREFIX}{}.", self.pid)
    }

    /// Makes the groups with one for each of `domains`, and moves the VM's process there. What a dead
    /// process of the same number left is taken away first.
    ///
    /// # Errors
    /// [`CgroupError::Busy`] when a dead process' threads are still ending; else
    /// [`CgroupError::File`], such as `ENOENT` without the partition, `EACCES`, or `EAGAIN` over
    /// `cgroup.max.descendants`. The groups made by then stay until [`Self::remove`].
    pub fn create(&self, tree: &dyn CgroupTree, domains: &[DomainId]) -> Result<(), CgroupError> {
        self.remove(tree)?;
        make_threaded(tree, &self.rest())?;
        let mut ids = domains.to_vec();
        ids.sort_unstable();
        ids.dedup();
        for domain in ids {
            make_threaded(tree, &self.domain(domain))?;
        }
        write(&self.rest().join("cgroup.procs"), &self.process.to_string())
    }

    /// Removes the groups and moves the VM's process, if it lives, to where it came from, or to the
    /// partition's parent when that is gone; and with it the processes that it has started. Nothing to
    /// do when they aren't there.
    ///
    /// # Errors
    /// [`CgroupError::Busy`] while ending threads are still in one: call again. Otherwise
    /// [`CgroupError::File`] with what can't be listed or removed, such as `EACCES`; the groups
    /// after it stay.
    pub fn remove(&self, tree: &dyn CgroupTree) -> Result<(), CgroupError> {
        let groups = self.found()?;
        if groups.is_empty() {
            return Ok(());
        }
        let process = self.process.to_string();
        let processes = read(&self.top.join("cgroup.procs")).unwrap_or_default();
        if processes.split_whitespace().any(|found| found == process) {
            self.move_home(&process);
        }
        for group in &groups {
            // The number of a thread stands for its process.
            let left = read(&group.join("cgroup.threads")).unwrap_or_default();
            left.split_whitespace().for_each(|tid| self.move_home(tid));
        }
        groups.iter().try_for_each(|group| unmake(tree, group))
    }

    /// A process that has ended meanwhile needs no move. Other failures show when its group is removed.
    fn move_home(&self, process: &str) {
        let parent = self.top.parent().unwrap_or(&self.top);
        let home = write(&self.origin.join("cgroup.procs"), process);
        drop(home.or_else(|_| write(&parent.join("cgroup.procs"), process)));
    }

    /// Moves threads out of the groups of real-time domains that run none of their vCPUs: what a vCPU's
    /// thread starts is born there. One that has ended meanwhile needs no move.
    pub fn keep_others_out(&self, vcpus: &[Tid]) {
        let rest = self.rest().join("cgroup.threads");
        for domain in &self.rt {
            let group = self.domain(*domain);
            let there = read(&group.join("cgroup.threads")).unwrap_or_default();
            let tids = there.split_whitespace().filter_map(|tid| tid.parse().ok());
            let others = tids.filter_map(Tid::new).filter(|tid| !vcpus.contains(tid));
            others.for_each(|tid| drop(write(&rest, &tid.to_string())));
        }
    }

    /// Those of the groups that are there.
    fn found(&self) -> Result<Vec<PathBuf>, CgroupError> {
        let prefix = self.prefix();
        let ours = |group: &PathBuf| {
            let name = group.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(&prefix))
        };
        let mut found = Vec::new();
        for side in ["rt", "rest"] {
            let dir = self.top.join(side);
            if dir.exists() {
                found.extend(children(&dir)?.into_iter().filter(ours));
            }
        }
        Ok(found)
    }

    /// Whether a running guest has threads in the partition's real-time group.
    #[must_use]
    pub fn is_taken(top: &Path) -> bool {
        let events = read(&top.join("rt/cgroup.events"));
        events.is_ok_and(|text| text.lines().any(|line| line == "populated 1"))
    }
}
