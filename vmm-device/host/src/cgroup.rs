// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Makes and removes a VM's cgroups. A process may remove groups that another one made.
//!
//! ```text
//! <parent>/                      cpu in cgroup.subtree_control
//!   vcpufreq.<pid>/              cpu.uclamp.min = max: a child's minimum is capped by it
//!     rest/                      threaded; all threads that run no vCPU; not clamped
//!     domain<N>/                 threaded; the vCPU threads of domain N; clamped; like rest,
//!                                without pressure (PSI) of its own
//! ```
//! The VM's group must allow the maximum. `rest` keeps that from becoming the floor of the VMM's
//! other threads.
//!
//! A side effect: the cpu controller shares CPU time between groups, and the VM's group has the
//! default `cpu.weight` however many vCPUs it has. Beside other busy tasks on the same pCPUs, a VM
//! of many vCPUs gets less than its threads would without a group. Raise the weight there.
//!
//! Removal kills nothing: it moves the processes to the VM's group of origin. It may run in another
//! process, and again after an interruption.
//!
//! [`Placement`](super::Placement) finds `parent`. If that is the process' own group, it has to
//! become empty: the process and its guardian move to `rest`, and the group's `cpu.uclamp.min` is
//! `max` until they return.

#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use vcpufreq_device::DomainId;

use super::HostRoot;
use super::cgroup_error::CgroupError;
use super::cgroup_fs::{cgroup_mount, children, read, write};
use super::proc_text::proc_field;

/// A VM's group is named this and the VMM's process number.
pub const GROUP_PREFIX: &str = "vcpufreq.";
/// A domain's group is named this and the domain's number.
pub const DOMAIN_PREFIX: &str = "domain";
/// Group of the threads that run no vCPU.
pub(crate) const REST_NAME: &str = "rest";

/// A VM's groups and the state before them: all that removal needs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupRecord {
    /// The VM's group.
    pub group: PathBuf,
    /// Where its process came from.
    pub origin: PathBuf,
    /// The cpu controller was off for the children of the group's parent before.
    pub enabled_cpu: bool,
    /// `cpu.uclamp.min` of the process' own group was 0, and is `max` while the VM's is in it.
    #[cfg_attr(feature = "serde", serde(default))]
    pub raised_min: bool,
}

/// A VM's group that no process uses any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// The group.
    pub group: PathBuf,
    /// The process that made it.
    pub pid: u32,
}

/// Makes and removes groups. In cgroupfs that is mkdir and rmdir; elsewhere the control files are
/// missing, so that tests have their own.
pub trait CgroupTree: Send + Sync {
    /// Makes the group `dir`.
    ///
    /// # Errors
    /// As mkdir(2).
    fn make(&self, dir: &Path) -> io::Result<()>;

    /// Removes the group `dir`.
    ///
    /// # Errors
    /// As rmdir(2); `EBUSY` while it has children or processes.
    fn remove(&self, dir: &Path) -> io::Result<()>;
}

/// The kernel's cgroupfs.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelTree;

impl CgroupTree for KernelTree {
    fn make(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        fs::remove_dir(dir)
    }
}

impl Leftover {
    /// What removal needs. No process is left to move.
    #[must_use]
    pub fn record(&self) -> GroupRecord {
        GroupRecord {
            group: self.group.clone(),
            origin: self.group.clone(),
            enabled_cpu: false,
            raised_min: false,
        }
    }
}

impl GroupRecord {
    /// The group of `domain`.
    #[must_use]
    pub fn domain(&self, domain: DomainId) -> PathBuf {
        self.group.join(format!("{DOMAIN_PREFIX}{domain}"))
    }

    /// The group of the threads that run no vCPU.
    #[must_use]
    pub fn rest(&self) -> PathBuf {
        self.group.join(REST_NAME)
    }
}

/// Fails if a process is in `group`; otherwise a dead process' groups there may be removed.
pub(super) fn check_unused(group: &Path) -> Result<(), CgroupError> {
    match read(&group.join("cgroup.events")) {
        Ok(events) if events.lines().any(|line| line == "populated 1") => {
            let path = group.to_path_buf();
            Err(CgroupError::Taken { path })
        }
        // No group, or an empty one.
        _ => Ok(()),
    }
}

