// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface to a host: reads and changes of its files.
//!
//! Paths are absolute, as on the running host; where `/` is, the implementation knows.

use std::{fs::File, io};

use crate::own_dir::Untrusted;

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
pub trait Look {
    /// The trimmed text of a file.
    ///
    /// # Errors
    /// Why it can't be read.
    fn read(&self, path: &str) -> Reading;

    /// The names in a folder, sorted; those that are numbers by number.
    ///
    /// # Errors
    /// Why it can't be read.
    fn list(&self, path: &str) -> Result<Vec<String>, Unread>;

    /// Whether a file's mode lets anybody write it. The kernel gives interrupts and workqueues
    /// that can't be moved files without write permission; root may open them all the same.
    fn writable(&self, path: &str) -> bool;

    /// Where a symbolic link points, its last component.
    fn link_name(&self, path: &str) -> Option<String>;

    /// All of a file, as it is.
    ///
    /// # Errors
    /// Why it can't be read.
    fn bytes(&self, path: &str) -> Result<Vec<u8>, Unread>;

    /// The names in a folder of our own; none where there is no such folder.
    ///
    /// # Errors
    /// When others than root and this user could have made what is in it, or why it can't be read.
    fn own_names(&self, dir: &str) -> Result<Vec<String>, Untrusted>;

    /// The text of a file of our own, if there is one.
    ///
    /// # Errors
    /// As [`Self::own_names`].
    fn own_file(&self, path: &str) -> Result<Option<String>, Untrusted>;

    /// The decimal number in a file.
    fn number(&self, path: &str) -> Option<i64> {
        self.read(path).ok()?.parse().ok()
    }
}

/// Changing. Each call is one step that a crash comes before or after.
pub trait Host: Look {
    /// Writes a kernel file in one call.
    ///
    /// # Errors
    /// What the kernel refused.
    fn write(&self, path: &str, value: &str) -> io::Result<()>;

    /// Makes a folder.
    ///
    /// # Errors
    /// What the kernel refused.
    fn make_dir(&self, path: &str) -> io::Result<()>;

    /// Removes a cgroup's folder; its files go with it.
    ///
    /// # Errors
    /// What the kernel refused.
    fn remove_dir(&self, path: &str) -> io::Result<()>;

    /// Gives a thread a scheduling policy, written `fifo:4`, `rr:4` or `other:0`.
    ///
    /// # Errors
    /// What the kernel refused, or a text that is none of these.
    fn schedule(&self, pid: u32, policy: &str) -> io::Result<()>;

    /// Makes a file of our own where none is, all of it or nothing, and on disk when this returns;
    /// its folder too, for this user alone. It is held until the result is dropped.
    ///
    /// # Errors
    /// `AlreadyExists` when there is one, `WouldBlock` when another process is making it, or what
    /// the file system refused.
    fn create(&self, path: &str, text: &str) -> io::Result<Held>;

    /// Holds a file of our own, against other processes that do.
    ///
    /// # Errors
    /// `WouldBlock` when another process holds it, or what the file system refused.
    fn hold(&self, path: &str) -> io::Result<Held>;

    /// Holds it together with others that do the same, against [`Self::hold`].
    ///
    /// # Errors
    /// As that.
    fn share(&self, path: &str) -> io::Result<Held>;

    /// Puts a text in place of a file of our own, all of it or nothing, on disk when this returns.
    ///
    /// # Errors
    /// What the file system refused.
    fn replace(&self, path: &str, text: &str) -> io::Result<()>;

    /// Removes a file of our own; one that isn't there is removed. Its folder goes when it was the
    /// last in there.
    ///
    /// # Errors
    /// What the file system refused.
    fn discard(&self, path: &str) -> io::Result<()>;

    /// Removes what a killed process left of such a file that it was making; the file itself
    /// stays. Its folder goes when that was the last in there.
    ///
    /// # Errors
    /// `WouldBlock` when a living process is making it, or what the file system refused.
    fn discard_unfinished(&self, path: &str) -> io::Result<()>;
}

/// A file that this process holds; dropped or with the process' end, it is free again.
#[derive(Debug)]
pub struct Held(#[expect(dead_code, reason = "the lock is what matters")] pub(crate) File);
