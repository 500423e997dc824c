// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guardian's own life: it answers its VMM's requests until that is gone, then undoes what it
//! changed.

use std::{
    io::{self, IsTerminal, Write},
    os::fd::{AsFd, AsRawFd},
    os::unix::net::UnixDatagram,
    path::Path,
    time::Duration,
};

use anyhow::{Context, bail};
use nix::{
    errno::Errno,
    poll::PollFlags,
    sys::{
        signal::SigSet,
        termios::{LocalFlags, OutputFlags, SetArg, Termios, tcgetattr, tcsetattr},
    },
    unistd::{self, setsid},
};
use vcpufreq_bridge::ioeventfd::frequency_event;
use vcpufreq_host::HostRoot;
use vcpufreq_host::undo::KernelHost;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::guardian::{DISMISS, ENDS, FREQUENCY, MESSAGE, READY, UNDO};
#[cfg(feature = "bpf")]
use super::{
    guardian::POLICY,
    policies::PolicyCalls,
    record_names::{pid_of, policy_socket_of},
};
use crate::{
    lifecycle::cleanup::{Cleaned, Cleaner},
    lifecycle::record::{NoRecord, Owner, OwnerStatus},
    lifecycle::state::{self, StateDir},
    message::{chain, warn, warn_in_log},
    sys::{self, pidfd_open},
};

/// How often to look whether a VMM that is ending has ended, beside the file that shows it.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long to try to remove a cgroup whose processes are ending.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long threads that are just leaving a cgroup of a VMM that lives may take.
const LEAVING: Duration = Duration::from_millis(500);

/// A terminal as it was before the VMM.
struct Terminal(Termios);

impl Terminal {
    /// That of stderr, if it is one.
    fn of_stderr() -> Option<Self> {
        tcgetattr(io::stderr()).ok().map(Self)
    }

    /// Puts it back if it is in raw mode. A shell that is at its prompt by now
    /// edits lines with output processing on: its terminal is left alone.
    fn put_back(&self) {
        let raw = tcgetattr(io::stderr()).is_ok_and(|now| {
            let cooked = now.output_flags.contains(OutputFlags::OPOST);
            !cooked && !now.local_flags.contains(LocalFlags::ISIG)
        });
        if raw {
            // A terminal that is gone needs no settings.
            let _ = tcsetattr(io::stderr(), SetArg::TCSANOW, &self.0);
        }
    }
}

/// The guardian's own life: until the VMM, process `pid`, is gone and nothing of it is left.
///
/// # Errors
/// When it could not go on guard, or something could not be removed; then the
/// record stays for the next start or cleanup.
pub fn guard(pid: u32) -> anyhow::Result<()> {
    let dir = StateDir::of_user()?;
    sys::ignore_group_signals();
    // The server's are blocked, and would stay pending: they would end each wait.
    SigSet::all().thread_unblock()?;
    // Fails for the leader of a process group only, which a child isn't.
    setsid().context("can't leave the session")?;
    let terminal = Terminal::of_stderr();
    if !io::stderr().is_terminal() {
        warn_in_log();
    }
    let mut output = io::stdout();
    output.write_all(READY)?;
    output.flush()?;
    let record = dir.record_path(pid);
    answer_until_end(&record);
    // A VMM that ends by itself puts it back, then removes its record.
    if let Some(terminal) = terminal.filter(|_| record.exists()) {
        terminal.put_back();
    }
    clean_after(&record)
}

/// Answers the VMM's requests until the end of the file, or until it is dismissed. A signal interrupts
/// at most.
fn answer_until_end(record: &Path) {
    // The policy that it holds goes with this function: what the VMM leaves has none.
    #[cfg(feature = "bpf")]
    let mut policies = PolicyCalls::new(pid_of(record).unwrap_or(0));
    let stdin = io::stdin();
    let Ok(socket) = stdin.as_fd().try_clone_to_owned().map(UnixDatagram::from) else {
        return;
    };
    let mut request = [0; 8];
    loop {
        #[cfg(feature = "bpf")]
        policies.until(stdin.as_fd());
        // Without `Stdin`'s buffer, by which a long message would be several requests. A VMM that
        // is killed meanwhile has no use for the answer.
        let _ = match unistd::read(&stdin, &mut request) {
            Ok(0) => return,
            Ok(1) if request[0] == DISMISS && !is_there(record) => {
                // It waits for the end, not for this.
                let _ = socket.send(ENDS);
                return;
            }
            Ok(1) if request[0] == DISMISS => socket.send(&[DISMISS]),
            #[cfg(feature = "bpf")]
            Ok(1) if request[0] == POLICY => {
                let listens = policies.listen(&policy_socket_of(record));
                let errno = listens.map_or_else(errno_of, |()| 0);
                socket.send(&errno.to_le_bytes())
            }
            Ok(1) if request[0] == UNDO => {
                // Nothing would be the end of the file.
                let text = undo_recorded(record).join("\n") + "\n";
                let text: String = text.chars().take(MESSAGE / 4).collect();
                socket.send(text.as_bytes())
            }
            Ok(5) if request[0] == FREQUENCY => {
                let number = [1, 2, 3, 4].map(|index| request[index]);
                answer_event(&socket, u32::from_le_bytes(number))
            }
            Ok(_) => Ok(0),
            Err(Errno::EINTR) => Ok(0),
            // There is nothing to wait for any more.
            Err(_) => return,
        };
    }
}

