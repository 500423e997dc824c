// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end: a socket that answers root and the VMM's own user.

use std::{
    fs, io,
    io::Write,
    os::fd::AsRawFd as _,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::{
    sys::socket::{Shutdown, getsockopt, shutdown, sockopt::PeerCredentials},
    unistd::{Uid, geteuid},
};
use vcpufreq_device::host;

use super::Stats;
use crate::{
    patience::patience,
    sandbox::{Sandbox, ThreadClass},
};

/// How long a client may take to read a whole answer.
const PATIENCE: Duration = patience(1);
/// How long to wait for a file that may be opened.
const NO_FILES: Duration = Duration::from_secs(1);
/// What is sent at once: a wait for the socket's buffer is for no more than this.
const CHUNK: usize = 4096;

/// The thread that answers.
pub struct StatsServer {
    listener: Arc<UnixListener>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl StatsServer {
    /// Answers at `path`, in a directory that only this user may enter, with what `stats` returns.
    ///
    /// # Errors
    /// When the socket can't be made, or the thread not be started.
    pub fn start(
        path: &Path,
        sandbox: Option<Arc<Sandbox>>,
        stats: impl Fn() -> Stats + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_within(PATIENCE, path, sandbox, stats)
    }

    /// The same; a client may take so long to read a whole answer.
    pub(super) fn start_within(
        patience: Duration,
        path: &Path,
        sandbox: Option<Arc<Sandbox>>,
        stats: impl Fn() -> Stats + Send + 'static,
    ) -> io::Result<Self> {
        let listener = Arc::new(UnixListener::bind(path)?);
        let listening = listener.clone();
        let user = geteuid();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let answer_all = move || {
            // Without uclamp it is a thread like any other.
            let _ = host::clamp_current_thread_to_zero();
            if let Some(sandbox) = sandbox {
                sandbox.enter_or_end(ThreadClass::Stats);
            }
            for client in listening.incoming() {
                if stopped.load(SeqCst) {
                    break;
                }
                match client {
                    // A client that hangs up loses its own answer only.
                    Ok(client) => drop(answer(client, user, &stats, patience)),
                    // No more open files, at the moment.
                    Err(_) => std::thread::sleep(NO_FILES),
                }
            }
        };
        let thread = std::thread::Builder::new().name("stats".to_owned());
        match thread.spawn(answer_all) {
            Ok(thread) => Ok(Self {
                listener,
                stop,
                thread,
            }),
            Err(error) => {
                // It was made just now.
                let _ = fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Ends the thread. The socket's file is removed with the VMM's record.
    pub fn stop(self) {
        self.stop.store(true, SeqCst);
        // It can't fail for a socket that listens, and ends the wait for clients.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        // A panic of that thread was reported when it happened.
        let _ = self.thread.join();
    }
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
