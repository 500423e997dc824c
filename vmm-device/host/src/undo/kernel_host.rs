// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The running host, or a directory tree that stands for it (for looking).

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use super::{
    host::{LockedFile, ReadHost, Reading, Unread, WriteHost},
    own_dir::{OwnDir, Untrusted},
    value,
};
use crate::{HostRoot, SchedAttr, Tid};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

/// The longest text that is read, in bytes: procfs also shows what other users' processes made.
const LONGEST: u64 = 16 << 20;

/// The host below a root; `/` is the running one.
#[derive(Clone, Debug, Default)]
pub struct KernelHost(HostRoot);

impl KernelHost {
    /// The host below `root`.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self(HostRoot::at(root))
    }

    /// The host below `root`; without one, the running one.
    #[must_use]
    pub fn at_or_running(root: Option<&Path>) -> Self {
        root.map_or_else(Self::default, Self::at)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path(path)
    }

    /// The folder of a file of our own, if it is there, and the file's name in it.
    fn own<'a>(&self, path: &'a str) -> Result<Option<(OwnDir, &'a str)>, Untrusted> {
        let (dir, name) = parts(path);
        let dir = OwnDir::open(&self.path(dir))?;
        Ok(dir.map(|dir| (dir, name)))
    }

    /// Opens and locks a file of our own.
    fn locked(&self, path: &str, how: FlockArg) -> io::Result<LockedFile> {
        let (dir, name) = self.own(path)?.ok_or(io::ErrorKind::NotFound)?;
        let file = dir.file(name)?.ok_or(io::ErrorKind::NotFound)?;
        still_there(&dir, name, lock(file, how)?)
    }
}

impl From<&HostRoot> for KernelHost {
    fn from(root: &HostRoot) -> Self {
        Self(root.clone())
    }
}

/// The folder and the name of an absolute path.
fn parts(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("/", path))
}

/// All of a text, which may not be longer than [`LONGEST`].
fn bounded(source: impl Read) -> io::Result<String> {
    let mut text = Vec::new();
    source.take(LONGEST + 1).read_to_end(&mut text)?;
    match text.len() as u64 > LONGEST {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(String::from_utf8_lossy(&text).into_owned()),
    }
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        // procfs' error for a process that ends while its file is open.
        if error.raw_os_error() == Some(Errno::ESRCH as i32) {
            return Self::Missing;
        }
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Missing,
            io::ErrorKind::PermissionDenied => Self::Denied,
            _ => Self::Refused,
        }
    }
}

impl ReadHost for KernelHost {
    fn read(&self, path: &str) -> Reading {
        let text = bounded(File::open(self.path(path))?)?;
        Ok(text.trim().to_owned())
    }

    fn bytes(&self, path: &str) -> Result<Vec<u8>, Unread> {
        Ok(fs::read(self.path(path))?)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, Unread> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.path(path))? {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort_by_key(|name| (name.parse::<u32>().unwrap_or(u32::MAX), name.clone()));
        Ok(names)
    }

    fn writable(&self, path: &str) -> bool {
        fs::metadata(self.path(path)).is_ok_and(|file| file.permissions().mode() & 0o222 != 0)
    }

    fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    fn own_names(&self, dir: &str) -> Result<Vec<String>, Untrusted> {
        match OwnDir::open(&self.path(dir))? {
            Some(dir) => dir.names(),
            None => Ok(Vec::new()),
        }
    }

    fn own_file(&self, path: &str) -> Result<Option<String>, Untrusted> {
        match self.own(path)? {
            Some((dir, name)) => dir.read(name),
            None => Ok(None),
        }
    }
}

impl WriteHost for KernelHost {
    fn as_look(&self) -> &dyn ReadHost {
        self
    }

