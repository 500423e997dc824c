// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Before a VMM makes anything on the host, it writes a record of it: `PID.json` in a runtime
//! directory. With the record, all of it can be removed after any process was killed.
//!
//! A record is valid as long as the process with its number is the one that wrote it: same boot,
//! same start time, one of its threads lives. Otherwise it is stale. After another boot nothing is left but the
//! record itself.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use serde::{Deserialize, Serialize};
use vcpufreq_device::host::{AdoptedGroups, BorrowedThread, GroupRecord, HostRoot, RaisedGroups};
use vcpufreq_rt::{GuestCpus, InPartition, KernelHost, OwnDir, RtHostChanges, Untrusted};
pub use vcpufreq_rt::{Owner, OwnerStatus};

/// Where root's records are; others have theirs in `$XDG_RUNTIME_DIR/vcpufreq`.
pub const ROOT_DIR: &str = vcpufreq_rt::DIR;

/// How often to try a lock. Those who hold one wait for killed processes, which takes 1 to 20 ms.
const TRY_EVERY: Duration = Duration::from_millis(5);

/// The fields of [`VmmRecord`].
const FIELDS: [&str; 7] = [
    "owner", "groups", "rt", "pinned", "threads", "adopted", "raised",
];

/// What a VMM is about to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmRecord {
    /// Whose it is.
    pub owner: Owner,
    /// Its cgroups, if it makes any.
    pub groups: Option<GroupRecord>,
    /// What it changes for real-time vCPUs, if it has any.
    #[serde(default)]
    pub rt: Option<RtHostChanges>,
    /// The pCPUs that its vCPUs are pinned to, real-time or not.
    #[serde(default)]
    pub pinned: Vec<u32>,
    /// The threads of another program's VM that it clamps.
    #[serde(default)]
    pub threads: Vec<BorrowedThread>,
    /// The cgroups of that VM that it clamps.
    #[serde(default)]
    pub adopted: Option<AdoptedGroups>,
    /// Groups above those of its VM that are raised, and what they had before the first VM.
    #[serde(default)]
    pub raised: RaisedGroups,
}

impl VmmRecord {
    /// A VMM that makes nothing.
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            groups: None,
            rt: None,
            pinned: Vec::new(),
            threads: Vec::new(),
            adopted: None,
            raised: RaisedGroups::default(),
        }
    }

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

/// The identity of process `pid` of the host below `root`.
///
/// # Errors
/// When procfs doesn't show it.
pub fn owner_of(root: &HostRoot, pid: u32) -> anyhow::Result<Owner> {
    let owner = Owner::of(&KernelHost::from(root), pid);
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

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Where the record of `pid` is.
    pub fn record_path(&self, pid: u32) -> PathBuf {
        self.0.join(format!("{pid}.json"))
    }

    /// An empty file for process `pid` alone, in which QEMU writes its device tree. QEMU makes a
    /// file beside it and renames that one: its name has a dot and six characters more
    /// (g_file_set_contents). What a killed process left of either is removed as an unfinished
    /// record is.
    ///
    /// # Errors
    /// As [`OwnDir::make`], [`OwnDir::remove`] and [`OwnDir::create`].
    pub fn tree_file(&self, pid: u32) -> anyhow::Result<PathBuf> {
        let dir = OwnDir::make(&self.0)?;
        let name = format!("{pid}.dtb.new");
        dir.remove(&name)?;
        dir.create(&name)?;
        Ok(self.0.join(name))
    }

    /// Where the VMM `pid` answers to `vcpufreq stats`.
    pub fn socket_path(&self, pid: u32) -> PathBuf {
        socket_of(&self.record_path(pid))
    }

    /// Writes a record, all of it or nothing.
    ///
    /// # Errors
    /// As [`OwnDir::make`], [`OwnDir::create`], write(2) (`ENOSPC`) and [`OwnDir::rename`]. An
    /// older record stays.
    pub fn write(&self, record: &VmmRecord) -> anyhow::Result<()> {
        let name = format!("{}.json", record.owner.pid);
        self.write_file(&name, &serde_json::to_string(record)?)
    }

    /// Writes a file of the directory, all of it or nothing.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(super) fn write_file(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let unfinished = format!("{name}.new");
        let written = || {
            let dir = OwnDir::make(&self.0)?;
            // Of a process that was killed, or of the last try.
            dir.remove(&unfinished)?;
            dir.create(&unfinished)?.write_all(text.as_bytes())?;
            dir.rename(&unfinished, name)
        };
        // The last user of the directory may remove it between two steps.
        let again = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => written(),
            _ => Err(error),
        };
        written().or_else(again).with_context(|| {
            let path = self.0.join(name);
            format!(
                "{} can't be written; make its directory writable",
                path.display()
            )
        })
    }

    /// All records, and the files that should be records and aren't. Records
    /// that come or go meanwhile may be missing.
    ///
    /// # Errors
    /// [`Untrusted`] when others than root and this user could have written one of them,
    /// [`NoRecord::Foreign`] when one names what no VMM makes: then none counts.
    pub fn list(&self) -> anyhow::Result<Vec<(PathBuf, anyhow::Result<VmmRecord>)>> {
        let Some(dir) = OwnDir::open(&self.0)? else {
            return Ok(Vec::new());
        };
        let mut paths: Vec<_> = dir
            .names()?
            .iter()
            .map(|name| self.0.join(name))
            .filter(|path| pid_of(path).is_some())
            .collect();
        paths.sort();
        let mut records = Vec::new();
        for path in paths {
            let record = match read_in(&dir, &path) {
                Err(NoRecord::Gone) => continue,
                Err(why @ (NoRecord::Wrong(_) | NoRecord::OtherVersion { .. })) => Err(why.into()),
                record => Ok(record?),
            };
            records.push((path, record));
        }
        Ok(records)
    }

    /// The socket of the VMM `pid`, if root or this user made it.
    ///
    /// # Errors
    /// As [`OwnDir::open`] and [`check_socket`](vcpufreq_rt::check_socket); a socket that isn't
    /// there is no error.
    pub fn socket(&self, pid: u32) -> Result<PathBuf, Untrusted> {
        let path = self.socket_path(pid);
        if OwnDir::open(&self.0)?.is_none() {
            return Ok(path);
        }
        match vcpufreq_rt::check_socket(&path) {
            // Connecting reports it.
            Err(why) if why.is_missing() => Ok(path),
            checked => checked.map(|()| path),
        }
    }
}

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
pub enum NoRecord {
    /// There is no file.
    #[error("it is gone")]
    Gone,
    /// Another user may have written it.
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    /// It names what no VMM makes.
    #[error(
        "{} names {}, which no VMM makes; look at what made it, then remove it",
        record.display(), what.display()
    )]
    Foreign {
        /// The record.
        record: PathBuf,
        /// What it names.
        what: PathBuf,
    },
    /// It has more than this version knows.
    #[error("it is another version's: {why}")]
    OtherVersion {
        /// What this version knows of it.
        known: Box<VmmRecord>,
        /// What it doesn't know.
        why: String,
    },
    /// It isn't one.
    #[error("{0}")]
    Wrong(String),
}

