// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Takes user, groups and capabilities from a thread. The C library's functions would change all
//! threads; these are the kernel's, which change one.
#![expect(unsafe_code, reason = "a thread's user is changed by no safe function")]

use anyhow::{Context as _, ensure};
use caps::securebits::set_keepcaps;
use caps::{CapSet, CapsHashSet};
use nix::errno::Errno;
use nix::sys::prctl::{get_pdeathsig, set_pdeathsig};
use nix::unistd::{geteuid, getppid};

/// The first number of users that no account has (systemd's `UIDS-GIDS`: unused). Each VMM of root
/// has one of its own, so that one can't touch the threads of another.
const FIRST: u32 = 0x7000_0000;
/// Where that one isn't mapped, in a container: `nobody`.
const NOBODY: u32 = 65534;

/// The user that a thread of this process becomes; `None`: it stays the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity(Option<u32>);

impl Identity {
    /// The thread keeps its user.
    pub const UNCHANGED: Self = Self(None);

    /// For process `pid`. A thread of its own tries it.
    ///
    /// # Errors
    /// When root can become no other user: in a user namespace that has no second one.
    pub fn of_process(pid: u32) -> anyhow::Result<Self> {
        if !geteuid().is_root() {
            return Ok(Self::UNCHANGED);
        }
        let can = |user: &u32| {
            let user = *user;
            let tried = std::thread::spawn(move || become_user(user)).join();
            tried.is_ok_and(|tried| tried.is_ok())
        };
        let found = [FIRST + pid, NOBODY].into_iter().find(can);
        found
            .map(|user| Self(Some(user)))
            .context("root can't become another user in this user namespace")
    }

    /// Whether other VMMs are that user, too.
    pub fn is_shared(self) -> bool {
        self.0 == Some(NOBODY)
    }

    /// Changes the calling thread, which keeps no capability but `kept`. It still ends with its parent, if it did:
    /// the kernel forgets that with a change of user.
    ///
    /// # Errors
    /// As setresuid(2), capset(2); or the parent has just ended.
    pub fn enter(self, kept: &CapsHashSet) -> anyhow::Result<()> {
        if let Some(user) = self.0 {
            let (parent, ends_by) = (getppid(), get_pdeathsig()?);
            // The permitted ones, until they are chosen below.
            set_keepcaps(true)?;
            become_user(user).with_context(|| format!("can't become user {user}"))?;
            set_pdeathsig(ends_by)?;
            ensure!(
                ends_by.is_none() || getppid() == parent,
                "the program that started it has ended"
            );
        }
        let changed = [CapSet::Ambient, CapSet::Inheritable, CapSet::Effective]
            .into_iter()
            .try_for_each(|set| caps::clear(None, set))
            .and_then(|()| caps::set(None, CapSet::Permitted, kept))
            .and_then(|()| caps::set(None, CapSet::Effective, kept));
        changed.context("can't take the capabilities away")
    }
}

fn become_user(user: u32) -> nix::Result<()> {
    let none: [libc::gid_t; 0] = [];
    // SAFETY: the kernel reads no group.
    Errno::result(unsafe { libc::syscall(libc::SYS_setgroups, 0, none.as_ptr()) })?;
    // SAFETY: takes three numbers.
    Errno::result(unsafe { libc::syscall(libc::SYS_setresgid, user, user, user) })?;
    // SAFETY: the same.
    Errno::result(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) })?;
    Ok(())
}
