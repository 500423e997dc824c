// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where in the host's cgroup v2 tree a VM's group can be, if anywhere. Looks only; makes nothing.
//!
//! A process stays below all groups that limit it. So the place is the process' own group, or that
//! group's parent if the own group limits nothing. It has to be delegated to the process: by
//! systemd (`Delegate=`, recorded in the attribute `delegate`), or because the process' user owns
//! it. A process in the root finds its place there. Anywhere else a parent has to be named, and one
//! that would end a limit is refused.
//!
//! What decides besides is a rule of uclamp: a group's effective minimum is capped by its parent's,
//! up to the root, and a new group's minimum is 0. So below a group such as systemd's
//! `system.slice`, whose `cpu.uclamp.min` is 0, no floor has any effect.

#![forbid(unsafe_code)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::HostRoot;
use super::cgroup::{GROUP_PREFIX, GroupRecord, check_unused};
use super::cgroup_error::CgroupError;
use super::cgroup_fs::{group_of, has_cpu, mount_point, read};
use super::limits::check_kept;
use super::sys::{attribute_is_one, effective_user};

/// A usable place for VMs' groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The group that will hold the VM's.
    pub parent: PathBuf,
    /// The VMM's process.
    pub process: u32,
    /// Its group now.
    pub origin: PathBuf,
    /// Whether the cpu controller must be switched on for the children of `parent`.
    pub enables_cpu: bool,
    /// Whether `cpu.uclamp.min` of `origin` must be raised: the VM's will be in it.
    pub raises_min: bool,
}

impl Placement {
    /// Finds a place for the calling process' VM on the host below `root`; `named` is the parent
    /// that the user wants.
    ///
    /// # Errors
    /// [`CgroupError::NotMounted`] or [`CgroupError::OutsideNamespace`] when the process' group is
    /// unknown; [`CgroupError::NotDelegated`] when neither that nor its parent is the process' to
    /// divide; [`CgroupError::NoGroup`], [`CgroupError::LeavesLimit`] or
    /// [`CgroupError::UnknownLimits`] when `named` can't be used; otherwise the variant for what
    /// the place lacks.
    pub fn find(root: &HostRoot, named: Option<&Path>) -> Result<Self, CgroupError> {
        Self::find_for(root, std::process::id(), named)
    }

    /// The same for the VM of process `pid`, which need not be the calling one.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn find_for(root: &HostRoot, pid: u32, named: Option<&Path>) -> Result<Self, CgroupError> {
        let mount = mount_point(root)?;
        let process = match pid == std::process::id() {
            true => root.own_process(),
            false => root.path(format!("proc/{pid}")),
        };
        let here = Here {
            origin: group_of(&process, &mount)?,
            mount,
            pid,
        };
        match named {
            Some(dir) => here.at(here.checked(root, dir)?),
            None => here.of_its_own(),
        }
    }

    /// What process `pid`, the VMM or its server, would make here, and what undoes it. A guardian
    /// gets it before anything is made.
    #[must_use]
    pub fn record(&self, pid: u32) -> GroupRecord {
        GroupRecord {
            group: self.parent.join(format!("{GROUP_PREFIX}{pid}")),
            origin: self.origin.clone(),
            enabled_cpu: self.enables_cpu,
            raised_min: self.raises_min,
        }
    }
}

/// Where a VMM's process is.
struct Here {
    mount: PathBuf,
    origin: PathBuf,
    pid: u32,
}

impl Here {
    /// The first place that the process may use by itself.
    fn of_its_own(&self) -> Result<Placement, CgroupError> {
        let origin = self.origin.clone();
        if origin == self.mount && self.is_root(&origin) {
            return self.at(origin);
        }
        let beside = origin.parent().map(Path::to_path_buf);
        let beside = beside.filter(|parent| is_delegated(parent, &self.mount));
        let inside = is_delegated(&origin, &self.mount).then(|| self.at(origin.clone()));
        match (inside, beside) {
            (Some(Ok(place)), _) => Ok(place),
            (inside, Some(parent)) => {
                let place = self
                    .keeps_own_limits(&parent)
                    .and_then(|()| self.at(parent));
                // The own group is the better place: what is wrong there is what to mend.
                place.map_err(|error| inside.and_then(Result::err).unwrap_or(error))
            }
            (Some(Err(error)), None) => Err(error),
            (None, None) => Err(CgroupError::NotDelegated { path: origin }),
        }
    }

    /// Whether `group` is the host's root: a cgroup namespace shows a group at its place, which
    /// has a type, may have limits, and keeps the rule on processes.
    fn is_root(&self, group: &Path) -> bool {
        group == self.mount && !group.join("cgroup.type").exists()
    }