/// Makes the groups of `record` with one for each of `domains`, and moves process `pid` into them.
/// What a dead process of the same number left is taken away first.
pub(super) fn create(
    tree: &dyn CgroupTree,
    record: &GroupRecord,
    domains: &[DomainId],
    pid: u32,
) -> Result<(), CgroupError> {
    remove(tree, record)?;
    make(tree, &record.group)?;
    make_threaded(tree, &record.rest())?;
    for process in movers(record, pid)? {
        write(&record.rest().join("cgroup.procs"), &process)?;
    }
    // By now the parent is empty, unless that is the root: with a controller for its children,
    // a group has no processes.
    if record.enabled_cpu {
        write(&parent_of(record).join("cgroup.subtree_control"), "+cpu")?;
    }
    let file = record.group.join("cpu.uclamp.min");
    if !file.exists() {
        let path = record.group.clone();
        return Err(CgroupError::NoUclamp { path });
    }
    // First, so that 'rest' has a minimum of its own and isn't lifted meanwhile.
    write(&record.group.join("cgroup.subtree_control"), "+cpu")?;
    if record.raised_min {
        write(&record.origin.join("cpu.uclamp.min"), "max")?;
    }
    write(&file, "max")?;
    for domain in domains {
        make_threaded(tree, &record.domain(*domain))?;
    }
    Ok(())
}

/// The processes that move. The VMM `pid` always does. From a group that has to become empty the
/// server, if it is another process, and children of both (the guardian) move too. Any other
/// process there is an error.
fn movers(record: &GroupRecord, pid: u32) -> Result<Vec<String>, CgroupError> {
    if !is_inside(record) {
        return Ok(vec![pid.to_string()]);
    }
    let own = [pid, std::process::id()].map(|pid| pid.to_string());
    let there = read(&record.origin.join("cgroup.procs"))?;
    let there: Vec<String> = there.split_whitespace().map(str::to_owned).collect();
    let ours = |process: &String| {
        let parent = || parent_process(process);
        own.contains(process) || parent().is_some_and(|parent| own.contains(&parent))
    };
    if !there.iter().all(ours) {
        let path = record.origin.clone();
        return Err(CgroupError::InternalProcesses { path });
    }
    Ok(there)
}

fn parent_process(pid: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    proc_field(&status, "PPid").map(str::to_owned)
}

/// Whether the VM's group is in its process' own group. The root doesn't count: it has no type.
fn is_inside(record: &GroupRecord) -> bool {
    parent_of(record) == record.origin && record.origin.join("cgroup.type").exists()
}

/// Removes the groups of `record`, and moves whatever is in them to its origin, or to the group's
/// parent when that is gone. Does nothing when there is no such group, or when another process
/// removes it at the same time.
///
/// # Errors
/// [`CgroupError::Busy`] while ending processes are still in it: call again, they take some
/// milliseconds. Otherwise [`CgroupError::File`] with what can't be read or removed, such as
/// `EACCES`; the rest stays.
pub fn remove(tree: &dyn CgroupTree, record: &GroupRecord) -> Result<(), CgroupError> {
    if !record.group.exists() {
        return Ok(());
    }
    match take_apart(tree, record) {
        Err(_) if !record.group.exists() => Ok(()),
        done => done,
    }
}

fn take_apart(tree: &dyn CgroupTree, record: &GroupRecord) -> Result<(), CgroupError> {
    let group = &record.group;
    if is_inside(record) {
        let home = &record.origin;
        // Refused while another VM there needs it. Then the processes can't move, and the rmdir
        // below fails.
        drop(write(&group.join("cgroup.subtree_control"), "-cpu"));
        drop(write(&home.join("cgroup.subtree_control"), "-cpu"));
    }
    if record.raised_min {
        drop(write(&record.origin.join("cpu.uclamp.min"), "0"));
    }
    for pid in read(&group.join("cgroup.procs"))?.split_whitespace() {
        let home = write(&record.origin.join("cgroup.procs"), pid);
        let moved = home.or_else(|_| write(&parent_of(record).join("cgroup.procs"), pid));
        // A process that has ended meanwhile needs no move. Other failures show at the rmdir below.
        drop(moved);
    }
    for child in children(group)? {
        unmake(tree, &child)?;
    }
    unmake(tree, group)?;
    if record.enabled_cpu {
        restore_controller(parent_of(record));
    }
    Ok(())
}

