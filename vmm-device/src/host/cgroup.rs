// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's cgroups: making them, and taking them away whoever made them.
//!
//! ```text
//! <parent>/                      cpu in cgroup.subtree_control
//!   vcpufreq.<pid>/              cpu.uclamp.min = max: a child's minimum is capped by it
//!     rest/                      threaded; all threads that run no vCPU; not clamped
//!     domain<N>/                 threaded; the vCPU threads of domain N; clamped; like rest,
//!                                without pressure (PSI) of its own
//! ```
//! `rest` is there so that the maximum that the VM's group must allow doesn't become the floor of
//! the VMM's other threads.
//!
//! A side effect to know: the cpu controller shares CPU time between groups, and the VM's group has
//! the default `cpu.weight` however many vCPUs it has. Beside other busy tasks on the same pCPUs, a
//! VM of many vCPUs gets less than its threads got one by one; raise the weight there.
//!
//! Removing kills nothing: processes move to where the VM's came from, groups are removed. It may
//! be done by another process, and again when it was interrupted.
//!
//! Unprivileged use needs a subtree that belongs to the user: the parent of the process' own
//! group must be writable, have the cpu controller, and all groups from there to the root must have
//! `cpu.uclamp.min` at `max`. With systemd, that is a delegated slice
//! (`Delegate=cpu`) in which an administrator sets that file.

#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::HostRoot;
use super::placement::cgroup_mount;
use crate::units::DomainId;

/// A VM's group is named this and the VMM's process number.
pub const GROUP_PREFIX: &str = "vcpufreq.";
/// A domain's group is named this and the domain's number.
pub const DOMAIN_PREFIX: &str = "domain";
/// Group of the threads that run no vCPU.
pub const REST_NAME: &str = "rest";

/// What a VM's groups are and how it was before them; all that removing them needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRecord {
    /// The VM's group.
    pub group: PathBuf,
    /// Where its process came from.
    pub origin: PathBuf,
    /// The cpu controller was off for the children of the group's parent before.
    pub enabled_cpu: bool,
}

/// A VM's group that nobody uses any more.
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

/// Why a VM can't have groups, or they can't be removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup v2 at all.
    #[error("cgroup v2 is not mounted; mount it at /sys/fs/cgroup")]
    NotMounted,
    /// The process is in a group that its namespace doesn't show.
    #[error("this process is in cgroup {group}, outside its cgroup namespace")]
    OutsideNamespace {
        /// The group as the kernel names it.
        group: String,
    },
    /// The cpu controller is not to be had.
    #[error(
        "{} has no cpu controller; delegate it, or free it from cgroup v1",
        path.display()
    )]
    NoCpuController {
        /// The group.
        path: PathBuf,
    },
    /// The kernel has no clamps on groups.
    #[error("{} has no cpu.uclamp.min; the kernel needs CONFIG_UCLAMP_TASK_GROUP", path.display())]
    NoUclamp {
        /// The group.
        path: PathBuf,
    },
    /// A group above caps every minimum below it.
    #[error("{} is {value}, which caps all below it; write max to it", path.display())]
    Capped {
        /// The file.
        path: PathBuf,
        /// What it holds.
        value: String,
    },
    /// The cpu controller can't be switched on in a group with processes.
    #[error("{} has processes, so the cpu controller can't be switched on in it", path.display())]
    InternalProcesses {
        /// The group.
        path: PathBuf,
    },
    /// A group that can't have domain children.
    #[error("{} is a cgroup of type '{kind}', not a domain", path.display())]
    NotADomain {
        /// The group.
        path: PathBuf,
        /// Its type.
        kind: String,
    },
    /// A group that should be gone still has processes or children.
    #[error("{} is still in use; try again when its processes have ended", path.display())]
    Busy {
        /// The group.
        path: PathBuf,
    },
    /// The group that this process would make is there, and somebody is in it.
    #[error(
        "{} is the group of a running process that has this one's number in another PID namespace; \
         start again",
        path.display()
    )]
    Taken {
        /// The group.
        path: PathBuf,
    },
    /// Any other refusal.
    #[error("{}: {error}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
}

impl Leftover {
    /// What removing it needs. It has no process that could go home.
    #[must_use]
    pub fn record(&self) -> GroupRecord {
        GroupRecord {
            group: self.group.clone(),
            origin: self.group.clone(),
            enabled_cpu: false,
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

/// Whether nobody is in `group`, so that what a dead process left there may be taken away.
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
    if record.enabled_cpu {
        write(&parent_of(record).join("cgroup.subtree_control"), "+cpu")?;
    }
    make(tree, &record.group)?;
    let file = record.group.join("cpu.uclamp.min");
    if !file.exists() {
        let path = record.group.clone();
        return Err(CgroupError::NoUclamp { path });
    }
    write(&file, "max")?;
    write(&record.group.join("cgroup.subtree_control"), "+cpu")?;
    make_threaded(tree, &record.rest())?;
    for domain in domains {
        make_threaded(tree, &record.domain(*domain))?;
    }
    write(&record.rest().join("cgroup.procs"), &pid.to_string())
}

/// Removes the groups of `record`, and moves whatever is in them to its origin, or to the group's
/// parent when that is gone. Does nothing when there is no such group, or when somebody else
/// removes it at the same time.
///
/// # Errors
/// [`CgroupError::Busy`] while ending processes are still in it: call again, they take some
/// milliseconds. Otherwise what the kernel said.
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
    for pid in read(&group.join("cgroup.procs"))?.split_whitespace() {
        let home = write(&record.origin.join("cgroup.procs"), pid);
        let moved = home.or_else(|_| write(&parent_of(record).join("cgroup.procs"), pid));
        // A process that has ended meanwhile needs no move; the rmdir below tells the rest.
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
/// that has children of another name is somebody else's.
///
/// # Errors
/// When there is no cgroup v2 to look into.
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
    let alive = root.join(Path::new(&format!("/proc/{pid}"))).exists();
    let events = read(&group.join("cgroup.events"));
    let empty = events.is_ok_and(|text| text.lines().any(|line| line == "populated 0"));
    !alive && empty
}

pub(super) fn make_threaded(tree: &dyn CgroupTree, dir: &Path) -> Result<(), CgroupError> {
    make(tree, dir)?;
    // What keeps it waiting is in its parent too, and to reckon it for one group more costs each
    // switch to and from a vCPU. Kernels before 6.1, or without PSI, have no such file.
    // Without it all is as before, only a little slower.
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

pub(super) fn children(dir: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let failed = |error| CgroupError::File {
        path: dir.to_path_buf(),
        error,
    };
    let mut groups = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            groups.push(entry.path());
        }
    }
    groups.sort();
    Ok(groups)
}

fn parent_of(record: &GroupRecord) -> &Path {
    record.group.parent().unwrap_or(&record.group)
}

pub(super) fn has_cpu(controllers: &str) -> bool {
    controllers.split_whitespace().any(|name| name == "cpu")
}

pub(super) fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(|error| CgroupError::File {
        path: path.to_path_buf(),
        error,
    })
}

/// Writes to a control file, which must be there: a file of that name is never made.
pub(super) fn write(path: &Path, text: &str) -> Result<(), CgroupError> {
    let file = fs::OpenOptions::new().write(true).truncate(true).open(path);
    let written = file.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()));
    written.map_err(|error| CgroupError::File {
        path: path.to_path_buf(),
        error,
    })
}
