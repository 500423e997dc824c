// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end: a thread that takes calls of root and of the VMM's own user, and ends what a client
//! has set when its connection closes. No client holds another one up: the thread waits for none. What
//! limits a client is counted by its process, so a new connection is no new start.

use std::{
    collections::BTreeMap,
    io,
    num::NonZeroU32,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{SockFlag, accept4, getsockopt, sockopt::PeerCredentials},
    unistd::{geteuid, read, write},
};
use vcpufreq_bridge::BridgeHandle;
use vcpufreq_bridge::{TuneClient, TuneRequest};
use vcpufreq_device::{Khz, RateLimit, VcpuId};
use vcpufreq_host::monotonic_ns;

use super::wire::{LINE, TuneAnswer, TuneVerb};
use crate::{
    sandbox::{Sandbox, ThreadClass},
    socket_thread::SocketThread,
};

/// Calls of a process.
const CALLS: RateLimit = RateLimit {
    per_second: NonZeroU32::new(100).expect("not 0"),
    burst: NonZeroU32::new(20).expect("not 0"),
};
/// Clients at once.
const CLIENTS: usize = 128;
/// Of these, of one process.
const CLIENTS_OF_ONE: usize = 16;
/// What a process may have in force.
const HANDLES: usize = 16;
/// Processes whose calls are remembered.
const PROCESSES: usize = 256;
/// How long to wait if a client can't be accepted.
const RETRY: Duration = Duration::from_millis(10);

/// Takes calls for `bridge` at `path`, in a directory that only this user may enter.
///
/// # Errors
/// When the socket can't be made, or the thread not be started.
pub fn start_taking_calls(
    path: &Path,
    sandbox: Option<Arc<Sandbox>>,
    bridge: BridgeHandle,
) -> io::Result<SocketThread> {
    let user = geteuid().as_raw();
    let name = ("tune", ThreadClass::Tune);
    SocketThread::start(path, name, sandbox, move |listener, stop| {
        let mut serving = Serving {
            listener,
            bridge,
            user,
            clients: Vec::new(),
            last: 0,
            calls: RecentCalls::default(),
        };
        let mut wait = None;
        while !stop.load(SeqCst) {
            wait = serving.turn(wait);
        }
    })
}

struct Serving<'a> {
    listener: &'a UnixListener,
    bridge: BridgeHandle,
    user: u32,
    clients: Vec<ConnectedClient>,
    /// Number of the last connection.
    last: u64,
    calls: RecentCalls,
}

struct ConnectedClient {
    stream: UnixStream,
    who: TuneClient,
    /// What it has sent of a line.
    input: Vec<u8>,
    handles: Vec<u64>,
    gone: bool,
}

/// The buckets of processes: when each that isn't full is.
#[derive(Default)]
struct RecentCalls(BTreeMap<u32, u64>);

impl Serving<'_> {
    /// Waits for so long at most, and does what there is to do; how long the next wait may be.
    fn turn(&mut self, wait: Option<Duration>) -> Option<Duration> {
        let [knocks, ready] = self.wait(wait);
        for (client, ready) in self.clients.iter_mut().zip(ready) {
            if ready {
                client.hear(&self.bridge, &mut self.calls);
            }
        }
        if knocks == [true] {
            self.accept();
        }
        let next = self.bridge.end_due_tunings();
        self.tell_ended();
        self.clients.retain(|client| {
            if client.gone {
                self.bridge.client_gone(client.who.connection);
            }
            !client.gone
        });
        // Not before its time.
        next.map(|next| next + Duration::from_millis(1))
    }

    /// Whether the listener has a client, and which clients have something.
    fn wait(&self, wait: Option<Duration>) -> [Vec<bool>; 2] {
        let sockets = self.clients.iter().map(|client| client.stream.as_fd());
        let sockets = std::iter::once(self.listener.as_fd()).chain(sockets);
        let mut files: Vec<_> = sockets
            .map(|socket| PollFd::new(socket, PollFlags::POLLIN))
            .collect();
        let wait = wait.map_or(PollTimeout::NONE, |wait| {
            PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)
        });
        // A signal ends a wait, too.
        let any = poll(&mut files, wait).is_ok();
        let mut ready = files.iter().map(|file| any && file.any() == Some(true));
        [ready.by_ref().take(1).collect(), ready.collect()]
    }

    fn accept(&mut self) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let stream = match accept4(self.listener.as_raw_fd(), flags) {
            Ok(number) => stream_of(number),
            // It has hung up.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => return,
            // No file or no memory at the moment, or the thread is to end.
            Err(_) => return std::thread::sleep(RETRY),
        };
        let Ok(peer) = getsockopt(&stream, PeerCredentials) else {
            return;
        };
        if ![0, self.user].contains(&peer.uid()) {
            return;
        }
        self.last += 1;
        let mut client = ConnectedClient {
            stream,
            who: TuneClient {
                user: peer.uid(),
                // 0 from another PID namespace.
                pid: u32::try_from(peer.pid()).unwrap_or(0),
                connection: self.last,
            },
            input: Vec::new(),
            handles: Vec::new(),
            gone: false,
        };
        match self.check_room(client.who.pid) {
            Ok(()) => self.clients.push(client),
            Err(full) => client.say(TuneAnswer::Error(full)),
        }
    }

    /// Whether one more of process `pid` may be connected.
    fn check_room(&self, pid: u32) -> Result<(), String> {
        let live = self.clients.iter().filter(|client| !client.gone);
        if live.clone().count() >= CLIENTS {
            return Err(format!("{CLIENTS} clients are connected; end one"));
        }
        if live.filter(|client| client.who.pid == pid).count() >= CLIENTS_OF_ONE {
            return Err(format!(
                "a process has {CLIENTS_OF_ONE} connections at once; close one"
            ));
        }
        Ok(())
    }

    fn tell_ended(&mut self) {
        let live = self.bridge.tunings();
        let is_live = |handle: u64| live.iter().any(|tuning| tuning.handle == handle);
        for client in &mut self.clients {
            let handles = std::mem::take(&mut client.handles);
            let (live, ended): (Vec<_>, Vec<_>) = handles.into_iter().partition(|of| is_live(*of));
            client.handles = live;
            for handle in ended {
                client.say(TuneAnswer::Ended(handle));
            }
        }
    }
}

