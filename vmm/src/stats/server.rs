// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end: a socket that answers root and the VMM's own user.

use std::{
    io,
    io::Write,
    os::unix::net::UnixStream,
    path::Path,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::{Uid, geteuid},
};

use super::Stats;
use crate::{
    patience::patience,
    sandbox::{Sandbox, ThreadClass},
    socket_thread::SocketThread,
};

/// How long a client may take to read a whole answer.
const PATIENCE: Duration = patience(1);
/// How long to wait for a file that may be opened.
const NO_FILES: Duration = Duration::from_secs(1);
/// What is sent at once: a wait for the socket's buffer is for no more than this.
const CHUNK: usize = 4096;

/// Answers at `path`, in a directory that only this user may enter, with what `stats` returns.
///
/// # Errors
/// When the socket can't be made, or the thread not be started.
pub fn start_answering(
    path: &Path,
    sandbox: Option<Arc<Sandbox>>,
    stats: impl Fn() -> Stats + Send + 'static,
) -> io::Result<SocketThread> {
    start_answering_within(PATIENCE, path, sandbox, stats)
}

/// The same; a client may take so long to read a whole answer.
pub(super) fn start_answering_within(
    patience: Duration,
    path: &Path,
    sandbox: Option<Arc<Sandbox>>,
    stats: impl Fn() -> Stats + Send + 'static,
) -> io::Result<SocketThread> {
    let user = geteuid();
    let name = ("stats", ThreadClass::Stats);
    SocketThread::start(path, name, sandbox, move |listener, stop| {
        for client in listener.incoming() {
            if stop.load(SeqCst) {
                break;
            }
            match client {
                // A client that hangs up loses its own answer only.
                Ok(client) => drop(answer(client, user, &stats, patience)),
                // No more open files, at the moment.
                Err(_) => std::thread::sleep(NO_FILES),
            }
        }
    })
}

fn answer(
    mut client: UnixStream,
    user: Uid,
    stats: impl Fn() -> Stats,
    patience: Duration,
) -> io::Result<()> {
    if ![0, user.as_raw()].contains(&getsockopt(&client, PeerCredentials)?.uid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let text = serde_json::to_string(&stats())?;
    let deadline = Instant::now() + patience;
    for chunk in text.as_bytes().chunks(CHUNK) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.set_write_timeout(Some(left))?;
        client.write_all(chunk)?;
    }
    Ok(())
}