/// Switches the cpu controller off again, unless a sibling may have come to rely on it.
fn restore_controller(parent: &Path) {
    let alone = children(parent).is_ok_and(|siblings| siblings.is_empty());
    if alone {
        // A refusal leaves a controller on that does nothing to a group without children.
        drop(write(&parent.join("cgroup.subtree_control"), "-cpu"));
    }
}

/// All groups of VMs on the host below `root` that are empty and whose process is dead. A group
/// that has children of another name belongs to another program. A group in which no process has
/// run is being made by a process of another PID namespace.
///
/// # Errors
/// [`CgroupError::NotMounted`] without cgroup v2; [`CgroupError::File`] when its mount can't be
/// read.
pub fn leftovers(root: &HostRoot) -> Result<Vec<Leftover>, CgroupError> {
    let mut found = Vec::new();
    let mut ahead = vec![cgroup_mount(root)?];
    while let Some(dir) = ahead.pop() {
        // Groups come and go while we look.
        for group in children(&dir).unwrap_or_default() {
            match made_by(&group) {
                Some(pid) if is_abandoned(root, &group, pid) => {
                    found.push(Leftover { group, pid });
                }
                _ => ahead.push(group),
            }
        }
    }
    Ok(found)
}

fn made_by(group: &Path) -> Option<u32> {
    let name = group.file_name()?.to_str()?;
    let pid = name.strip_prefix(GROUP_PREFIX)?.parse().ok()?;
    let ours = |child: &PathBuf| {
        let name = child.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| {
            let number = name.strip_prefix(DOMAIN_PREFIX);
            name == REST_NAME || number.is_some_and(|n| n.parse::<u32>().is_ok())
        })
    };
    children(group).ok()?.iter().all(ours).then_some(pid)
}

fn is_abandoned(root: &HostRoot, group: &Path, pid: u32) -> bool {
    let alive = root.path(format!("/proc/{pid}")).exists();
    let events = read(&group.join("cgroup.events"));
    let empty = events.is_ok_and(|text| text.lines().any(|line| line == "populated 0"));
    !alive && empty && was_used(group)
}

/// Whether a process has run in `group`: the kernel has counted time of it, in every group.
fn was_used(group: &Path) -> bool {
    let stat = read(&group.join("cpu.stat")).unwrap_or_default();
    let usage = stat
        .lines()
        .find_map(|line| line.strip_prefix("usage_usec "));
    usage.is_some_and(|usage| usage.trim() != "0")
}

pub(super) fn make_threaded(tree: &dyn CgroupTree, dir: &Path) -> Result<(), CgroupError> {
    make(tree, dir)?;
    // PSI is already accounted in the parent; accounting it again here would slow every vCPU
    // context switch. Kernels before 6.1, or without PSI, have no such file.
    drop(write(&dir.join("cgroup.pressure"), "0"));
    write(&dir.join("cgroup.type"), "threaded")
}

fn make(tree: &dyn CgroupTree, dir: &Path) -> Result<(), CgroupError> {
    let path = dir.to_path_buf();
    tree.make(dir)
        .map_err(|error| CgroupError::File { path, error })
}

pub(super) fn unmake(tree: &dyn CgroupTree, dir: &Path) -> Result<(), CgroupError> {
    let path = dir.to_path_buf();
    match tree.remove(dir) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Err(CgroupError::Busy { path })
        }
        Err(error) => Err(CgroupError::File { path, error }),
    }
}

fn parent_of(record: &GroupRecord) -> &Path {
    record.group.parent().unwrap_or(&record.group)
}
