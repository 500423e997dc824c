// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reader's end: selects VMMs and reads their answers, of all at once. A VMM that doesn't answer, or
//! doesn't stop, costs its own answer, and the others no time.

use std::{
    io::{ErrorKind, Read},
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use vcpufreq_host::HostRoot;
use vcpufreq_host::undo::KernelHost;

use super::{
    Stats,
    answer::{BadAnswer, METRICS_OF_TEXT, MOST_BYTES, MOST_OF_ALL, read_answer, size_of},
};
use crate::{
    lifecycle::record::{OwnerStatus, known},
    lifecycle::state::StateDir,
    patience::patience,
    sys::connect_now,
};

/// How long all VMMs together may take to answer. The service of the metrics has 10 s.
const PATIENCE: Duration = patience(5);
/// What is read of one before the others have their turn.
const PIECE: u64 = 64 << 10;

/// The socket of a VMM. Its number is that of the socket's name, which is in a directory that only this
/// user may write to: a VMM that a guest has taken over has no other name. Behind a socket of `serve`
/// is the VM's process, of another number, so the peer's credentials would not name the server.
pub struct VmmSocket {
    pid: u32,
    path: PathBuf,
}

/// A VMM that is asked.
struct PendingAnswer<'a> {
    socket: &'a VmmSocket,
    state: AnswerState,
}

enum AnswerState {
    Coming(UnixStream, Vec<u8>),
    Read(anyhow::Result<Stats>),
}

impl VmmSocket {
    /// That of VMM `pid`, in `dir`.
    ///
    /// # Errors
    /// When another user could have made it.
    pub fn find(dir: &StateDir, pid: u32) -> anyhow::Result<Self> {
        let path = dir.socket(pid)?;
        Ok(Self { pid, path })
    }

    /// One at another path.
    #[cfg(test)]
    pub(super) fn at(path: PathBuf, pid: u32) -> Self {
        Self { pid, path }
    }
}

/// Asks one VMM.
///
/// # Errors
/// When there is none, or its answer isn't a VMM's.
pub fn ask(socket: &VmmSocket) -> anyhow::Result<Stats> {
    let answers = ask_all(std::slice::from_ref(socket)).into_iter();
    answers.last().context("no VMM was asked")?
}

/// Asks all of them; the answers in their order.
pub fn ask_all(sockets: &[VmmSocket]) -> Vec<anyhow::Result<Stats>> {
    let until = Instant::now() + PATIENCE;
    ask_while(sockets, || until.saturating_duration_since(Instant::now()))
}

/// The same, until the time that is `left` at a wait is none.
pub(super) fn ask_while(
    sockets: &[VmmSocket],
    mut left: impl FnMut() -> Duration,
) -> Vec<anyhow::Result<Stats>> {
    let mut all: Vec<_> = sockets.iter().map(PendingAnswer::ask).collect();
    while wait(&all, left()) {
        all.iter_mut().for_each(PendingAnswer::read);
        give_up_largest(&mut all);
    }
    all.into_iter().map(PendingAnswer::end).collect()
}