/// Whether there is anything by the name of a record.
fn is_there(record: &Path) -> bool {
    record.symlink_metadata().is_ok()
}

/// Undoes what a living VMM changed by its record at `path`. What is left, a line each.
pub fn undo_recorded(path: &Path) -> Vec<String> {
    let host = HostRoot::default();
    let cleaner = Cleaner {
        patience: LEAVING,
        ..Cleaner::new(&host)
    };
    let undone = || -> anyhow::Result<Vec<String>> {
        let record = state::read(path)?;
        cleaner.check(path, &record)?;
        let dir = StateDir::at(path.parent().unwrap_or(path));
        #[cfg(feature = "bpf")]
        vcpufreq_host_bpf::sweep();
        Ok(cleaner.end(&dir, &record, &mut Cleaned::default()))
    };
    undone().unwrap_or_else(|why| vec![chain(&why)])
}

fn answer_event(socket: &UnixDatagram, number: u32) -> io::Result<usize> {
    let sent = match frequency_event(&HostRoot::default(), number) {
        Ok(event) => socket.send_with_fd(&[0u8; 4][..], event.as_raw_fd()),
        Err(error) => {
            return socket.send(&errno_of(error).to_le_bytes());
        }
    };
    Ok(sent?)
}

fn errno_of(error: io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

fn clean_after(path: &Path) -> anyhow::Result<()> {
    let host = HostRoot::default();
    let cleaner = Cleaner {
        patience: PATIENCE,
        claims_within: PATIENCE,
        ..Cleaner::new(&host)
    };
    let mut cleaned = Cleaned::default();
    match state::read(path) {
        Ok(record) => {
            cleaner.check(path, &record)?;
            wait_for_end(&record.owner, path, &KernelHost::from(&host));
            #[cfg(feature = "bpf")]
            vcpufreq_host_bpf::sweep();
            cleaner.by_record(path, &record, &mut cleaned)?;
        }
        // Removed by the VMM itself, or never finished.
        Err(NoRecord::Gone) => state::remove_beside(path)?,
        Err(why) => return Err(anyhow::Error::from(why).context(path.display().to_string())),
    }
    if !cleaned.left.is_empty() {
        bail!("{}", cleaned.left.join("; "));
    }
    Ok(())
}

/// Waits for the end of a VMM, whose files are closed before it is gone: for milliseconds, or as long
/// as the kernel takes to free its memory. A VMM that has only dropped its guardian is waited for, too,
/// while its record is there.
fn wait_for_end(owner: &Owner, record: &Path, host: &KernelHost) {
    // Readable when no thread of the process is left.
    let process = pidfd_open(owner.pid).ok();
    for look in 0.. {
        if owner.status(host) != OwnerStatus::InUse || !is_there(record) {
            return;
        }
        if look == 1 {
            let pid = owner.pid;
            warn(&format!(
                "a guardian waits for the end of process {pid}, and undoes then what that changed"
            ));
        }
        match &process {
            Some(process) => {
                sys::is_ready(process.as_fd(), PollFlags::POLLIN, LOOK_EVERY);
            }
            // It has ended, or Linux is older than 5.3.
            None => std::thread::sleep(LOOK_EVERY),
        }
    }
}

#[cfg(test)]
mod tests {
    //! A guardian whose VMM lives on waits no longer than there is something to undo.
    use super::*;
    use crate::lifecycle::record::owner_of;

    #[test]
    fn a_guardian_without_a_record_ends() {
        let owner = owner_of(&HostRoot::default(), std::process::id()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        wait_for_end(&owner, &dir.path().join("7.json"), &KernelHost::default());
    }
}
