// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A directory for this program's own records. Root undoes changes of the host by them, so a
//! directory or file counts only if no other user could have written it. It has to belong to root
//! or to this process' effective user, no other user may write to it, and no symbolic link may lead
//! to it. Files are opened relative to the open directory, so that the checked file is the one
//! used.

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{AtFlags, OFlag, openat, renameat},
    sys::stat::Mode,
    unistd::{UnlinkatFlags, geteuid, linkat, unlinkat},
};
use thiserror::Error;

/// The longest record, in bytes: some 60,000 values of a host.
const LONGEST: u64 = 16 << 20;
/// Write permission of the group and of all others.
const WRITE_OF_OTHERS: u32 = 0o022;

/// Why a directory or file isn't used.
#[derive(Debug, Error)]
pub enum Untrusted {
    /// A symbolic link, or the wrong kind of file.
    #[error("{} is not {wanted}; remove it, it was not made by this program", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// What is expected there.
        wanted: &'static str,
    },
    /// Another user's.
    #[error(
        "{} belongs to user {uid}, not to {}; look at what made it, then remove it",
        path.display(), trusted()
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Other users may write to it.
    #[error(
        "{} can be written by other users (mode {mode:o}); look at what is in it, then remove it or chmod go-w",
        path.display()
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Too long for a record.
    #[error("{} is longer than {LONGEST} bytes and no record; remove it", path.display())]
    Size {
        /// The file.
        path: PathBuf,
    },
    /// The file system's answer.
    #[error("{} can't be used ({error}); check its permissions", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The answer.
        error: io::Error,
    },
}

impl Untrusted {
    fn io(path: &Path, error: io::Error) -> Self {
        let path = path.to_owned();
        Self::Io { path, error }
    }

    /// Whether this user just can't see it.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Whether it isn't there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }
}

impl From<Untrusted> for io::Error {
    fn from(why: Untrusted) -> Self {
        match why {
            Untrusted::Io { error, .. } => error,
            why => Self::new(io::ErrorKind::PermissionDenied, why),
        }
    }
}

/// The users that are trusted, for people.
fn trusted() -> String {
    match geteuid().as_raw() {
        0 => "root".to_owned(),
        user => format!("user {user} or root"),
    }
}

/// Whether files and processes of this user are trusted: root's and this process' own are.
#[must_use]
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// Whether a socket at `path` is there and was made by a trusted user.
///
/// # Errors
/// [`Untrusted::Owner`] when it is another user's, [`Untrusted::Kind`] when it is no socket,
/// [`Untrusted::Io`] when it isn't there (`ENOENT`) or can't be looked at.
pub fn check_socket(path: &Path) -> Result<(), Untrusted> {
    let found = path.symlink_metadata();
    let found = found.map_err(|error| Untrusted::io(path, error))?;
    if !found.file_type().is_socket() {
        return Err(Untrusted::Kind {
            path: path.to_owned(),
            wanted: "a socket",
        });
    }
    // A socket's mode may let any user connect: its server checks that.
    check_owner(path, found.uid())
}

fn check_owner(path: &Path, uid: u32) -> Result<(), Untrusted> {
    let path = path.to_owned();
    match is_trusted(uid) {
        true => Ok(()),
        false => Err(Untrusted::Owner { path, uid }),
    }
}

fn check(path: &Path, file: &File) -> Result<(), Untrusted> {
    let found = file.metadata();
    let found = found.map_err(|error| Untrusted::io(path, error))?;
    check_owner(path, found.uid())?;
    let mode = found.mode() & 0o7777;
    match mode & WRITE_OF_OTHERS {
        0 => Ok(()),
        _ => Err(Untrusted::Mode {
            path: path.to_owned(),
            mode,
        }),
    }
}

/// An open directory that was found to be trusted.
#[derive(Debug)]
pub(super) struct OwnDir {
    dir: File,
    path: PathBuf,
}

impl AsFd for OwnDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

