// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records of what a VMM is about to make on the host, so that it can be
//! removed whoever is killed: `PID.json` in a runtime directory, written before
//! anything is made.
//!
//! A record is somebody's as long as the process with its number is the one
//! that wrote it: same boot, same start time, not a zombie. Otherwise it is
//! stale. After another boot nothing is left but the record itself.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use vcpufreq_device::host::GroupRecord;

use crate::{facts::HostTree, rt_traces::RtTraces};

use vcpufreq_rt::GuestCpus;
pub use vcpufreq_rt::{Owner, Standing};

/// Where root's records are; others have theirs in `$XDG_RUNTIME_DIR/vcpufreq`.
pub const ROOT_DIR: &str = vcpufreq_rt::DIR;

/// The cgroups that a VMM makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// The group that holds the others.
    pub group: PathBuf,
    /// Where the process was before.
    pub origin: PathBuf,
    /// Whether the cpu controller was switched on for them.
    pub enabled_cpu: bool,
}

/// What a VMM is about to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Whose it is.
    pub owner: Owner,
    /// Its cgroups, if it makes any.
    pub groups: Option<Groups>,
    /// What it changes for real-time vCPUs, if it has any.
    #[serde(default)]
    pub rt: Option<RtTraces>,
    /// The pCPUs that its vCPUs are pinned to, real-time or not.
    #[serde(default)]
    pub pinned: Vec<u32>,
}

impl Record {
    /// The pCPUs of its vCPUs.
    pub fn cpus(&self) -> GuestCpus {
        let rt = self.rt.iter().flat_map(|rt| &rt.cpus);
        GuestCpus {
            owner: self.owner.clone(),
            real_time: rt.copied().collect(),
            pinned: self.pinned.iter().copied().collect(),
        }
    }
}

impl From<GroupRecord> for Groups {
    fn from(record: GroupRecord) -> Self {
        Self {
            group: record.group,
            origin: record.origin,
            enabled_cpu: record.enabled_cpu,
        }
    }
}

impl From<&Groups> for GroupRecord {
    fn from(groups: &Groups) -> Self {
        Self {
            group: groups.group.clone(),
            origin: groups.origin.clone(),
            enabled_cpu: groups.enabled_cpu,
        }
    }
}

/// Who the process `pid` of the host below `root` is.
///
/// # Errors
/// When procfs doesn't show it.
pub fn owner_of(root: &HostTree, pid: u32) -> anyhow::Result<Owner> {
    let owner = Owner::of(&root.look(), pid);
    owner.map_err(|_| anyhow!("process {pid} can't be seen in /proc; mount it"))
}

/// The directory of the records.
#[derive(Clone, Debug)]
pub struct StateDir(PathBuf);

impl StateDir {
    /// This user's.
    ///
    /// # Errors
    /// When the user has no runtime directory.
    pub fn of_user() -> anyhow::Result<Self> {
        // The owner of a process' directory in procfs is its effective user.
        let user = fs::metadata("/proc/self").context("/proc can't be read; mount it")?;
        if user.uid() == 0 {
            return Ok(Self(ROOT_DIR.into()));
        }
        let runtime = std::env::var_os("XDG_RUNTIME_DIR")
            .filter(|dir| Path::new(dir).is_absolute())
            .context(
                "XDG_RUNTIME_DIR is not set; set it to a directory of yours, usually /run/user/UID",
            )?;
        Ok(Self::at(Path::new(&runtime).join("vcpufreq")))
    }

    /// `dir`, which is made when the first record is written.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// Where the record of `pid` is.
    pub fn record_path(&self, pid: u32) -> PathBuf {
        self.0.join(format!("{pid}.json"))
    }

    /// Where the VMM `pid` answers to `vcpufreq stats`.
    pub fn socket_path(&self, pid: u32) -> PathBuf {
        socket_of(&self.record_path(pid))
    }

    /// Writes a record, all of it or nothing.
    ///
    /// # Errors
    /// What the file system refused.
    pub fn write(&self, record: &Record) -> anyhow::Result<()> {
        let path = self.record_path(record.owner.pid);
        let text = serde_json::to_string(record)?;
        let unfinished = unfinished(&path);
        let written = || {
            let made = DirBuilder::new().mode(0o700).create(&self.0);
            match made {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            fs::write(&unfinished, &text)?;
            fs::rename(&unfinished, &path)
        };
        // The last user of the directory may remove it between two steps.
        let again = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => written(),
            _ => Err(error),
        };
        written().or_else(again).with_context(|| {
            format!(
                "{} can't be written; make its directory writable",
                path.display()
            )
        })
    }

    /// All records, and the files that should be records and aren't. Records
    /// that come or go meanwhile may be missing.
    pub fn list(&self) -> anyhow::Result<Vec<(PathBuf, anyhow::Result<Record>)>> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => {
                bail!(
                    "{} can't be read: {error}; check its permissions",
                    self.0.display()
                )
            }
        };
        let mut paths: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| pid_of(path).is_some())
            .collect();
        paths.sort();
        let read = paths.into_iter().map(|path| {
            let record = read(&path);
            (path, record)
        });
        let gone = |record: &anyhow::Result<Record>| {
            let error = record.as_ref().err().and_then(|error| error.downcast_ref());
            error.is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::NotFound)
        };
        Ok(read.filter(|(_, record)| !gone(record)).collect())
    }
}

/// Reads a record.
///
/// # Errors
/// When it can't be read, or isn't one, or is not under its own number.
pub fn read(path: &Path) -> anyhow::Result<Record> {
    if is_unfinished(path) {
        bail!("it is not finished");
    }
    let record: Record = serde_json::from_str(&fs::read_to_string(path)?)?;
    if Some(record.owner.pid) != pid_of(path) {
        bail!("it is the record of process {}", record.owner.pid);
    }
    match &record.groups {
        Some(groups) if !is_ours(groups, record.owner.pid) => {
            Err(anyhow!("{} is no cgroup of ours", groups.group.display()))
        }
        _ => Ok(record),
    }
}

/// A record can only name the group of its own process.
fn is_ours(groups: &Groups, pid: u32) -> bool {
    let name = groups.group.file_name().and_then(|name| name.to_str());
    name == Some(&format!("{}{pid}", vcpufreq_device::host::GROUP_PREFIX))
}

/// Removes a record, what a killed writer left of it, and its VMM's socket.
///
/// # Errors
/// What the file system refused.
pub fn remove(path: &Path) -> io::Result<()> {
    remove_file(&unfinished(path))?;
    remove_file(&socket_of(path))?;
    remove_file(path)
}

/// Removes a file of the directory, if it is there, and the directory when that
/// was the last one.
pub fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    if let Some(dir) = path.parent() {
        // Refused while there are other files.
        let _ = fs::remove_dir(dir);
    }
    Ok(())
}

/// The socket of the VMM whose record is at `path`.
fn socket_of(path: &Path) -> PathBuf {
    path.with_extension("sock")
}

/// A record that is being written.
fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("json.new")
}

/// Whether a file is a record whose writer was killed, or is at it.
pub fn is_unfinished(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "new")
}

/// The process that a record is of, by its name; also of an unfinished one.
pub fn pid_of(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    let number = name
        .strip_suffix(".json")
        .or(name.strip_suffix(".json.new"))?;
    number.parse().ok()
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