    fn write(&self, path: &str, value: &str) -> io::Result<()> {
        let mut file = File::options().write(true).open(self.path(path))?;
        // One call: the kernel takes each as a whole value.
        match file.write(value.as_bytes())? {
            written if written == value.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn make_dir(&self, path: &str) -> io::Result<()> {
        fs::create_dir(self.path(path))
    }

    fn remove_dir(&self, path: &str) -> io::Result<()> {
        fs::remove_dir(self.path(path))
    }

    fn schedule(&self, pid: u32, policy: &str) -> io::Result<()> {
        let (policy, priority) = value::scheduling(policy).ok_or(io::ErrorKind::InvalidInput)?;
        let tid = i32::try_from(pid).ok().and_then(Tid::new);
        let tid = tid.ok_or(io::ErrorKind::InvalidInput)?;
        let attr = SchedAttr {
            policy,
            priority,
            nice: SchedAttr::nice_of(tid)?,
            ..SchedAttr::default()
        };
        attr.set(tid)
    }

    fn create(&self, path: &str, text: &str) -> io::Result<LockedFile> {
        let (dir, name) = parts(path);
        let dir = OwnDir::make(&self.path(dir))?;
        let unfinished = unfinished(name);
        let mut file = lock(only_mine(&dir, &unfinished)?, FlockArg::LockExclusive)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        // Unlike a rename, a link never takes another's place.
        let linked = dir.link(&unfinished, name);
        dir.remove(&unfinished)?;
        linked?;
        dir.sync()?;
        Ok(LockedFile(file))
    }

    fn hold(&self, path: &str) -> io::Result<LockedFile> {
        self.locked(path, FlockArg::LockExclusiveNonblock)
    }

    fn share(&self, path: &str) -> io::Result<LockedFile> {
        self.locked(path, FlockArg::LockSharedNonblock)
    }

    fn replace(&self, path: &str, text: &str) -> io::Result<()> {
        let (dir, name) = self.own(path)?.ok_or(io::ErrorKind::NotFound)?;
        let unfinished = unfinished(name);
        let mut file = only_mine(&dir, &unfinished)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        dir.rename(&unfinished, name)?;
        dir.sync()
    }

    fn discard(&self, path: &str) -> io::Result<()> {
        if let Some((dir, name)) = self.own(path)? {
            dir.remove(name)?;
        }
        match self.discard_unfinished(path) {
            // Another process is making the next one.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            done => done,
        }
    }

    fn discard_unfinished(&self, path: &str) -> io::Result<()> {
        let Some((dir, name)) = self.own(path)? else {
            return Ok(());
        };
        remove_abandoned(&dir, &unfinished(name))?;
        dir.leave();
        Ok(())
    }
}

/// With [`io::ErrorKind::WouldBlock`] if another holds it, and `how` doesn't wait.
fn lock(file: File, how: FlockArg) -> io::Result<Flock<File>> {
    Flock::lock(file, how).map_err(|(_, error)| error.into())
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

/// The name of a file that is being written: `rt.new` of `rt.json`.
fn unfinished(name: &str) -> String {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    format!("{stem}.new")
}

/// A new file, in place of one that a killed process left.
fn only_mine(dir: &OwnDir, name: &str) -> io::Result<File> {
    match dir.create(name) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            remove_abandoned(dir, name)?;
            dir.create(name)
        }
        made => made,
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
    //! Promises: a lock that keeps no other process out is none; what is read has a bound.
    use super::*;

    #[test]
    fn a_lock_on_a_file_that_another_has_taken_the_place_of() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = OwnDir::make(&temporary.path().join("own")).unwrap();
        dir.create("rt.json").unwrap();
        let opened = || dir.file("rt.json").unwrap().unwrap();
        let locked = || lock(opened(), FlockArg::LockSharedNonblock).unwrap();
        assert!(still_there(&dir, "rt.json", locked()).is_ok());
        let old = locked();
        dir.create("other").unwrap();
        dir.rename("other", "rt.json").unwrap();
        let held = still_there(&dir, "rt.json", old);
        assert_eq!(held.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn what_is_read_is_bounded() {
        assert!(bounded(io::repeat(b'x').take(LONGEST)).is_ok());
        assert!(bounded(io::repeat(b'x')).is_err());
    }
}