impl OwnDir {
    /// The directory at `path`, if there is one.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, Untrusted> {
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        let opened = File::options()
            .read(true)
            .custom_flags(flags.bits())
            .open(path);
        let dir = match opened {
            Ok(dir) => dir,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unopened(path, error, "a directory of its own")),
        };
        check(path, &dir)?;
        let path = path.to_owned();
        Ok(Some(Self { dir, path }))
    }

    /// The directory at `path`, made for this user alone if there is none.
    pub(super) fn make(path: &Path) -> Result<Self, Untrusted> {
        let failed = |error| Untrusted::io(path, error);
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
            _ => Self::open(path)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into())),
        }
    }

    /// The names in it that are text.
    pub(super) fn names(&self) -> Result<Vec<String>, Untrusted> {
        let listed = || -> Result<Vec<String>, Errno> {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let mut names = Vec::new();
            for entry in Dir::openat(self, ".", flags, Mode::empty())? {
                names.extend(entry?.file_name().to_str().ok().map(str::to_owned));
            }
            Ok(names)
        };
        listed().map_err(|error| self.failed("", error.into()))
    }

    /// The regular file `name`, open for reading, if there is one.
    pub(super) fn file(&self, name: &str) -> Result<Option<File>, Untrusted> {
        // Without O_NONBLOCK a pipe would be waited for.
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let opened = openat(self, name, flags, Mode::empty());
        let file: File = match opened {
            Ok(file) => file.into(),
            Err(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(unopened(&self.at(name), error.into(), "a regular file")),
        };
        let found = file.metadata().map_err(|error| self.failed(name, error))?;
        if !found.is_file() {
            return Err(Untrusted::Kind {
                path: self.at(name),
                wanted: "a regular file",
            });
        }
        check(&self.at(name), &file)?;
        Ok(Some(file))
    }

    /// The text of the file `name`, if there is one.
    pub(super) fn read(&self, name: &str) -> Result<Option<String>, Untrusted> {
        let Some(file) = self.file(name)? else {
            return Ok(None);
        };
        let mut text = Vec::new();
        let read = file.take(LONGEST + 1).read_to_end(&mut text);
        read.map_err(|error| self.failed(name, error))?;
        if text.len() as u64 > LONGEST {
            let path = self.at(name);
            return Err(Untrusted::Size { path });
        }
        Ok(Some(String::from_utf8_lossy(&text).into_owned()))
    }

    /// A new file `name` for this user alone, open for writing; `AlreadyExists` when anything has that
    /// name, a symbolic link too.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        Ok(openat(self, name, flags | OFlag::O_NOFOLLOW, mode)?.into())
    }

    /// Gives the file `from` the name `to`, in the place of any other.
    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(self, from, self, to)?)
    }

    /// Gives the file `from` the name `to` too, which must be free: else `AlreadyExists`.
    pub(super) fn link(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(linkat(self, from, self, to, AtFlags::empty())?)
    }

    /// Removes the file `name`; one that isn't there is removed.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(self, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Has the kernel write the directory itself to disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.dir.sync_all()
    }

    /// Removes it if nothing is in it.
    pub(super) fn leave(self) {
        // Refused while there are files.
        let _ = std::fs::remove_dir(&self.path);
    }

    fn at(&self, name: &str) -> PathBuf {
        match name {
            "" => self.path.clone(),
            name => self.path.join(name),
        }
    }

    fn failed(&self, name: &str, error: io::Error) -> Untrusted {
        Untrusted::io(&self.at(name), error)
    }
}

/// Why open(2) refused: with `O_NOFOLLOW` a symbolic link gives ELOOP, or ENOTDIR where a
/// directory was asked for; a socket gives ENXIO.
fn unopened(path: &Path, error: io::Error, wanted: &'static str) -> Untrusted {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ELOOP | Errno::ENOTDIR | Errno::ENXIO) => Untrusted::Kind {
            path: path.to_owned(),
            wanted,
        },
        _ => Untrusted::io(path, error),
    }
}
