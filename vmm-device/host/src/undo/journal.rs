// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A folder of records. A program writes its record before it changes the host, and removes it when
//! all is undone; any process reads it in between. A record is there as a whole or not at all:
//! `NAME.new` is one that is being written, or whose writer was killed at it.
//!
//! A record is locked with flock(2), which ends with the process that has the lock.

use std::{
    fs::File,
    io::{self, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use super::own_dir::{OwnDir, Untrusted};
use super::retry::TRY_EVERY;

/// A folder of records; it need not be there before the first one is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal(PathBuf);

/// A file or folder that this process holds; dropped or with the process' end, it is free again.
#[derive(Debug)]
pub struct LockedFile(#[expect(dead_code, reason = "the lock is what matters")] Flock<File>);

impl Journal {
    /// The folder at `path`; the one around it has to be there.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes it for this user alone, if it isn't there.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn make(&self) -> Result<(), Untrusted> {
        OwnDir::make(&self.0).map(drop)
    }

    /// The names in it that are text, sorted; none where there is no such folder.
    ///
    /// # Errors
    /// [`Untrusted::Kind`], [`Untrusted::Owner`] or [`Untrusted::Mode`] when others than root and
    /// this user could have made what is in it; [`Untrusted::Io`] when it can't be read.
    pub fn names(&self) -> Result<Vec<String>, Untrusted> {
        let Some(dir) = OwnDir::open(&self.0)? else {
            return Ok(Vec::new());
        };
        let mut names = dir.names()?;
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }

    /// The text of a record, if there is one.
    ///
    /// # Errors
    /// As [`Self::names`]; [`Untrusted::Size`] when the file has more than 16 MiB.
    pub fn read(&self, name: &str) -> Result<Option<String>, Untrusted> {
        match OwnDir::open(&self.0)? {
            Some(dir) => dir.read(name),
            None => Ok(None),
        }
    }

    /// Writes a record where none is, all of it or nothing, and on disk when this returns. It is
    /// held until the result is dropped.
    ///
    /// # Errors
    /// `AlreadyExists` when there is one, `WouldBlock` when another process is writing it,
    /// `PermissionDenied` when the folder isn't this user's alone or can't be written; otherwise
    /// the file system's, such as `ENOSPC` or `EROFS`.
    pub fn create(&self, name: &str, text: &str) -> io::Result<LockedFile> {
        // Unlike a rename, a link never takes another's place.
        self.finish(name, text, |dir, unfinished| {
            let linked = dir.link(unfinished, name);
            dir.remove(unfinished)?;
            linked
        })
    }

    /// Writes a record, in place of the one that may be there: all of it or nothing, on disk when
    /// this returns.
    ///
    /// # Errors
    /// As [`Self::create`], but for `AlreadyExists`. The old text stays, unless only the folder
    /// can't be put on disk.
    pub fn write(&self, name: &str, text: &str) -> io::Result<()> {
        let written = || self.finish(name, text, |dir, unfinished| dir.rename(unfinished, name));
        // The last user of the folder may remove it between two steps.
        let done = match written() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => written(),
            done => done,
        };
        done.map(drop)
    }

    /// Writes the text to a file of another name, which `name_it` gives its own.
    fn finish(
        &self,
        name: &str,
        text: &str,
        name_it: impl Fn(&OwnDir, &str) -> io::Result<()>,
    ) -> io::Result<LockedFile> {
        let dir = OwnDir::make(&self.0)?;
        let unfinished = unfinished(name);
        let file = match dir.create(&unfinished) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                remove_abandoned(&dir, &unfinished)?;
                dir.create(&unfinished)?
            }
            made => made?,
        };
        let mut file = lock(file, FlockArg::LockExclusive)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        name_it(&dir, &unfinished)?;
        dir.sync()?;
        Ok(LockedFile(file))
    }

    /// Holds a record against other processes that do. One that another holds is tried for as long as
    /// `patience`.
    ///
    /// # Errors
    /// `WouldBlock` when another process still holds it then, or has put another record there;
    /// `NotFound` when there is none, or the other one has removed it; `PermissionDenied` when it
    /// can't be opened or others could have written it.
    pub fn hold(&self, name: &str, patience: Duration) -> io::Result<LockedFile> {
        self.locked(name, FlockArg::LockExclusiveNonblock, patience)
    }

    /// Holds a record together with others that do the same, against [`Self::hold`].
    ///
    /// # Errors
    /// As [`Self::hold`] without patience.
    pub fn share(&self, name: &str) -> io::Result<LockedFile> {
        self.locked(name, FlockArg::LockSharedNonblock, Duration::ZERO)
    }

    fn locked(&self, name: &str, how: FlockArg, patience: Duration) -> io::Result<LockedFile> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let dir = OwnDir::open(&self.0)?.ok_or_else(gone)?;
        let file = dir.file(name)?.ok_or_else(gone)?;
        still_there(&dir, name, lock_within(file, how, patience)?)
    }

    /// Holds the folder itself, against others that do; one that another holds is tried for as long
    /// as `patience`. A folder without a record may be removed meanwhile by [`Self::leave`].
    ///
    /// # Errors
    /// `WouldBlock` when another process still holds it then; as open(2), `ENOENT` without the
    /// folder.
    pub fn lock(&self, patience: Duration) -> io::Result<LockedFile> {
        let dir = File::open(&self.0)?;
        lock_within(dir, FlockArg::LockExclusiveNonblock, patience).map(LockedFile)
    }

    /// Removes these files; one that isn't there is removed.
    ///
    /// # Errors
    /// `PermissionDenied` when the folder isn't this user's alone or can't be written; otherwise
    /// the file system's, such as `EROFS`. The file stays then, and those after it.
    pub fn remove<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> io::Result<()> {
        let Some(dir) = OwnDir::open(&self.0)? else {
            return Ok(());
        };
        names.into_iter().try_for_each(|name| dir.remove(name))
    }

    /// Removes what a killed process left of a record that it was writing; the record itself stays.
    ///
    /// # Errors
    /// `WouldBlock` when a living process is writing it; otherwise as [`Self::remove`].
    pub fn remove_unfinished(&self, name: &str) -> io::Result<()> {
        match OwnDir::open(&self.0)? {
            Some(dir) => remove_abandoned(&dir, &unfinished(name)),
            None => Ok(()),
        }
    }

    /// Removes the folder if nothing is in it.
    pub fn leave(&self) {
        if let Ok(Some(dir)) = OwnDir::open(&self.0) {
            dir.leave();
        }
    }
}

