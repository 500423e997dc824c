// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A small process that keeps the rights which the VMM gives up, outlives it, and undoes what it
//! changed, however it ends.
//!
//! ```text
//! VMM ◀─────── a pair of sockets, requests and answers ───────▶ guardian's stdin
//!  the kernel closes the VMM's when that is gone, kill -9 included ─▶ end of file
//! ```
//! It starts before the VMM makes anything, in a session of its own, and ignores signals that end
//! process groups. It knows the VMM by its number and its terminal only; the VMM's record is that of
//! this number in the user's own directory. A request names no file: it is one byte, or that and the
//! number of a pCPU. A malformed request gets no answer.

use std::{
    io::{self, IsTerminal, Read},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::net::UnixDatagram,
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use nix::poll::PollFlags;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::{
    message::warn,
    patience::{patience, patiently},
    sys::{self, message_sockets, pidfd_open, uninterrupted},
};

/// The guardian's output when it is on guard.
pub const READY: &[u8] = b"on guard\n";
/// How long it may take until then.
const STARTS_WITHIN: Duration = patience(10);
/// How long the guardian may take to answer, which waits for a lock at most. It is waited for in parts,
/// the first of which ends with a line.
const ANSWERS_WITHIN: Duration = patience(30);
const PART: Duration = Duration::from_secs(1);
/// How long a guardian that ends may take to end.
const ENDS_WITHIN: Duration = patience(5);
/// The request to undo all that is on record; the answer is what is left, a line each.
pub const UNDO: u8 = b'u';
/// The request to end. The answer is [`ENDS`], or anything else while the record is there: then the
/// guardian stays.
pub const DISMISS: u8 = b'd';
/// See [`DISMISS`].
pub const ENDS: &[u8] = b"ends";
/// The request for an event of a pCPU's frequency, whose number follows in 4 bytes, the lowest
/// first; the answer is the number of an error, 0 if a file comes with it.
pub const FREQUENCY: u8 = b'f';
/// The request to take calls of `vcpufreq policy` at a socket beside the record; the answer is the
/// number of an error, or 0. It is made before the guest runs; a later one changes nothing.
pub const POLICY: u8 = b'p';
/// More than each request and answer has bytes.
pub const MESSAGE: usize = 64 << 10;

/// A guardian, seen from its VMM. One that is dropped stays on guard until this process is gone.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    socket: Arc<GuardianSocket>,
}

/// The VMM's end of the pair of sockets: what it asks its guardian for.
#[derive(Debug)]
pub struct GuardianSocket {
    answers: Mutex<Answers>,
    /// Readable when the guardian has ended.
    ended: OwnedFd,
    /// Its end was seen, by the thread that watches for that: others may make no system call for it.
    is_lost: AtomicBool,
}

#[derive(Debug)]
struct Answers {
    socket: UnixDatagram,
    /// An answer did not come. If it comes late, it would be taken for the next.
    are_lost: bool,
}

impl Guardian {
    /// Starts one for this process; it is on guard when this returns.
    ///
    /// # Errors
    /// When the process can't be started, doesn't start, or a signal asks this program to end. No
    /// process is left then.
    pub fn start() -> anyhow::Result<Self> {
        let (own, other) = message_sockets().context("can't make sockets for the guardian")?;
        own.set_read_timeout(Some(PART))?;
        own.set_write_timeout(Some(PART))?;
        let mut child = Command::new("/proc/self/exe")
            .arg("guardian")
            .arg(std::process::id().to_string())
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(other)))
            .stdout(Stdio::piped())
            .stderr(console())
            .spawn()
            .context("can't start the guardian; check that /proc is mounted and processes can be started")?;
        let output = child.stdout.take().context("the guardian has no output")?;
        if !hear_ready(output, STARTS_WITHIN).inspect_err(|_| end(&mut child))? {
            let status = child.wait().context("the guardian did not start")?;
            bail!("the guardian ended at once with {status}; try again");
        }
        let ended = pidfd_open(child.id()).context("the guardian can't be watched")?;
        let answers = Mutex::new(Answers {
            socket: own,
            are_lost: false,
        });
        let socket = Arc::new(GuardianSocket {
            answers,
            ended,
            is_lost: AtomicBool::new(false),
        });
        Ok(Self { child, socket })
    }

    /// Where it is asked.
    pub fn socket(&self) -> Arc<GuardianSocket> {
        self.socket.clone()
    }

    /// A file that is readable when it has ended.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.socket.ended()
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        sys::is_ready(self.ended(), PollFlags::POLLIN, Duration::ZERO)
    }

    /// Ends the guardian of a VMM that ends and has removed its record. While the record is there, the
    /// guardian refuses: it stays on guard until this process is gone.
    pub fn dismiss(mut self) {
        let mut answer = [0; ENDS.len()];
        let answered = self.socket.ask(&[DISMISS], &mut answer);
        let ends = answered.is_ok_and(|(bytes, _)| answer[..bytes] == *ENDS);
        if !ends && !self.has_ended() {
            return;
        }
        if sys::is_ready(self.ended(), PollFlags::POLLIN, ENDS_WITHIN) {
            // It can't fail for a child that hasn't been waited for.
            let _ = self.child.wait();
        } else {
            let pid = self.child.id();
            warn(&format!(
                "its guardian, process {pid}, doesn't end; see why"
            ));
        }
    }
}