/// Gives the largest one up until all together have few enough bytes: a VMM that a guest has taken over
/// costs its own answer. One still coming counts as its text would in metrics: else several
/// that send without an end, each smaller than a large VM's metrics, would cost that VM its own.
fn give_up_largest(all: &mut [PendingAnswer<'_>]) {
    while all.iter().map(PendingAnswer::size).sum::<usize>() > MOST_OF_ALL {
        let largest = all.iter_mut().max_by_key(|one| one.size_at_end());
        largest.into_iter().for_each(|one| {
            let why =
                anyhow!("all VMMs' answers have too many bytes together, and it has the most");
            one.state = AnswerState::Read(Err(why));
        });
    }
}

/// Waits until one of them may be read, for so long; whether to go on.
fn wait(all: &[PendingAnswer<'_>], left: Duration) -> bool {
    let files = all.iter().filter_map(|one| match &one.state {
        AnswerState::Coming(stream, _) => Some(PollFd::new(stream.as_fd(), PollFlags::POLLIN)),
        AnswerState::Read(_) => None,
    });
    let mut files: Vec<_> = files.collect();
    if files.is_empty() || left.is_zero() {
        return false;
    }
    let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
    // A signal ends a wait, too.
    matches!(poll(&mut files, left), Ok(1..) | Err(Errno::EINTR))
}

impl<'a> PendingAnswer<'a> {
    fn ask(socket: &'a VmmSocket) -> Self {
        let state = match connected(&socket.path) {
            Ok(stream) => AnswerState::Coming(stream, Vec::new()),
            Err(error) => AnswerState::Read(Err(error)),
        };
        Self { socket, state }
    }

    /// What it takes of [`MOST_OF_ALL`].
    fn size(&self) -> usize {
        match &self.state {
            AnswerState::Coming(_, text) => text.len(),
            AnswerState::Read(answer) => answer.as_ref().map_or(0, size_of),
        }
    }

    /// What it takes when it has come, if no more of it comes.
    fn size_at_end(&self) -> usize {
        match &self.state {
            AnswerState::Coming(_, text) => text.len() * METRICS_OF_TEXT,
            AnswerState::Read(_) => self.size(),
        }
    }

    /// Reads what is there.
    fn read(&mut self) {
        let AnswerState::Coming(stream, text) = &mut self.state else {
            return;
        };
        // What it has read before an error stays in `text`.
        let result = match (&*stream).take(PIECE).read_to_end(text) {
            Ok(read) if u64::try_from(read).unwrap_or(PIECE) < PIECE => {
                checked(text, self.socket.pid)
            }
            Err(error) if error.kind() != ErrorKind::WouldBlock => {
                Err(anyhow!(error).context("the VMM doesn't answer; try again"))
            }
            _ if text.len() > MOST_BYTES => checked(text, self.socket.pid),
            _ => return,
        };
        self.state = AnswerState::Read(result);
    }

    fn end(self) -> anyhow::Result<Stats> {
        let answer = match self.state {
            AnswerState::Coming(..) => Err(anyhow!("the VMM doesn't answer in time; try again")),
            AnswerState::Read(answer) => answer,
        };
        answer.with_context(|| format!("process {}", self.socket.pid))
    }
}

fn checked(text: &[u8], pid: u32) -> anyhow::Result<Stats> {
    if text.is_empty() {
        bail!("the VMM answers root and its own user alone; ask as one of them");
    }
    read_answer(text, pid).map_err(|why| match why {
        BadAnswer::Unreadable { .. } => {
            anyhow!("the VMM's answer can't be read: {why}; is it of another version?")
        }
        why => anyhow!("no VMM answers so: {why}; if its guest has taken it over, end it"),
    })
}

fn connected(path: &Path) -> anyhow::Result<UnixStream> {
    connect_now(path).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock => anyhow!("the VMM takes no connections; try again"),
        _ => anyhow!(error).context(format!(
            "no VMM answers at {}; it has ended, or runs with --no-bridge",
            path.display()
        )),
    })
}

/// The socket of VMM `pid`, or of the only one that runs.
///
/// # Errors
/// When there is none, or more than one and no `pid`.
pub fn choose(dir: &StateDir, pid: Option<u32>) -> anyhow::Result<VmmSocket> {
    if let Some(pid) = pid {
        return VmmSocket::find(dir, pid);
    }
    let running = running(dir)?;
    match running[..] {
        [pid] => VmmSocket::find(dir, pid),
        [] => bail!("no VMM of this user runs; start one with vcpufreq run"),
        _ => {
            let pids: Vec<_> = running.iter().map(u32::to_string).collect();
            bail!(
                "several VMMs run; give the process of one: {}",
                pids.join(", ")
            )
        }
    }
}

/// Processes of the VMMs of this user that run.
///
/// # Errors
/// When the directory of records can't be read.
pub fn running(dir: &StateDir) -> anyhow::Result<Vec<u32>> {
    let host = HostRoot::default();
    let all = dir.list()?;
    let records = all.iter().filter_map(|(_, record)| known(record));
    Ok(records
        .filter(|record| record.owner.status(&KernelHost::from(&host)) == OwnerStatus::InUse)
        .map(|record| record.owner.pid)
        .collect())
}

#[cfg(test)]
mod tests {
    //! Of answers that have too many bytes together, those go that have the most, or are about to.
    use super::{super::answer::tests::largest, *};

    fn coming(bytes: usize) -> AnswerState {
        AnswerState::Coming(UnixStream::pair().unwrap().0, vec![b' '; bytes])
    }

    /// Of a VM with so many vCPUs.
    fn read(vcpus: usize) -> AnswerState {
        let mut stats = largest();
        stats.vcpus.truncate(vcpus);
        AnswerState::Read(Ok(stats))
    }

    /// Which of these are given up.
    fn given_up(states: Vec<AnswerState>) -> Vec<bool> {
        let socket = VmmSocket::at(PathBuf::new(), 13);
        let socket = &socket;
        let all = states.into_iter();
        let mut all: Vec<_> = all.map(|state| PendingAnswer { socket, state }).collect();
        give_up_largest(&mut all);
        let gone = |one: &PendingAnswer<'_>| matches!(one.state, AnswerState::Read(Err(_)));
        all.iter().map(gone).collect()
    }

    #[test]
    fn answers_without_end_cost_no_large_vm_its_metrics() {
        let mut states = vec![read(300)];
        states.extend([(); 5].map(|()| coming(MOST_BYTES)));
        let gone = given_up(states);
        assert_eq!(
            (gone[0], gone.iter().filter(|gone| **gone).count()),
            (false, 1)
        );
    }

    #[test]
    fn large_answers_cost_none_that_comes_its_metrics() {
        let gone = given_up(vec![read(512), read(512), read(512), coming(64)]);
        assert_eq!(
            (gone[3], gone.iter().filter(|gone| **gone).count()),
            (false, 1)
        );
    }
}
