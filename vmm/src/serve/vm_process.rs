// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process of a served VM: it alone carries out what a guest requests. It gives up the server's
//! rights before it reports that the bridge is in force. The guest runs earlier only if another
//! server has served it, with `--qmp`, or by libvirt; then each thread that reads its memory is confined first.
//!
//! ```text
//! server ── fork ──▶ bridge ─▶ sandbox ─▶ "ready" ─▶ requests ... ◀─ orders, end of file ─▶ counts
//! ```
//! The server keeps record, guardian and the VMM's connection. The kernel kills the process when
//! the server ends.
#![expect(unsafe_code, reason = "fork has no safe function")]

use std::{
    cell::Cell,
    fs, io,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixDatagram,
    },
    panic::{AssertUnwindSafe, catch_unwind},
    process::exit,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, kill},
        socket::{MsgFlags, send},
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, close, fork, getpid, getppid, read},
};

use crate::{
    message::{chain, printable, warn},
    patience::{patience, patiently},
    sys::{self, message_sockets, pidfd_open, uninterrupted},
};

/// The exit code when a VM is left without its bridge.
pub const ERROR: u8 = 2;

/// The message that the bridge is in force. If it can't be, an error's text comes instead. The next
/// message, the last one, is what the bridge has counted.
const READY: &[u8] = b"\0";
/// More than a message has bytes.
const MESSAGE: usize = 4096;
/// How long the process may take to start its bridge.
const STARTS_WITHIN: Duration = patience(60);
/// How long it may take to end that.
const ENDS_WITHIN: Duration = patience(10);

/// The process, seen from the server.
pub struct VmProcess {
    // Dropped first: the process ends at the end of its file.
    socket: UnixDatagram,
    /// Readable when it has ended.
    ended: OwnedFd,
    child: Child,
}

/// A child that is killed and waited for when it is dropped.
struct Child {
    pid: Pid,
    is_waited_for: bool,
}

/// The server, seen from the process.
pub struct ServerEnd {
    socket: UnixDatagram,
    is_ready: Cell<bool>,
}

/// What the server has the process do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Carry out what each vCPU has requested.
    CarryOut,
    /// Withdraw all requests until [`Self::CarryOut`].
    Withdraw,
    /// Begin with a guest that starts anew.
    StartAnew,
}

impl Order {
    const ALL: [Self; 3] = [Self::CarryOut, Self::Withdraw, Self::StartAnew];
}

/// What a process does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// No thread carries out requests any more.
    Lost,
    /// The server wants this done.
    Order(Order),
    /// The bridge is to end.
    End,
}

impl VmProcess {
    /// Forks, and has `bridge` run in the new process, with `keep` of the sockets, eventfds and shared memories that are open. It calls
    /// [`ServerEnd::ready`], and at [`Next::End`] ends and returns what it counted.
    ///
    /// # Errors
    /// What `bridge` returned before it was ready; when that takes a minute, or a signal asks this
    /// program to end; when this process has other threads, or as fork(2). No process is left then.
    pub fn start(
        keep: &[RawFd],
        bridge: impl FnOnce(&ServerEnd) -> anyhow::Result<String>,
    ) -> anyhow::Result<Self> {
        let (own, other) = message_sockets().context("can't make sockets for the VM's process")?;
        // fork copies one thread; locks that others hold would stay locked.
        let threads =
            fs::read_dir("/proc/self/task").context("can't list this program's threads")?;
        ensure!(threads.count() == 1, "the server has threads of its own");
        let server = getpid();
        // SAFETY: this process has one thread.
        match unsafe { fork() }.context("can't start the VM's process")? {
            ForkResult::Child => {
                drop(own);
                let end = ServerEnd {
                    socket: other,
                    is_ready: Cell::new(false),
                };
                let keep = [keep, &[end.socket.as_raw_fd()]].concat();
                let run = AssertUnwindSafe(|| in_process(server, &keep, &end, bridge));
                // Nothing that the server has made is dropped here: that is the server's.
                exit(catch_unwind(run).unwrap_or(ERROR).into())
            }
            ForkResult::Parent { child } => {
                drop(other);
                let child = Child {
                    pid: child,
                    is_waited_for: false,
                };
                let ended = pidfd_open(child.pid.as_raw().try_into()?);
                let process = Self {
                    socket: own,
                    ended: ended.context("the VM's process can't be watched")?,
                    child,
                };
                hear_ready(&process.socket, STARTS_WITHIN)?;
                Ok(process)
            }
        }
    }

