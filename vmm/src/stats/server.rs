// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end: a socket that answers root and the VMM's own user.

use std::{
    fs, io,
    io::Write,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use vcpufreq_device::host;

use super::Stats;

/// How long a client may take to read a whole answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// What is sent at once: a wait for the socket's buffer is for no more than this.
const CHUNK: usize = 4096;

/// The thread that answers.
pub struct StatsServer {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl StatsServer {
    /// Answers at `path`, in a directory that only this user may enter, with what `stats` returns.
    ///
    /// # Errors
    /// When the socket can't be made, or the thread not be started.
    pub fn start(path: &Path, stats: impl Fn() -> Stats + Send + 'static) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let answer_all = move || {
            // Without uclamp it is a thread like any other.
            let _ = host::clamp_current_thread_to_zero();
            for client in listener.incoming() {
                if stopped.load(SeqCst) {
                    break;
                }
                match client {
                    // A client that hangs up loses its own answer only.
                    Ok(client) => drop(answer(client, &stats)),
                    // No more open files, at the moment.
                    Err(_) => std::thread::sleep(PATIENCE),
                }
            }
        };
        let thread = std::thread::Builder::new().name("stats".to_owned());
        match thread.spawn(answer_all) {
            Ok(thread) => Ok(Self {
                path: path.to_owned(),
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

    /// Removes the socket and ends the thread.
    pub fn stop(self) {
        self.stop.store(true, SeqCst);
        // Wakes it up. Without a socket that is impossible, and the thread ends with the process.
        let woken = UnixStream::connect(&self.path).is_ok();
        let _ = fs::remove_file(&self.path);
        if woken {
            // A panic of that thread was reported when it happened.
            let _ = self.thread.join();
        }
    }
}

fn answer(mut client: UnixStream, stats: impl Fn() -> Stats) -> io::Result<()> {
    if ![0, geteuid().as_raw()].contains(&getsockopt(&client, PeerCredentials)?.uid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let text = serde_json::to_string(&stats())?;
    let deadline = Instant::now() + PATIENCE;
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
