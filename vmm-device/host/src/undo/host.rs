// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface to a host: reads and changes of its files.
//!
//! Paths are absolute, as on the running host; where `/` is, the implementation knows.

use std::io;

use crate::HostRoot;

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

    /// Where its files are.
    fn root(&self) -> &HostRoot;

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
}