    /// A file that is readable when the process has ended.
    pub fn lost(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Gives it an order.
    pub fn send(&self, order: Order) {
        // Fails for a process that has died, or has many orders before it: it carries out no request
        // either then.
        let _ = send(
            self.socket.as_raw_fd(),
            &[order as u8],
            MsgFlags::MSG_DONTWAIT,
        );
    }

    /// Has it end its bridge, and waits for that; what the bridge has counted.
    ///
    /// # Errors
    /// When it hadn't ended as it was told to.
    pub fn end(mut self) -> anyhow::Result<String> {
        // Fails for one that has died.
        let _ = self.socket.shutdown(Shutdown::Write);
        // The signal that asks for it has come already.
        let ended = patiently(ENDS_WITHIN, "for the VM's process to end", |part| {
            let is = sys::is_ready(self.ended.as_fd(), PollFlags::POLLIN, part.left);
            Ok(is.then_some(()))
        });
        if ended?.is_none() {
            self.child.kill()?;
        }
        match self.child.wait()? {
            WaitStatus::Exited(_, 0) => {}
            WaitStatus::Exited(..) => bail!("its process could not end its bridge"),
            WaitStatus::Signaled(_, signal, _) => bail!("its process was ended by {signal}"),
            status => bail!("its process has ended: {status:?}"),
        }
        let mut message = [0; MESSAGE];
        self.socket.set_nonblocking(true)?;
        let bytes = uninterrupted(|| self.socket.recv(&mut message));
        let bytes = bytes.context("its process sent no counts")?;
        // A guest may have taken the process over: no text of its choice goes to a terminal.
        let text = String::from_utf8_lossy(&message[..bytes]).into_owned();
        let is_plain = |char: char| char.is_ascii_alphanumeric() || [' ', ','].contains(&char);
        ensure!(text.chars().all(is_plain), "its process sent no counts");
        Ok(text)
    }
}

/// Waits until the process has its bridge in force, so long at most.
fn hear_ready(socket: &UnixDatagram, within: Duration) -> anyhow::Result<()> {
    let mut message = [0; MESSAGE];
    let bytes = patiently(within, "for the VM's process to start the bridge", |part| {
        let is_said = part.is_ready(&[socket.as_fd()], Duration::MAX)?;
        let said = is_said.then(|| uninterrupted(|| socket.recv(&mut message)));
        Ok(said.transpose()?)
    });
    match &message[..bytes?.context("its process doesn't start the bridge")?] {
        READY => Ok(()),
        [] => bail!("its process has died"),
        // Of a VM that was taken over, a guest may have the process send anything.
        text => bail!("{}", printable(&String::from_utf8_lossy(text))),
    }
}

impl Child {
    /// It wasn't waited for: the number is its own.
    fn kill(&self) -> nix::Result<()> {
        kill(self.pid, Signal::SIGKILL)
    }