/// A record as far as this version knows what is in it; none of a file that is no record.
pub fn known(record: &anyhow::Result<VmmRecord>) -> Option<&VmmRecord> {
    match record {
        Ok(record) => Some(record),
        Err(why) => match why.downcast_ref()? {
            NoRecord::OtherVersion { known, .. } => Some(known),
            _ => None,
        },
    }
}

/// Reads a record.
///
/// # Errors
/// [`NoRecord::Gone`] when there is none, [`NoRecord::Untrusted`] when another user may have
/// written it, [`NoRecord::Wrong`] when it isn't finished, isn't a record or is another process',
/// [`NoRecord::OtherVersion`] when it has more than this version knows, [`NoRecord::Foreign`] when it
/// names what no VMM makes.
pub fn read(path: &Path) -> Result<VmmRecord, NoRecord> {
    match directory_of(path)? {
        Some(dir) => read_in(&dir, path),
        None => Err(NoRecord::Gone),
    }
}

fn read_in(dir: &OwnDir, path: &Path) -> Result<VmmRecord, NoRecord> {
    let wrong = |why: String| Err(NoRecord::Wrong(why));
    if is_unfinished(path) {
        return wrong("it is not finished".to_owned());
    }
    let text = dir.read(name_of(path))?.ok_or(NoRecord::Gone)?;
    let (record, more) = match parse(&text) {
        Ok(record) => record,
        Err(why) => return wrong(why.to_string()),
    };
    if Some(record.owner.pid) != pid_of(path) {
        return wrong(format!("it is the record of process {}", record.owner.pid));
    }
    if let Some(what) = record.foreign() {
        return Err(NoRecord::Foreign {
            record: path.to_owned(),
            what: what.to_owned(),
        });
    }
    match more {
        Some(why) => Err(NoRecord::OtherVersion {
            known: Box::new(record),
            why,
        }),
        None => Ok(record),
    }
}

/// A record in a text, and what else is there that this version doesn't know.
fn parse(text: &str) -> serde_json::Result<(VmmRecord, Option<String>)> {
    let why = match serde_json::from_str(text) {
        Ok(record) => return Ok((record, None)),
        Err(why) => why,
    };
    let mut fields: serde_json::Map<_, _> = serde_json::from_str(text)?;
    fields.retain(|name, _| FIELDS.contains(&&**name));
    let known = serde_json::from_value(fields.into());
    known.map(|known| (known, Some(why.to_string())))
}

/// Opens a record, if it is there.
///
/// # Errors
/// As [`OwnDir::open`] and [`OwnDir::file`].
pub fn open(path: &Path) -> Result<Option<File>, Untrusted> {
    match directory_of(path)? {
        Some(dir) => dir.file(name_of(path)),
        None => Ok(None),
    }
}