    /// Within a subtree that is delegated, limits that can't be seen aren't the host's: those are
    /// on its top and above, which the process doesn't leave.
    fn keeps_own_limits(&self, parent: &Path) -> Result<(), CgroupError> {
        match check_kept(&self.mount, &self.origin, parent) {
            Err(CgroupError::UnknownLimits { .. }) => Ok(()),
            kept => kept,
        }
    }

    /// The group that the user names, in which the process keeps its limits.
    fn checked(&self, root: &HostRoot, dir: &Path) -> Result<PathBuf, CgroupError> {
        let found = dir.is_absolute().then(|| fs::canonicalize(root.path(dir)));
        let group = found.and_then(Result::ok);
        let group = group
            .filter(|group| group.starts_with(&self.mount) && group.join("cgroup.procs").exists());
        let group = group.ok_or_else(|| CgroupError::NoGroup {
            path: dir.to_path_buf(),
            mount: self.mount.clone(),
        })?;
        check_kept(&self.mount, &self.origin, &group)?;
        Ok(group)
    }

    /// `parent`, if a VM's group can be made there.
    fn at(&self, parent: PathBuf) -> Result<Placement, CgroupError> {
        let path = parent.clone();
        if !has_cpu(&read(&parent.join("cgroup.controllers"))?) {
            return Err(CgroupError::NoCpuController { path });
        }
        for group in parent.ancestors().take_while(|group| *group != self.mount) {
            self.check_uncapped(group)?;
        }
        for file in ["cgroup.subtree_control", "cgroup.procs"] {
            check_writable(&parent.join(file))?;
        }
        // A process of the same number in another PID namespace may see the same tree.
        check_unused(&parent.join(format!("{GROUP_PREFIX}{}", std::process::id())))?;
        let enables_cpu = !has_cpu(&read(&parent.join("cgroup.subtree_control"))?);
        let processes = read(&parent.join("cgroup.procs"))?;
        let mut others = processes.split_whitespace();
        // The kernel refuses to switch a controller on in a group with processes, but for the
        // root. The VMM's leaves its own.
        let own = self.pid.to_string();
        if enables_cpu
            && !self.is_root(&parent)
            && others.any(|pid| parent != self.origin || pid != own)
        {
            return Err(CgroupError::InternalProcesses { path });
        }
        let is_own = parent == self.origin && !self.is_root(&parent);
        let raises_min = is_own && !is_max(&read(&parent.join("cpu.uclamp.min"))?);
        Ok(Placement {
            parent,
            process: self.pid,
            origin: self.origin.clone(),
            enables_cpu,
            raises_min,
        })
    }

    fn check_uncapped(&self, group: &Path) -> Result<(), CgroupError> {
        let path = group.to_path_buf();
        let kind = read(&group.join("cgroup.type"))?;
        if kind.trim() != "domain" {
            let kind = kind.trim().to_owned();
            return Err(CgroupError::NotADomain { path, kind });
        }
        let file = group.join("cpu.uclamp.min");
        if !file.exists() {
            return Err(CgroupError::NoUclamp { path });
        }
        let value = read(&file)?.trim().to_owned();
        let uncapped = is_max(&value);
        // That of the own group is raised for as long as the VM's is in it.
        let can_be = *group == self.origin && value == "0.00" && check_writable(&file).is_ok();
        if !uncapped && !can_be {
            return Err(CgroupError::Capped { path: file, value });
        }
        Ok(())
    }
}

/// Of a `cpu.uclamp.min`, as the kernel shows it.
fn is_max(value: &str) -> bool {
    matches!(value.trim(), "max" | "100.00")
}

fn check_writable(path: &Path) -> Result<(), CgroupError> {
    let opened = OpenOptions::new().write(true).open(path);
    opened.map(drop).map_err(|error| CgroupError::File {
        path: path.to_path_buf(),
        error,
    })
}

/// Whether this process may divide `group`. Below systemd, a user's instance included, only marked
/// groups may be divided. Without systemd the owner may, except root, which owns all.
fn is_delegated(group: &Path, mount: &Path) -> bool {
    if group == mount || !group.starts_with(mount) {
        return false;
    }
    let managed = group.ancestors().take_while(|above| *above != mount);
    if managed.into_iter().any(is_marked) {
        return is_marked(group);
    }
    let user = effective_user();
    user != 0 && fs::metadata(group).is_ok_and(|of| of.uid() == user)
}

fn is_marked(group: &Path) -> bool {
    let names = [c"user.delegate", c"trusted.delegate"];
    names.iter().any(|name| attribute_is_one(group, name))
}