#[expect(unsafe_code, reason = "nix gives an accepted socket as a number")]
fn stream_of(number: i32) -> UnixStream {
    // SAFETY: the kernel has just opened it, and nothing else knows its number.
    unsafe { OwnedFd::from_raw_fd(number) }.into()
}

impl ConnectedClient {
    /// Reads what is there, and carries out the calls in it.
    fn hear(&mut self, bridge: &BridgeHandle, calls: &mut RecentCalls) {
        let mut piece = [0; LINE];
        // recv(2) is no call of a confined thread.
        match read(&self.stream, &mut piece) {
            Ok(0) => self.gone = true,
            Ok(bytes) => self.input.extend(&piece[..bytes]),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => self.gone = true,
        }
        while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            let answer = match calls.take_token(self.who.pid, monotonic_ns()) {
                Ok(()) => self.carry_out(&line, bridge),
                Err(why) => Err(why),
            };
            self.say(answer.map_or_else(TuneAnswer::Error, TuneAnswer::Handle));
        }
        if self.input.len() > LINE {
            self.say(TuneAnswer::Error(format!(
                "a call has at most {LINE} bytes"
            )));
            self.gone = true;
        }
    }

    fn carry_out(&mut self, line: &[u8], bridge: &BridgeHandle) -> Result<u64, String> {
        let text = |error: vcpufreq_bridge::TuneError| error.to_string();
        match TuneVerb::read(line)? {
            TuneVerb::Tune {
                vcpu,
                floor_khz,
                ceiling_khz,
                for_ms,
            } => {
                let mut all = bridge.tunings();
                all.retain(|tuning| tuning.client.pid == self.who.pid);
                if all.len() >= HANDLES {
                    return Err(format!("a process has {HANDLES} tunings at once; end one"));
                }
                let request = TuneRequest {
                    vcpu: VcpuId(vcpu),
                    floor: floor_khz.map(Khz),
                    ceiling: ceiling_khz.map(Khz),
                    lasts: Duration::from_millis(for_ms),
                };
                let handle = bridge.tune(request, self.who).map_err(text)?;
                self.handles.push(handle);
                Ok(handle)
            }
            TuneVerb::Retune { handle, for_ms } => {
                let lasts = Duration::from_millis(for_ms);
                bridge.retune(handle, lasts).map_err(text)?;
                Ok(handle)
            }
            TuneVerb::Untune { handle } => {
                bridge.untune(handle).map_err(text)?;
                // This client gets the answer, so it gets no `ended`.
                self.handles.retain(|own| *own != handle);
                Ok(handle)
            }
        }
    }

    /// A client that doesn't read loses its connection.
    fn say(&mut self, answer: TuneAnswer) {
        let line = answer.line().unwrap_or_default();
        let sent = write(&self.stream, line.as_bytes());
        self.gone |= sent != Ok(line.len());
    }
}

impl RecentCalls {
    /// Whether process `pid` may call now. A bucket that is full again is as a new one.
    fn take_token(&mut self, pid: u32, now: u64) -> Result<(), String> {
        self.0.retain(|_, full_at| *full_at > now);
        let (pace, full_at) = (CALLS.each(), self.0.get(&pid).copied().unwrap_or(now));
        if full_at > now.saturating_add(pace.slack_ns) {
            let (rate, burst) = (CALLS.per_second, CALLS.burst);
            return Err(format!(
                "too many calls: a process may send {rate} a second, {burst} at once; try again"
            ));
        }
        self.0.insert(pid, pace.charged(full_at, now));
        if self.0.len() > PROCESSES {
            let least = self.0.iter().min_by_key(|(_, full_at)| **full_at);
            least.map(|(pid, _)| *pid).map(|pid| self.0.remove(&pid));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a process has a burst of calls at once, then one each token's time, whatever others
    //! do; many processes take no more memory.

    use super::*;

    /// How many of 100 calls are taken.
    fn calls(recent: &mut RecentCalls, pid: u32, now: u64) -> usize {
        let taken = (0..100).filter(|_| recent.take_token(pid, now).is_ok());
        taken.count()
    }

    #[test]
    fn a_process_calls_no_more_often_than_its_bucket_allows() {
        let mut recent = RecentCalls::default();
        let second = 1_000_000_000;
        assert_eq!(calls(&mut recent, 1, second), 20);
        assert_eq!(calls(&mut recent, 2, second), 20, "another one");
        assert_eq!(calls(&mut recent, 1, second + 9_999_999), 0);
        assert_eq!(calls(&mut recent, 1, second + 10_000_000), 1);
        assert_eq!(calls(&mut recent, 1, 3600 * second), 20);
        assert_eq!(recent.0.len(), 1, "the other one's is full");
    }

    #[test]
    fn many_processes_take_no_more_memory_and_help_none_that_floods() {
        let mut recent = RecentCalls::default();
        assert_eq!(calls(&mut recent, 1, 5), 20);
        for pid in 2..10_000 {
            assert_eq!(recent.take_token(pid, 5), Ok(()));
            assert!(recent.0.len() <= PROCESSES, "{pid}");
        }
        assert_eq!(calls(&mut recent, 1, 5), 0);
    }
}