/// Locks `file`, which another may hold for as long as `patience`.
///
/// # Errors
/// `EWOULDBLOCK` when another still holds it then, or another errno of flock(2); with the file, which
/// isn't locked.
pub fn lock_within(mut file: File, patience: Duration) -> Result<Flock<File>, (File, Errno)> {
    let until = Instant::now() + patience;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => return Ok(held),
            Err(unlocked) if Instant::now() >= until => return Err(unlocked),
            Err((unlocked, _)) => file = unlocked,
        }
        sleep(TRY_EVERY);
    }
}

fn directory_of(path: &Path) -> Result<Option<OwnDir>, Untrusted> {
    OwnDir::open(path.parent().unwrap_or(path))
}

fn name_of(path: &Path) -> &str {
    // What isn't text has no number, so it is no record.
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

impl VmmRecord {
    /// A path in it that isn't one of the groups that process makes, comes from, or is put into.
    fn foreign(&self) -> Option<&Path> {
        let own = format!("{}{}", vcpufreq_device::host::GROUP_PREFIX, self.owner.pid);
        let is_plain = |path: &Path| {
            let mut parts = path.components();
            path.is_absolute()
                && parts.all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        };
        let is_own = |path: &Path| name_of(path) == own;
        let is_partition = |path: &Path| name_of(path).starts_with("vcpufreq-rt.");
        let groups = self.groups.as_ref();
        let own = groups
            .map(|groups| &*groups.group)
            .filter(|path| !is_own(path));
        let top = self.partition().map(|partition| &*partition.top);
        let top = top.filter(|path| !is_partition(path));
        let mut paths = self.paths();
        own.or(top).or_else(|| paths.find(|path| !is_plain(path)))
    }

    fn partition(&self) -> Option<&InPartition> {
        self.rt.as_ref()?.partition.as_ref()
    }

    /// The cgroups that it names.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let groups = self.groups.iter().flat_map(|g| [&*g.group, &*g.origin]);
        let partition = self.partition().into_iter();
        let adopted = self.adopted.iter().flat_map(AdoptedGroups::of_vcpus);
        groups
            .chain(partition.flat_map(|p| [&*p.top, &*p.origin]))
            .chain(adopted)
            .chain(self.raised.paths())
    }
}

/// Removes a record, what a killed writer left of it, and its VMM's socket.
///
/// # Errors
/// As [`OwnDir::open`], [`OwnDir::file`] and [`OwnDir::remove`]; what has not the name of a record, or
/// isn't a file that this user could have written, stays. The record goes last: when another file
/// can't be removed, it stays.
pub fn remove(path: &Path) -> io::Result<()> {
    if pid_of(path).is_none() || is_unfinished(path) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if let Some(dir) = directory_of(path)? {
        dir.file(name_of(path))?;
    }
    remove_all(&[&unfinished(path), &socket_of(path), path])
}

/// Removes what a killed writer left of the record at `path`, which is gone, and its VMM's socket.
///
/// # Errors
/// As [`OwnDir::open`] and [`OwnDir::remove`].
pub fn remove_beside(path: &Path) -> io::Result<()> {
    remove_all(&[&unfinished(path), &socket_of(path)])
}

/// Removes a file of the directory, if it is there, and the directory when that
/// was the last one.
pub fn remove_file(path: &Path) -> io::Result<()> {
    remove_all(&[path])
}

/// Removes the file of [`StateDir::tree_file`], and what a killed QEMU left beside it.
///
/// # Errors
/// As [`OwnDir::open`], [`OwnDir::names`] and [`OwnDir::remove`].
pub fn remove_tree_file(path: &Path) -> io::Result<()> {
    let Some(dir) = directory_of(path)? else {
        return Ok(());
    };
    let names = dir.names()?.into_iter();
    for name in names.filter(|name| name.starts_with(name_of(path))) {
        dir.remove(&name)?;
    }
    dir.leave();
    Ok(())
}

/// Removes these files of one directory, and that when nothing else is in it.
fn remove_all(paths: &[&Path]) -> io::Result<()> {
    let Some(dir) = paths.first().map(|path| directory_of(path)).transpose()? else {
        return Ok(());
    };
    let Some(dir) = dir else { return Ok(()) };
    for path in paths {
        dir.remove(name_of(path))?;
    }
    dir.leave();
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

/// The process of a file of the directory, by its name, and whether it is an unfinished file.
fn parse_name(path: &Path) -> Option<(u32, bool)> {
    let (pid, kind) = path.file_name()?.to_str()?.split_once('.')?;
    let unfinished = match kind {
        "json" => false,
        "json.new" | "dtb.new" => true,
        beside if beside.starts_with("dtb.new.") => true,
        _ => return None,
    };
    Some((pid.parse().ok()?, unfinished))
}

/// Whether a file is a record or a device tree whose writer was killed, or is at it.
pub fn is_unfinished(path: &Path) -> bool {
    parse_name(path).is_some_and(|(_, unfinished)| unfinished)
}

/// The process that a record is of, by its name; also of an unfinished one.
pub fn pid_of(path: &Path) -> Option<u32> {
    parse_name(path).map(|(pid, _)| pid)
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
