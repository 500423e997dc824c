// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The directory of the records. Before a VMM makes anything on the host, it writes a record of it there,
//! `PID.json`. With the record, all of it can be removed after any process was killed.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use vcpufreq_host::undo::{Journal, LockedFile, Untrusted, check_socket, unfinished};

use super::record::{NoRecord, VmmRecord, parse};
use super::record_names::{
    is_unfinished, name_of, pid_of, policy_socket_of, socket_of, tune_socket_of,
};

/// Where root's records are; others have theirs in `$XDG_RUNTIME_DIR/vcpufreq`.
pub const ROOT_DIR: &str = vcpufreq_host::undo::VMM_DIR;

/// The directory of the records.
#[derive(Clone, Debug)]
pub struct StateDir(Journal);

impl StateDir {
    /// This user's.
    ///
    /// # Errors
    /// When the user has no runtime directory.
    pub fn of_user() -> anyhow::Result<Self> {
        // The owner of a process' directory in procfs is its effective user.
        let user = fs::metadata("/proc/self").context("/proc can't be read; mount it")?;
        if user.uid() == 0 {
            return Ok(Self::at(ROOT_DIR));
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
        Self(Journal::at(dir))
    }

    /// The records, as the library keeps them.
    pub(super) fn journal(&self) -> &Journal {
        &self.0
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Where the record of `pid` is.
    pub fn record_path(&self, pid: u32) -> PathBuf {
        self.path().join(format!("{pid}.json"))
    }

    /// An empty file for process `pid` alone, in which QEMU writes its device tree. QEMU makes a
    /// file beside it and renames that one: its name has a dot and six characters more
    /// (g_file_set_contents). What a killed process left of either is removed as an unfinished
    /// record is.
    ///
    /// # Errors
    /// As [`Journal::write`].
    pub fn tree_file(&self, pid: u32) -> anyhow::Result<PathBuf> {
        let name = format!("{pid}.dtb.new");
        self.0.write(&name, "")?;
        Ok(self.path().join(name))
    }

    /// Where the VMM `pid` answers to `vcpufreq stats`.
    pub fn socket_path(&self, pid: u32) -> PathBuf {
        socket_of(&self.record_path(pid))
    }

    /// Where the VMM `pid` takes calls of `vcpufreq tune`.
    pub fn tune_socket_path(&self, pid: u32) -> PathBuf {
        tune_socket_of(&self.record_path(pid))
    }

    /// Where the guardian of the VMM `pid` takes calls of `vcpufreq policy`.
    pub fn policy_socket_path(&self, pid: u32) -> PathBuf {
        policy_socket_of(&self.record_path(pid))
    }

    /// Writes a record, all of it or nothing.
    ///
    /// # Errors
    /// As [`Journal::write`]. An older record stays.
    pub fn write(&self, record: &VmmRecord) -> anyhow::Result<()> {
        let name = format!("{}.json", record.owner.pid);
        self.write_file(&name, &serde_json::to_string(record)?)
    }

    /// Writes a file of the directory, all of it or nothing.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(super) fn write_file(&self, name: &str, text: &str) -> anyhow::Result<()> {
        self.0.write(name, text).with_context(|| {
            let path = self.path().join(name);
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
        let mut records = Vec::new();
        for name in self.0.names()? {
            let path = self.path().join(&name);
            if pid_of(&path).is_none() {
                continue;
            }
            let record = match read(&path) {
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
    /// As [`Journal::names`] and [`check_socket`]; a socket that isn't
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

    /// The socket for `vcpufreq policy` of the VMM `pid`, if root or this user made it.
    ///
    /// # Errors
    /// As [`Self::socket`].
    pub fn policy_socket(&self, pid: u32) -> Result<PathBuf, Untrusted> {
        self.checked(self.policy_socket_path(pid))
    }

    fn checked(&self, path: PathBuf) -> Result<PathBuf, Untrusted> {
        // Others could have made what is in it.
        self.0.names()?;
        match check_socket(&path) {
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
    let wrong = |why: String| Err(NoRecord::Wrong(why));
    if is_unfinished(path) {
        return wrong("it is not finished".to_owned());
    }
    let text = journal_of(path)
        .read(name_of(path))?
        .ok_or(NoRecord::Gone)?;
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
            what: what.name(),
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

/// Holds a record, which another may hold for as long as `patience`.
///
/// # Errors
/// As [`Journal::hold`]. Without the record there is none.
pub fn hold(path: &Path, patience: Duration) -> io::Result<Option<LockedFile>> {
    match journal_of(path).hold(name_of(path), patience) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        held => held.map(Some),
    }
}

fn journal_of(path: &Path) -> Journal {
    Journal::at(path.parent().unwrap_or(path))
}

/// Removes a record, what a killed writer left of it, and its VMM's sockets.
///
/// # Errors
/// As [`Journal::read`] and [`Journal::remove`]; what has not the name of a record, or isn't a file
/// that this user could have written, stays. The record goes last: when another file can't be
/// removed, it stays.
pub fn remove(path: &Path) -> io::Result<()> {
    if pid_of(path).is_none() || is_unfinished(path) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    journal_of(path).read(name_of(path))?;
    remove_all(path, &[path])
}

/// Removes what a killed writer left of the record at `path`, which is gone, and its VMM's sockets.
///
/// # Errors
/// As [`Journal::remove`].
pub fn remove_beside(path: &Path) -> io::Result<()> {
    remove_all(path, &[])
}

/// Removes a file of the directory, if it is there, and the directory when that
/// was the last one.
pub fn remove_file(path: &Path) -> io::Result<()> {
    let journal = journal_of(path);
    journal.remove([name_of(path)])?;
    journal.leave();
    Ok(())
}

/// Removes the file of [`StateDir::tree_file`], and what a killed QEMU left beside it.
///
/// # Errors
/// As [`Journal::names`] and [`Journal::remove`].
pub fn remove_tree_file(path: &Path) -> io::Result<()> {
    let journal = journal_of(path);
    let names = journal.names()?;
    let names = names.iter().filter(|name| name.starts_with(name_of(path)));
    journal.remove(names.map(String::as_str))?;
    journal.leave();
    Ok(())
}

/// Removes what is beside the record at `path`, then `last`; and the directory when nothing else is
/// in it.
fn remove_all(path: &Path, last: &[&Path]) -> io::Result<()> {
    let journal = journal_of(path);
    let unfinished = unfinished(name_of(path));
    let sockets = [
        socket_of(path),
        tune_socket_of(path),
        policy_socket_of(path),
    ];
    let names = sockets.iter().map(|path| name_of(path));
    let last = last.iter().map(|path| name_of(path));
    journal.remove([&*unfinished].into_iter().chain(names).chain(last))?;
    journal.leave();
    Ok(())
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
