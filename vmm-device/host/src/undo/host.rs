// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface to a host: reads and changes of its files.
//!
//! Paths are absolute, as on the running host; where `/` is, the implementation knows.

use std::{fs::File, io};

use nix::fcntl::Flock;

use super::own_dir::Untrusted;

/// Why a file could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// There is none.
    Missing,
    /// There may be one; this user can't see it.
    Denied,
    /// The kernel refused the read.
    Refused,
}

/// The trimmed text of a file, or why there is none.
pub type Reading = Result<String, Unread>;

/// Looking.
pub trait ReadHost {
    /// The trimmed text of a file.
    ///
    /// # Errors
    /// [`Unread::Missing`] when there is no such file or its process has ended, [`Unread::Denied`]
    /// for `EACCES` and `EPERM`, [`Unread::Refused`] for all other errors, such as a text of more
    /// than 16 MiB.
    fn read(&self, path: &str) -> Reading;

    /// The names in a folder, sorted; those that are numbers by number.
    ///
    /// # Errors
    /// [`Unread::Missing`] when there is no such folder, [`Unread::Denied`] for `EACCES` and
    /// `EPERM`, [`Unread::Refused`] for all other errors.
    fn list(&self, path: &str) -> Result<Vec<String>, Unread>;

    /// Whether a file's mode lets anybody write it. The kernel gives interrupts and workqueues
    /// that can't be moved files without write permission; root may open them all the same.
    fn writable(&self, path: &str) -> bool;

    /// Where a symbolic link points, its last component.
    fn link_name(&self, path: &str) -> Option<String>;

    /// All of a file, as it is.
    ///
    /// # Errors
    /// As [`Self::read`], but for the bound on its length.
    fn bytes(&self, path: &str) -> Result<Vec<u8>, Unread>;

    /// The names in a folder of our own; none where there is no such folder.
    ///
    /// # Errors
    /// [`Untrusted::Kind`], [`Untrusted::Owner`] or [`Untrusted::Mode`] when others than root and
    /// this user could have made what is in it; [`Untrusted::Io`] when it can't be read.
    fn own_names(&self, dir: &str) -> Result<Vec<String>, Untrusted>;

    /// The text of a file of our own, if there is one.
    ///
    /// # Errors
    /// As [`Self::own_names`]; [`Untrusted::Size`] when the file has more than 16 MiB.
    fn own_file(&self, path: &str) -> Result<Option<String>, Untrusted>;

    /// The decimal number in a file.
    fn number(&self, path: &str) -> Option<i64> {
        self.read(path).ok()?.parse().ok()
    }
}

/// Changing. Each call is one step that a crash comes before or after.
pub trait WriteHost: ReadHost {
    /// The same, for looking: Rust 1.85 can't make a `dyn ReadHost` of a `dyn WriteHost`.
    fn as_look(&self) -> &dyn ReadHost;

    /// Writes a kernel file in one call.
    ///
    /// # Errors
    /// `ENOENT` or `EACCES` when the file can't be opened; the errno by which the kernel refuses
    /// the value, such as `EINVAL`, `EBUSY`, or `EIO` for an interrupt that a driver manages: the
    /// old value stays. `WriteZero` when the kernel takes a part of the text.
    fn write(&self, path: &str, value: &str) -> io::Result<()>;

    /// Makes a folder.
    ///
    /// # Errors
    /// As mkdir(2): `EEXIST`, `ENOENT` without the folder around it, `EACCES`, or `EAGAIN` over a
    /// cgroup's `cgroup.max.descendants`.
    fn make_dir(&self, path: &str) -> io::Result<()>;

    /// Removes a cgroup's folder; its files go with it.
    ///
    /// # Errors
    /// As rmdir(2): `ENOENT`, `EACCES`, or `EBUSY` while the cgroup has processes or children.
    fn remove_dir(&self, path: &str) -> io::Result<()>;

    /// Gives a thread a scheduling policy, written `fifo:4`, `rr:4` or `other:0`.
    ///
    /// # Errors
    /// `InvalidInput` for a text that is none of these; as sched_setattr(2): `ESRCH` when there is
    /// no such thread, `EPERM` without CAP_SYS_NICE, `EBUSY` or `EINVAL`. The thread keeps its
    /// policy.
    fn schedule(&self, pid: u32, policy: &str) -> io::Result<()>;

    /// Makes a file of our own where none is, all of it or nothing, and on disk when this returns;
    /// its folder too, for this user alone. It is held until the result is dropped.
    ///
    /// # Errors
    /// `AlreadyExists` when there is one, `WouldBlock` when another process is making it,
    /// `PermissionDenied` when the folder isn't this user's alone or can't be written; otherwise
    /// the file system's, such as `ENOSPC` or `EROFS`.
    fn create(&self, path: &str, text: &str) -> io::Result<LockedFile>;

    /// Holds a file of our own, against other processes that do.
    ///
    /// # Errors
    /// `WouldBlock` when another process holds it, `NotFound` when there is none,
    /// `PermissionDenied` when it can't be opened or others could have written it.
    fn hold(&self, path: &str) -> io::Result<LockedFile>;

    /// Holds it together with others that do the same, against [`Self::hold`].
    ///
    /// # Errors
    /// As [`Self::hold`].
    fn share(&self, path: &str) -> io::Result<LockedFile>;

    /// Puts a text in place of a file of our own, all of it or nothing, on disk when this returns.
    ///
    /// # Errors
    /// `NotFound` without its folder, `WouldBlock` when another process is writing it,
    /// `PermissionDenied` when the folder isn't this user's alone or can't be written; otherwise
    /// the file system's, such as `ENOSPC` or `EROFS`. The old text stays, unless only the folder
    /// can't be put on disk.
    fn replace(&self, path: &str, text: &str) -> io::Result<()>;

    /// Removes a file of our own; one that isn't there is removed. Its folder goes when it was the
    /// last in there.
    ///
    /// # Errors
    /// `PermissionDenied` when the folder isn't this user's alone or can't be written; otherwise
    /// the file system's, such as `EROFS`. The file stays then, or what a killed process left of it
    /// does.
    fn discard(&self, path: &str) -> io::Result<()>;

    /// Removes what a killed process left of such a file that it was making; the file itself
    /// stays. Its folder goes when that was the last in there.
    ///
    /// # Errors
    /// `WouldBlock` when a living process is making it; otherwise as [`Self::discard`].
    fn discard_unfinished(&self, path: &str) -> io::Result<()>;
}

/// A file that this process holds; dropped or with the process' end, it is free again.
#[derive(Debug)]
pub struct LockedFile(
    #[expect(dead_code, reason = "the lock is what matters")] pub(crate) Flock<File>,
);
