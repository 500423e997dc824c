// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The running host, or a directory tree that stands for it (for looking).

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Read, Write},
    os::unix::{
        fs::{DirBuilderExt, FileExt, MetadataExt, PermissionsExt},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use vcpufreq_device::host::HostRoot;

use crate::{
    host::{Held, Host, Look, Reading, Unread},
    sys, value,
};

/// How long a server may take: it has one thread, which may be at other work.
const ANSWER: Duration = Duration::from_secs(5);

/// The host below a root; `/` is the running one.
#[derive(Clone, Debug, Default)]
pub struct KernelHost(HostRoot);

impl KernelHost {
    /// The host below `root`.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self(HostRoot::at(root))
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(Path::new(path))
    }

    /// Says something to a server, and hears it until it closes. A server that asks the kernel who
    /// it was (SO_PASSCRED of unix(7)) is told.
    fn talk(&self, socket: &str, text: &str) -> io::Result<String> {
        let mut stream = UnixStream::connect(self.path(socket))?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        stream.write_all(text.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Missing,
            io::ErrorKind::PermissionDenied => Self::Denied,
            _ => Self::Refused,
        }
    }
}

impl Look for KernelHost {
    fn read(&self, path: &str) -> Reading {
        let text = fs::read(self.path(path))?;
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    }

    fn bytes(&self, path: &str) -> Result<Vec<u8>, Unread> {
        Ok(fs::read(self.path(path))?)
    }

    fn register(&self, path: &str, offset: u64) -> Result<u64, Unread> {
        let mut bytes = [0; 8];
        File::open(self.path(path))?.read_exact_at(&mut bytes, offset)?;
        Ok(u64::from_ne_bytes(bytes))
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

    fn ask(&self, socket: &str, request: &str) -> Reading {
        Ok(self.talk(socket, request)?)
    }
}

impl Host for KernelHost {
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
        sys::set_scheduler(pid, policy, priority)
    }

    fn tell(&self, socket: &str, message: &str) -> io::Result<()> {
        self.talk(socket, message).map(drop)
    }

    fn create(&self, path: &str, text: &str) -> io::Result<Held> {
        let path = self.path(path);
        let dir = path.parent().unwrap_or(Path::new("/"));
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let unfinished = unfinished(&path);
        let mut file = only_mine(&unfinished)?;
        file.lock()?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        // Unlike a rename, a link never takes another's place.
        let linked = fs::hard_link(&unfinished, &path);
        fs::remove_file(&unfinished)?;
        linked?;
        File::open(dir)?.sync_all()?;
        Ok(Held(file))
    }

    fn hold(&self, path: &str) -> io::Result<Held> {
        let file = File::open(self.path(path))?;
        file.try_lock()?;
        still_there(&self.path(path), file)
    }

    fn share(&self, path: &str) -> io::Result<Held> {
        let file = File::open(self.path(path))?;
        file.try_lock_shared()?;
        still_there(&self.path(path), file)
    }

    fn replace(&self, path: &str, text: &str) -> io::Result<()> {
        let path = self.path(path);
        let unfinished = unfinished(&path);
        let mut file = File::create(&unfinished)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, &path)?;
        File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    }

    fn discard(&self, path: &str) -> io::Result<()> {
        let path = self.path(path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        match remove_abandoned(&unfinished(&path)) {
            // Somebody is making the next one.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => leave(&path),
        }
        Ok(())
    }

    fn discard_unfinished(&self, path: &str) -> io::Result<()> {
        let path = self.path(path);
        match remove_abandoned(&unfinished(&path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => leave(&path),
        }
        Ok(())
    }
}

/// Removes the folder of `path`, when nothing is in it.
fn leave(path: &Path) {
    if let Some(dir) = path.parent() {
        // Refused while there are other files.
        let _ = fs::remove_dir(dir);
    }
}

/// A file that is locked, if its path still leads to it: who had it locked before may have removed
/// it, and then the lock holds nobody off.
fn still_there(path: &Path, file: File) -> io::Result<Held> {
    let (locked, there) = (file.metadata()?, fs::metadata(path)?);
    match (locked.dev(), locked.ino()) == (there.dev(), there.ino()) {
        true => Ok(Held(file)),
        false => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// A file that is being written.
fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// A new file at `path`; what a killed process left there goes.
fn only_mine(path: &Path) -> io::Result<File> {
    let new = || File::options().write(true).create_new(true).open(path);
    match new() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            remove_abandoned(path)?;
            new()
        }
        made => made,
    }
}

/// Removes a file that nobody holds.
fn remove_abandoned(path: &Path) -> io::Result<()> {
    File::open(path)?.try_lock()?;
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    //! Promise: a lock that holds nobody off is none.
    use super::*;

    #[test]
    fn a_lock_on_a_file_that_another_has_taken_the_place_of() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("rt.json"), dir.path().join("other"));
        fs::write(&path, "old").unwrap();
        let opened = || File::open(&path).unwrap();
        assert!(still_there(&path, opened()).is_ok());
        let old = opened();
        fs::write(&other, "new").unwrap();
        fs::rename(&other, &path).unwrap();
        let held = still_there(&path, old);
        assert_eq!(held.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