impl GuardianSocket {
    /// A file that is readable when the guardian has ended.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Whether its end was seen by now.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Relaxed)
    }

    /// Its end was seen.
    pub fn set_lost(&self) {
        self.is_lost.store(true, Relaxed);
    }

    /// Has all that is on record undone, and the record removed. The vCPU threads have ended.
    /// Returns what is left, a line each.
    ///
    /// # Errors
    /// When the guardian has ended, or doesn't answer.
    pub fn undo(&self) -> anyhow::Result<Vec<String>> {
        let mut answer = vec![0; MESSAGE];
        let (bytes, _) = self.ask(&[UNDO], &mut answer).context(
            "the guardian, which undoes what this VMM changed, doesn't answer; run vcpufreq cleanup",
        )?;
        let text = String::from_utf8_lossy(&answer[..bytes]);
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// An event that wakes its reader when pCPU `number` changes its frequency.
    ///
    /// # Errors
    /// As [`frequency_event`](vcpufreq_bridge::ioeventfd::frequency_event), and when the
    /// guardian has ended.
    pub fn frequency_event(&self, number: u32) -> io::Result<OwnedFd> {
        let mut request = vec![FREQUENCY];
        request.extend(number.to_le_bytes());
        let mut errno = [0; 4];
        match self.ask(&request, &mut errno)? {
            (4, Some(event)) => Ok(event),
            (4, None) => Err(io::Error::from_raw_os_error(i32::from_le_bytes(errno))),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Has it take calls of `vcpufreq policy`.
    ///
    /// # Errors
    /// As bind(2), and when the guardian has ended or doesn't answer.
    pub fn take_policy_calls(&self) -> io::Result<()> {
        let mut errno = [0; 4];
        self.ask(&[POLICY], &mut errno)?;
        match i32::from_le_bytes(errno) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn ask(&self, request: &[u8], answer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.are_lost {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let asked = answers.ask(request, answer);
        answers.are_lost = asked.is_err();
        asked
    }
}

impl Answers {
    fn ask(&self, request: &[u8], answer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        uninterrupted(|| self.socket.send(request))?;
        let mut waited = Duration::ZERO;
        let (bytes, file) = loop {
            match uninterrupted(|| Ok(self.socket.recv_with_fd(answer)?)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                answered => break answered?,
            }
            if waited.is_zero() {
                let most = ANSWERS_WITHIN.as_secs();
                warn(&format!("waits for its guardian, at most {most} s"));
            }
            waited += PART;
            if waited >= ANSWERS_WITHIN {
                return Err(io::ErrorKind::TimedOut.into());
            }
        };
        match bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok((bytes, file.map(OwnedFd::from))),
        }
    }
}

/// Ends a guardian that has changed nothing.
fn end(guardian: &mut Child) {
    // It is a child that hasn't been waited for: neither can fail.
    let _ = guardian.kill();
    let _ = guardian.wait();
}

/// Whether a guardian with this output is on guard, or has ended; waits for that so long at most.
fn hear_ready(output: ChildStdout, within: Duration) -> anyhow::Result<bool> {
    let heard = patiently(within, "for its guardian to start", |part| {
        let is_said = part.is_ready(&[output.as_fd()], Duration::MAX)?;
        Ok(is_said.then_some(()))
    });
    heard?.context("the guardian doesn't start; try again")?;
    let mut said = Vec::new();
    // The guardian writes all of it at once.
    let read = output.take(READY.len() as u64).read_to_end(&mut said);
    read.context("can't hear from the guardian")?;
    Ok(said == READY)
}

/// The VMM's terminal, if it has one: killed in raw mode, it can't put it back. Else the guardian's lines
/// go to the host's log: a reader of the VMM's stderr would wait for the guardian, too.
fn console() -> Stdio {
    let stdin = io::stdin();
    let terminal = stdin
        .is_terminal()
        .then(|| stdin.as_fd().try_clone_to_owned());
    match terminal {
        Some(Ok(terminal)) => terminal.into(),
        Some(Err(_)) | None => Stdio::null(),
    }
}

#[cfg(test)]
mod tests {
    //! A guardian is on guard when it says so; one that says nothing, or ends, isn't.
    use super::*;

    #[test]
    fn a_guardian_that_does_not_start_is_given_up() {
        let heard = |script: &str, within| {
            let mut shell = Command::new("sh");
            let mut child = shell.args(["-c", script]).stdout(Stdio::piped()).spawn();
            let output = child.as_mut().unwrap().stdout.take().unwrap();
            let heard = hear_ready(output, within);
            end(child.as_mut().unwrap());
            heard.map_err(|error| error.to_string())
        };
        assert_eq!(heard("echo on guard", STARTS_WITHIN), Ok(true));
        assert_eq!(heard("echo on", STARTS_WITHIN), Ok(false));
        let given_up = heard("exec sleep 3600", Duration::from_millis(1));
        assert!(given_up.unwrap_err().contains("doesn't start"));
    }
}
