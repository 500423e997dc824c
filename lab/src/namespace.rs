// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Namespaces of Linux in which a Debian tree is made, entered and removed,
//! without a trace on the machine: mounts and processes end with them.
//!
//! As root, mounts and processes are the namespace's own. As another user,
//! users are too: this user is root there. A tree that holds files of other
//! users than root also needs a range of ids for them, as in `/etc/subuid`.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Which users there are in a namespace, when this process isn't root's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// Only root, which is this user outside. Needs no set-up.
    Root,
    /// All, from this user's range. Needs uidmap and the range.
    All,
}

/// A command to which a program and its arguments are to be added, and which
/// runs it in namespaces of its own.
///
/// The kernel ends it and its children when this process ends or the child is killed: the program
/// is the first process of a process namespace, and dies with the `unshare` that waits for it.
pub fn command(users: Users) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare"]);
    command.args(["--mount", "--pid", "--fork", "--kill-child"]);
    if !is_root() {
        command.arg("--map-root-user");
        if users == Users::All {
            command.arg("--map-auto");
        }
    }
    command.arg("--").stdin(Stdio::null());
    command
}

/// Fails with one line with the next step when this user may not make such namespaces.
pub fn require(users: Users) -> Result<()> {
    // A mount, because a container may allow the namespace and not this.
    let output = command(users)
        .args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"])
        .output()
        .context("cannot run setpriv (package util-linux)")?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    bail!(advice(&said, is_root()))
}

/// The next step after an error of `unshare` or `mount`, for root or another user.
fn advice(said: &str, root: bool) -> String {
    let proof: Vec<&str> = said.lines().map(str::trim).collect();
    let proof = proof.join("; ");
    if root {
        return format!(
            "root may not make mount namespaces here ({proof}): in a chroot, leave it; in a \
             container, start that with --privileged"
        );
    }
    let cause = if said.contains("newuidmap: No such file") {
        "install the package uidmap"
    } else if ["/etc/subuid", "/etc/subgid", "newuidmap", "newgidmap"]
        .iter()
        .any(|word| said.contains(word))
    {
        "give this user a range of ids in /etc/subuid and /etc/subgid (usermod --add-subuids \
         100000-165535 --add-subgids 100000-165535 USER)"
    } else {
        "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, \
         user.max_user_namespaces)"
    };
    format!("no unprivileged namespaces for this user: {cause}, or run as root ({proof})")
}

/// Whether this process is root's.
#[expect(unsafe_code, reason = "geteuid is C")]
pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

#[cfg(test)]
mod tests {
    //! Promises: a refusal names the next step, in one line; nothing that a
    //! command started outlives it.
    use super::*;

    #[test]
    fn advice_names_the_next_step() {
        for (said, root, expected) in [
            (
                "unshare: failed to execute newuidmap: No such file or directory\n",
                false,
                "package uidmap",
            ),
            (
                "unshare: no line matching user \"a\" in /etc/subuid: Success\n",
                false,
                "usermod --add-subuids",
            ),
            (
                "unshare: unshare failed: Operation not permitted\n",
                false,
                "unprivileged_userns_clone",
            ),
            (
                "mount: /mnt: permission denied.\n       dmesg(1) may have more information.\n",
                true,
                "--privileged",
            ),
        ] {
            let line = advice(said, root);
            assert!(line.contains(expected), "{line}");
            assert_eq!(line.lines().count(), 1);
        }
    }

    #[test]
    fn killing_a_command_ends_what_it_started() {
        if require(Users::Root).is_err() {
            eprintln!("SKIP: no namespaces here");
            return;
        }
        let mark = format!("86{}", std::process::id());
        let mut child = command(Users::Root)
            .args(["sh", "-c", &format!("sleep {mark} & sleep {mark}")])
            .spawn()
            .unwrap();
        let started = wait_for(|| running(&mark) == 2);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(started);
        assert!(wait_for(|| running(&mark) == 0));
    }

    fn running(mark: &str) -> usize {
        let wanted = format!("sleep\0{mark}\0");
        std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok())
            .filter(|line| line == wanted.as_bytes())
            .count()
    }

    fn wait_for(holds: impl Fn() -> bool) -> bool {
        // What takes longer than ten minutes hangs.
        (0..60_000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            holds()
        })
    }
}
