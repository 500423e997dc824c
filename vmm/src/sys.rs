// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's system calls: limits, the terminal, and what makes a process independent of the one that
//! started it. The virtual machine's are in `vcpufreq_vm::sys`.
#![expect(unsafe_code, reason = "system calls that no safe crate has")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket, socketpair};
use vcpufreq_host::Tid;
use vmm_sys_util::eventfd::EventFd;

/// Raises the limit of open files as far as this process may: a guest of 512
/// vCPUs takes some 2100, and shells start programs with 1024.
pub fn raise_open_files() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

/// How many files this process may have open, once it has raised that as far
/// as it may.
pub fn open_files_at_most() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard)
}

/// Lets this process lock so many bytes of memory, as KVM does with a protected guest's: without
/// CAP_IPC_LOCK too, which the sandbox drops.
///
/// # Errors
/// How many KiB it may lock.
pub fn allow_locked(bytes: u64) -> Result<(), u64> {
    let memory = Resource::RLIMIT_MEMLOCK;
    if setrlimit(memory, RLIM_INFINITY, RLIM_INFINITY).is_ok() {
        return Ok(());
    }
    let (_, most) = getrlimit(memory).unwrap_or_default();
    let raised = setrlimit(memory, most, most).is_ok();
    (raised && bytes <= most).then_some(()).ok_or(most >> 10)
}

/// How many lines the terminal at standard output has.
pub fn terminal_rows() -> Option<u16> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the kernel writes one winsize at the pointer.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_row > 0).then_some(size.ws_row)
}

/// Ignores the signals that end or stop a group of processes.
pub fn ignore_group_signals() {
    let signals = [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGTSTP,
        Signal::SIGPIPE,
    ];
    signals.into_iter().for_each(ignore);
}

/// Ignores a signal that can be ignored: not SIGKILL or SIGSTOP.
pub fn ignore(number: Signal) {
    // It can't fail for such a signal.
    // SAFETY: SIG_IGN is no function of ours.
    let _ = unsafe { signal(number, SigHandler::SigIgn) };
}

/// Two sockets that carry whole messages between two processes.
pub fn message_sockets() -> io::Result<(UnixDatagram, UnixDatagram)> {
    let kind = (AddressFamily::Unix, SockType::SeqPacket);
    let (one, other) = socketpair(kind.0, kind.1, None, SockFlag::SOCK_CLOEXEC)?;
    Ok((one.into(), other.into()))
}

/// Connects without a wait: a process that takes no connections has a full queue of them.
///
/// # Errors
/// `WouldBlock` then; as connect(2).
pub fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(stream.into())
}

/// Does it once more when a signal has interrupted it.
pub fn uninterrupted<T>(mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match act() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Whether one of `events`, or the end of the other end, is there within so long.
pub fn is_ready(file: BorrowedFd<'_>, events: PollFlags, within: Duration) -> bool {
    let within = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
    let mut files = [PollFd::new(file, events)];
    uninterrupted(|| Ok(poll(&mut files, within)?)).is_ok_and(|ready| ready > 0)
}

/// A file that stands for process `pid`, readable when that has ended.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes two numbers.
    new_file(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// The same for a thread, from Linux 6.9 on.
pub fn pidfd_of_thread(tid: Tid) -> io::Result<OwnedFd> {
    // SAFETY: takes two numbers.
    new_file(unsafe { libc::syscall(libc::SYS_pidfd_open, tid.get(), libc::PIDFD_THREAD) })
}

/// A copy of the open file `number` of a process. Takes the right to trace that.
pub fn pidfd_getfd(process: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes an open file and two numbers.
    new_file(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })
}

/// The same for the process at the other end of a socket, however its number is used since.
pub fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut number: RawFd = -1;
    // Bytes of a file's number.
    let mut len: libc::socklen_t = 4;
    // SAFETY: the kernel writes at most `len` bytes at the pointer, to a number of that size.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut number).cast(),
            &raw mut len,
        )
    };
    match done {
        0 => new_file(number.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How many bytes of a stream socket the process at the other end has not read; a unix socket's count
/// the kernel's own share of them.
pub fn unread_by_peer(socket: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one number at the pointer.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0 => Ok(bytes),
        _ => Err(io::Error::last_os_error()),
    }
}

fn new_file(result: libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(result) {
        // SAFETY: the kernel has just made it, for this process.
        Ok(number @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The first file that a service manager hands a program: sd_listen_fds(3).
const FIRST_HANDED: RawFd = 3;

/// The `count` files that a service manager has handed this process. To be called once.
pub fn take_handed(count: u16) -> Vec<OwnedFd> {
    let numbers = (FIRST_HANDED..).take(count.into());
    let open = numbers.filter_map(|number| {
        // SAFETY: the file is looked at, and not kept.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        fcntl(file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).ok()?;
        // SAFETY: it is open, and this process has it for itself: sd_listen_fds(3).
        Some(unsafe { OwnedFd::from_raw_fd(number) })
    });
    open.collect()
}

/// The file of an eventfd.
pub fn file_of(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the file stays open as long as `event` lives, which the result borrows.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// The eventfd of a file that is one.
pub fn eventfd_of(file: OwnedFd) -> EventFd {
    // SAFETY: the file is open, and given away.
    unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_open_files_is_raised_as_far_as_possible() {
        raise_open_files().expect("it needs no privilege");
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(soft, hard);
    }
}