/// The name of a record that is being written.
#[must_use]
pub fn unfinished(name: &str) -> String {
    format!("{name}.new")
}

/// With [`io::ErrorKind::WouldBlock`] if another holds it, and `how` doesn't wait.
fn lock(file: File, how: FlockArg) -> io::Result<Flock<File>> {
    Flock::lock(file, how).map_err(|(_, error)| error.into())
}

fn lock_within(mut file: File, how: FlockArg, patience: Duration) -> io::Result<Flock<File>> {
    let until = Instant::now() + patience;
    loop {
        file = match Flock::lock(file, how) {
            Ok(held) => return Ok(held),
            Err((unlocked, Errno::EWOULDBLOCK)) if Instant::now() < until => unlocked,
            Err((_, error)) => return Err(error.into()),
        };
        sleep(TRY_EVERY);
    }
}

/// A locked file, if its name still leads to it. The last holder of the lock may have removed the
/// file; then the lock keeps no other process out.
fn still_there(dir: &OwnDir, name: &str, file: Flock<File>) -> io::Result<LockedFile> {
    let there = dir.file(name)?.ok_or(io::ErrorKind::NotFound)?.metadata()?;
    let locked = file.metadata()?;
    match (locked.dev(), locked.ino()) == (there.dev(), there.ino()) {
        true => Ok(LockedFile(file)),
        false => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Removes a file that no process holds; one that isn't there is removed.
fn remove_abandoned(dir: &OwnDir, name: &str) -> io::Result<()> {
    let Some(file) = dir.file(name)? else {
        return Ok(());
    };
    let _held = lock(file, FlockArg::LockExclusiveNonblock)?;
    dir.remove(name)
}

#[cfg(test)]
mod tests {
    //! Promises: a lock that keeps no other process out is none; a record is written whole, by one
    //! process, and what a killed one left is in nobody's way.
    use super::*;

    fn journal() -> (tempfile::TempDir, Journal) {
        let temporary = tempfile::tempdir().unwrap();
        let journal = Journal::at(temporary.path().join("own"));
        (temporary, journal)
    }

    #[test]
    fn a_lock_on_a_file_that_another_has_taken_the_place_of() {
        let (_temporary, journal) = journal();
        journal.write("rt.json", "first").unwrap();
        let dir = OwnDir::open(journal.path()).unwrap().unwrap();
        let opened = || dir.file("rt.json").unwrap().unwrap();
        let locked = || lock(opened(), FlockArg::LockSharedNonblock).unwrap();
        assert!(still_there(&dir, "rt.json", locked()).is_ok());
        let old = locked();
        journal.write("rt.json", "second").unwrap();
        let held = still_there(&dir, "rt.json", old);
        assert_eq!(held.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        journal.remove(["rt.json"]).unwrap();
        let held = journal.hold("rt.json", Duration::ZERO);
        assert_eq!(held.unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_is_held_is_no_other_processes() {
        let (_temporary, journal) = journal();
        let made = journal.create("7.json", "{}").unwrap();
        let kind = |tried: io::Result<LockedFile>| tried.unwrap_err().kind();
        let hold = || journal.hold("7.json", Duration::from_millis(1));
        assert_eq!(kind(hold()), io::ErrorKind::WouldBlock);
        assert_eq!(kind(journal.share("7.json")), io::ErrorKind::WouldBlock);
        let again = journal.create("7.json", "other");
        assert_eq!(kind(again), io::ErrorKind::AlreadyExists);
        drop(made);
        let shared = [journal.share("7.json"), journal.share("7.json")];
        assert!(shared.iter().all(Result::is_ok));
        assert_eq!(kind(hold()), io::ErrorKind::WouldBlock);
        drop(shared);
        drop(hold().unwrap());
        assert_eq!(journal.read("7.json").unwrap().as_deref(), Some("{}"));
        let _lock = journal.lock(Duration::ZERO).unwrap();
        assert_eq!(
            kind(journal.lock(Duration::ZERO)),
            io::ErrorKind::WouldBlock
        );
    }

    #[test]
    fn what_a_killed_writer_left_is_in_nobodys_way() {
        let (_temporary, journal) = journal();
        let dir = OwnDir::make(journal.path()).unwrap();
        let writer = dir.create("7.json.new").unwrap();
        let writer = lock(writer, FlockArg::LockExclusive).unwrap();
        let tried = journal.write("7.json", "{}").unwrap_err();
        assert_eq!(tried.kind(), io::ErrorKind::WouldBlock);
        let tried = journal.remove_unfinished("7.json").unwrap_err();
        assert_eq!(tried.kind(), io::ErrorKind::WouldBlock);
        drop(writer);
        journal.write("7.json", "{}").unwrap();
        assert_eq!(journal.names().unwrap(), ["7.json"]);
        drop(dir.create("7.json.new").unwrap());
        journal.remove_unfinished("7.json").unwrap();
        journal.leave();
        assert_eq!(journal.names().unwrap(), ["7.json"]);
        journal.remove(["7.json"]).unwrap();
        journal.leave();
        assert!(!journal.path().exists());
    }
}
