// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thread of the VMM that serves clients at a socket of its own.

use std::{
    fs, io,
    os::{fd::AsRawFd as _, unix::net::UnixListener},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::JoinHandle,
};

use nix::sys::socket::{Shutdown, shutdown};

use crate::sandbox::{Sandbox, ThreadClass};

/// The thread, and what ends it.
pub struct SocketThread {
    listener: Arc<UnixListener>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl SocketThread {
    /// Makes a socket at `path`, in a directory that only this user may enter, and starts a thread
    /// with this name and class that runs `serve`. [`stop`](Self::stop) sets the flag, and ends a
    /// wait for a client of the listener: then `serve` has to return.
    ///
    /// # Errors
    /// When the socket can't be made, or the thread not be started.
    pub fn start(
        path: &Path,
        (name, class): (&str, ThreadClass),
        sandbox: Option<Arc<Sandbox>>,
        serve: impl FnOnce(&UnixListener, &AtomicBool) + Send + 'static,
    ) -> io::Result<Self> {
        let listener = Arc::new(UnixListener::bind(path)?);
        let stop = Arc::new(AtomicBool::new(false));
        let (listening, stopped) = (listener.clone(), stop.clone());
        let confined = move || {
            // Without uclamp it is a thread like any other.
            let _ = vcpufreq_host::clamp_current_thread_to_zero();
            if let Some(sandbox) = sandbox {
                sandbox.enter_or_end(class);
            }
            serve(&listening, &stopped);
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(confined);
        // It was made just now.
        let thread = thread.inspect_err(|_| drop(fs::remove_file(path)))?;
        Ok(Self {
            listener,
            stop,
            thread,
        })
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
