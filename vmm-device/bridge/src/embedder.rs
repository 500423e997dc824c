// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a bridge needs of the program that it is part of. The bridge writes to no stream.

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::thread::{Builder, JoinHandle};

use vcpufreq_host::HostRoot;

use crate::syscalls;

/// What a thread of a bridge is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BridgeThread {
    /// Carries out requests, and keeps cur_perf in pages true.
    Requests,
    /// Watches the host, and applies what was over a limit.
    Maintenance,
}

impl BridgeThread {
    /// The name of such a thread.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Maintenance => "maintenance",
        }
    }

    /// The system calls that such a thread makes.
    #[must_use]
    pub fn syscalls(self) -> &'static [i64] {
        match self {
            Self::Requests => syscalls::REQUESTS,
            Self::Maintenance => syscalls::MAINTENANCE,
        }
    }
}

/// What a thread of a bridge does, to its end.
pub type BridgeWork = Box<dyn FnOnce() + Send>;

/// The program that has a bridge. No method calls a [`BridgeHandle`](crate::BridgeHandle): the caller
/// may hold its lock.
///
/// A thread that it confines still uses what is open, reads files below `/sys/devices/system/cpu`
/// (pCPUs and cpufreq drivers come and go), and sets affinity and clamps of the vCPUs' threads.
/// [`syscalls`](crate::syscalls) has the calls.
pub trait Embedder: Debug + Send + Sync {
    /// A problem that ends nothing, in one line: the cause and the next step.
    fn warn(&self, text: &str);

    /// How a path works on this host, in one line.
    fn explain(&self, _text: &str) {}

    /// Starts a thread that runs `body`. A VMM whose threads are confined from their start does that
    /// here, before `body`; its filter kills the process, not the thread.
    ///
    /// # Errors
    /// As pthread_create(3): `EAGAIN`. The bridge, or the path, isn't started then.
    fn spawn(&self, thread: BridgeThread, body: BridgeWork) -> io::Result<JoinHandle<()>> {
        Builder::new().name(thread.name().to_owned()).spawn(body)
    }

    /// Called by each thread of the bridge before its first work, when it has set its own affinity
    /// and clamp. A VMM that permits a thread no such call confines it here, not in [`Self::spawn`].
    fn on_thread(&self, _thread: BridgeThread) {}

    /// [`frequency_event`](crate::ioeventfd::frequency_event) of a pCPU that has come online, by a
    /// helper with CAP_PERFMON. `None`: the bridge's thread opens it by its own rights.
    ///
    /// # Errors
    /// As that. The bridge looks at that pCPU's frequency every 4 ms then.
    fn frequency_event(&self, _host: &HostRoot, _pcpu: u32) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Whether the process has ended that took an operator's policies; its policy went with it.
    fn policy_holder_has_ended(&self) -> bool {
        false
    }
}

/// Warns by such a function alone, and confines no thread.
impl Embedder for fn(&str) {
    fn warn(&self, text: &str) {
        self(text);
    }
}

/// Drops all texts, and confines no thread.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Embedder for Silent {
    fn warn(&self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn a_function_is_told_warnings_alone() {
        static TOLD: Mutex<String> = Mutex::new(String::new());
        let tell: fn(&str) = |text| TOLD.lock().unwrap().push_str(text);
        let embedder: Arc<dyn Embedder> = Arc::new(tell);
        embedder.explain("how a path works");
        embedder.warn("a problem");
        assert_eq!(*TOLD.lock().unwrap(), "a problem");
    }
}
