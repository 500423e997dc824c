// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thread that is going to be changed. The kernel gives the number of a thread that has ended to
//! another one, of any process, while `sched_setattr`, `sched_setaffinity` and `cgroup.threads` take
//! numbers only.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::HostRoot;
use super::sys::Tid;

/// A thread by its number, and one of another process by an open file of procfs, too.
#[derive(Debug)]
pub struct HostThread {
    tid: Tid,
    /// Its `comm`, the file that costs the kernel the least.
    name: Option<File>,
}

impl HostThread {
    /// A thread of this process, which ends no thread that it has registered.
    #[must_use]
    pub fn own(tid: Tid) -> Self {
        Self { tid, name: None }
    }

    /// Thread `tid` of process `pid`, which may end at any time.
    ///
    /// # Errors
    /// `NotFound` when the process has no such thread; `EMFILE`.
    pub fn of_process(root: &HostRoot, pid: u32, tid: Tid) -> io::Result<Self> {
        let name = File::open(root.path(format!("proc/{pid}/task/{tid}/comm")))?;
        Ok(Self {
            tid,
            name: Some(name),
        })
    }

    /// Its number, for a call that follows at once.
    ///
    /// The kernel refuses to read the file of a thread that has ended, whichever thread has the
    /// number since. A pidfd (`PIDFD_THREAD`, from Linux 6.9 on) tells no more, and no call takes one
    /// in the place of the number. So a gap is left between the read and the call. In it the thread
    /// would have to end, and as many threads to start as there are free numbers (32,768 by default
    /// on small machines, else up to 4,194,304), for the kernel gives numbers out in turn; or a
    /// program with CAP_CHECKPOINT_RESTORE to take that very number.
    ///
    /// # Errors
    /// `ESRCH` when it has ended.
    pub fn tid(&self) -> io::Result<Tid> {
        if let Some(name) = &self.name {
            name.read_at(&mut [0], 0)?;
        }
        Ok(self.tid)
    }
}
