// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The directory of the records. Before a VMM makes anything on the host, it writes a record of it there,
//! `PID.json`. With the record, all of it can be removed after any process was killed.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::Context;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use vcpufreq_host::undo::{OwnDir, Untrusted};

use super::record::{NoRecord, VmmRecord, parse};
use super::record_names::{is_unfinished, name_of, pid_of, socket_of, tune_socket_of, unfinished};

/// Where root's records are; others have theirs in `$XDG_RUNTIME_DIR/vcpufreq`.
pub const ROOT_DIR: &str = vcpufreq_host::undo::VMM_DIR;

/// How often to try a lock. Those who hold one wait for killed processes, which takes 1 to 20 ms.
const TRY_EVERY: Duration = Duration::from_millis(5);

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

    /// Where the VMM `pid` takes calls of `vcpufreq tune`.
    pub fn tune_socket_path(&self, pid: u32) -> PathBuf {
        tune_socket_of(&self.record_path(pid))
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
    /// As [`OwnDir::open`] and [`check_socket`](vcpufreq_host::undo::check_socket); a socket that isn't
    /// there is no error.
    pub fn socket(&self, pid: u32) -> Result<PathBuf, Untrusted> {
        self.checked(self.socket_path(pid))
    }

    /// The socket for `vcpufreq tune` of the VMM `pid`, if root or this user made it.
    ///
    /// # Errors
    /// As [`Self::socket`].
    pub fn tune_socket(&self, pid: u32) -> Result<PathBuf, Untrusted> {
        self.checked(self.tune_socket_path(pid))
    }

    fn checked(&self, path: PathBuf) -> Result<PathBuf, Untrusted> {
        if OwnDir::open(&self.0)?.is_none() {
            return Ok(path);
        }
        match vcpufreq_host::undo::check_socket(&path) {
            // Connecting reports it.
            Err(why) if why.is_missing() => Ok(path),
            checked => checked.map(|()| path),
        }
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

/// Removes a record, what a killed writer left of it, and its VMM's sockets.
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
    remove_all(&[
        &unfinished(path),
        &socket_of(path),
        &tune_socket_of(path),
        path,
    ])
}

/// Removes what a killed writer left of the record at `path`, which is gone, and its VMM's sockets.
///
/// # Errors
/// As [`OwnDir::open`] and [`OwnDir::remove`].
pub fn remove_beside(path: &Path) -> io::Result<()> {
    remove_all(&[&unfinished(path), &socket_of(path), &tune_socket_of(path)])
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

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