    fn wait(&mut self) -> nix::Result<WaitStatus> {
        self.is_waited_for = true;
        loop {
            match waitpid(self.pid, None) {
                Err(Errno::EINTR) => {}
                status => return status,
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Without CAP_KILL it is another user's: it ends by itself, and nothing waits for it.
        if !self.is_waited_for && self.kill().is_ok() {
            // It can't fail for a child that hasn't been waited for.
            let _ = self.wait();
        }
    }
}

impl ServerEnd {
    /// Reports that the bridge is in force.
    ///
    /// # Errors
    /// When the server has ended.
    pub fn ready(&self) -> io::Result<()> {
        self.is_ready.set(true);
        self.socket.send(READY).map(drop)
    }

    /// Waits for what comes next; `lost` is readable when no thread carries out requests any more.
    ///
    /// # Errors
    /// As poll(2).
    pub fn next(&self, lost: BorrowedFd<'_>) -> anyhow::Result<Next> {
        let files = [lost, self.socket.as_fd()];
        let mut files = files.map(|file| PollFd::new(file, PollFlags::POLLIN));
        while let Err(error) = poll(&mut files, PollTimeout::NONE) {
            ensure!(error == Errno::EINTR, error);
        }
        if files[0].any() == Some(true) {
            return Ok(Next::Lost);
        }
        let mut order = [0];
        // recv(2) is no call of a confined thread.
        let bytes = uninterrupted(|| Ok(read(&self.socket, &mut order)?))?;
        let mut all = Order::ALL.into_iter();
        let order = all.find(|known| bytes == 1 && *known as u8 == order[0]);
        Ok(order.map_or(Next::End, Next::Order))
    }
}

/// The new process' life; its exit code.
fn in_process(
    server: Pid,
    keep: &[RawFd],
    end: &ServerEnd,
    bridge: impl FnOnce(&ServerEnd) -> anyhow::Result<String>,
) -> u8 {
    let begun = set_pdeathsig(Signal::SIGKILL)
        .map_err(anyhow::Error::from)
        .and_then(|()| {
            // It may have ended before.
            ensure!(getppid() == server, "the server has ended");
            close_others(keep)
        });
    let report = |text: &str| {
        // If the server has ended, it is of no use.
        let _ = end.socket.send(&text.as_bytes()[..text.len().min(MESSAGE)]);
    };
    match begun.and_then(|()| bridge(end)) {
        Ok(counts) => {
            report(&counts);
            0
        }
        Err(why) => {
            let text = chain(&why);
            match end.is_ready.get() {
                true => warn(&text),
                false => report(&text),
            }
            ERROR
        }
    }
}

/// Closes what gives power over others: sockets, processes, signals, and what VMs share that wait
/// for the server.
fn close_others(keep: &[RawFd]) -> anyhow::Result<()> {
    let open = fs::read_dir("/proc/self/fd").context("can't list the open files")?;
    let numbers = open.filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok());
    let numbers: Vec<RawFd> = numbers.collect();
    for number in numbers {
        let name = fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        let name = name.to_string_lossy();
        let kinds = ["socket:", "pidfd", "[signalfd]", "[eventfd]", "/memfd:"];
        let is_others = number > libc::STDERR_FILENO && !keep.contains(&number);
        if is_others && kinds.iter().any(|kind| name.contains(kind)) {
            // Its owner is the server's, and is never dropped here.
            close(number).context("can't close a file of the server's")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! What a process reports in the place of its readiness is one line of plain text.
    use super::*;

    #[test]
    fn a_process_that_says_nothing_is_given_up() {
        let (own, _other) = message_sockets().unwrap();
        let line = hear_ready(&own, Duration::from_millis(1)).unwrap_err();
        assert_eq!(line.to_string(), "its process doesn't start the bridge");
    }

    fn heard(message: &[u8]) -> Result<(), String> {
        let (own, other) = message_sockets().unwrap();
        other.send(message).unwrap();
        drop(other);
        hear_ready(&own, STARTS_WITHIN).map_err(|why| chain(&why))
    }

    #[test]
    fn the_text_of_a_process_does_nothing_to_a_terminal() {
        assert_eq!(heard(READY), Ok(()));
        assert_eq!(heard(b"").unwrap_err(), "its process has died");
        let plain = "vCPU 1 can't be pinned; correct --pin: Invalid argument (os error 22)";
        assert_eq!(heard(plain.as_bytes()).unwrap_err(), plain);
        let hostile = "a\x1b]0;b\x07\r\nvcpufreq: c\u{9b}2J\u{202e}d";
        let mut bytes = hostile.as_bytes().to_vec();
        bytes.extend([0xff, 0x7f, 0]);
        assert_eq!(heard(&bytes).unwrap_err(), "a?]0;b???vcpufreq: c?2J?d???");
    }
}
