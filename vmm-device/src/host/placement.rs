// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where in the host's cgroup v2 tree a VM's group can be, if anywhere. Looks only; makes nothing.
//!
//! Two places are tried: beside the process' own cgroup (its parent, which a delegated subtree may
//! own), and the root. What decides, besides permission, is a rule of uclamp: a group's effective
//! minimum is capped by its parent's, up to the root, and a new group's minimum is 0. So below a
//! group such as systemd's `user.slice`, whose `cpu.uclamp.min` is 0, no floor has any effect.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::HostRoot;
use super::cgroup::{CgroupError, GROUP_PREFIX, GroupRecord, check_unused, has_cpu, read};

/// A usable place for VMs' groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The group that will hold the VM's.
    pub parent: PathBuf,
    /// The process' own group now.
    pub origin: PathBuf,
    /// Whether the cpu controller must be switched on for the children of `parent`.
    pub enables_cpu: bool,
}

impl Placement {
    /// Finds a place on the host below `root`.
    ///
    /// # Errors
    /// Why the better one of the two places can't be used.
    pub fn find(root: &HostRoot) -> Result<Self, CgroupError> {
        let mount = mount_point(root)?;
        let origin = own_group(root, &mount)?;
        let beside = match origin.parent() {
            Some(parent) if origin != mount => parent.to_path_buf(),
            _ => mount.clone(),
        };
        let usable = usable(&beside, &mount).map(|enables_cpu| (beside, enables_cpu));
        let (parent, enables_cpu) = usable.or_else(|first| match usable_root(&mount) {
            Ok(found) => Ok(found),
            Err(_) => Err(first),
        })?;
        Ok(Self {
            parent,
            origin,
            enables_cpu,
        })
    }

    /// What process `pid` would make here, and what undoes it. A guardian can know that before
    /// anything is made.
    #[must_use]
    pub fn record(&self, pid: u32) -> GroupRecord {
        GroupRecord {
            group: self.parent.join(format!("{GROUP_PREFIX}{pid}")),
            origin: self.origin.clone(),
            enabled_cpu: self.enables_cpu,
        }
    }
}

fn usable_root(mount: &Path) -> Result<(PathBuf, bool), CgroupError> {
    usable(mount, mount).map(|enables_cpu| (mount.to_path_buf(), enables_cpu))
}

/// Whether a VM's group can be made in `dir`; if so, whether that needs the cpu controller
/// switched on.
fn usable(dir: &Path, mount: &Path) -> Result<bool, CgroupError> {
    let path = dir.to_path_buf();
    if !has_cpu(&read(&dir.join("cgroup.controllers"))?) {
        return Err(CgroupError::NoCpuController { path });
    }
    for group in dir.ancestors().take_while(|group| *group != mount) {
        check_uncapped(group)?;
    }
    for file in ["cgroup.subtree_control", "cgroup.procs"] {
        let path = dir.join(file);
        let opened = OpenOptions::new().write(true).open(&path);
        opened.map_err(|error| CgroupError::File { path, error })?;
    }
    // A process of the same number in another PID namespace may see the same tree.
    check_unused(&dir.join(format!("{GROUP_PREFIX}{}", std::process::id())))?;
    let enables_cpu = !has_cpu(&read(&dir.join("cgroup.subtree_control"))?);
    // The kernel refuses to switch a controller on in a group with processes, but for the root.
    if enables_cpu && dir != mount && !read(&dir.join("cgroup.procs"))?.is_empty() {
        return Err(CgroupError::InternalProcesses { path });
    }
    Ok(enables_cpu)
}

fn check_uncapped(group: &Path) -> Result<(), CgroupError> {
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
    if value != "max" && value != "100.00" {
        return Err(CgroupError::Capped { path: file, value });
    }
    Ok(())
}

/// Where cgroup v2 is mounted, by proc_pid_mountinfo(5).
fn mount_point(root: &HostRoot) -> Result<PathBuf, CgroupError> {
    let table = read(&root.own_process().join("mountinfo"))?;
    let mut points = table.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let kind = kind.split(' ').next()?;
        let point = mount.split(' ').nth(4)?;
        (kind == "cgroup2").then(|| unescape(point))
    });
    let point = points.next().ok_or(CgroupError::NotMounted)?;
    Ok(root.join(&point))
}

/// The calling process' own group, by cgroups(7): the line `0::/path`.
pub(super) fn own_group(root: &HostRoot, mount: &Path) -> Result<PathBuf, CgroupError> {
    let groups = read(&root.own_process().join("cgroup"))?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    match own {
        None => Err(CgroupError::NotMounted),
        // A process can be in a group outside its cgroup namespace.
        Some(own) if own.split('/').any(|part| part == "..") => {
            Err(CgroupError::OutsideNamespace { group: own.into() })
        }
        Some("") => Ok(mount.to_path_buf()),
        Some(own) => Ok(mount.join(own)),
    }
}

/// Undoes the kernel's octal escapes of blanks and backslashes (`\040`).
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 4);
        let octal = digits
            .filter(|_| bytes[at] == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(octal.unwrap_or(bytes[at]));
        at += if octal.is_some() { 4 } else { 1 };
    }
    PathBuf::from(OsString::from_vec(plain))
}

/// For callers that look for what other processes left.
pub(super) fn cgroup_mount(root: &HostRoot) -> Result<PathBuf, CgroupError> {
    let mount = mount_point(root)?;
    match fs::metadata(&mount) {
        Ok(_) => Ok(mount),
        Err(error) => Err(CgroupError::File { path: mount, error }),
    }
}
