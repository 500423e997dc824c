// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guardian's end: one call after another, of root and of the guardian's own user.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use sha2::{Digest as _, Sha256};
use vcpufreq_host_bpf::OperatorVm;

use super::wire::{LINE, OBJECT, PolicyAnswer, PolicyVerb, ShownPolicy, is_name};
use crate::patience::patience;

/// How long a client may hold the guardian up, in all: it undoes what its VMM has left.
const PATIENCE: Duration = patience(5);
/// How long to wait if a client can't be accepted.
const RETRY: Duration = Duration::from_millis(10);

/// Takes calls about the policy of one VM, and holds that.
#[derive(Debug)]
pub struct PolicyCalls {
    /// The VMM.
    pid: u32,
    listener: Option<UnixListener>,
    in_force: Option<HeldPolicy>,
}

#[derive(Debug)]
struct HeldPolicy {
    vm: OperatorVm,
    name: String,
    sha256: String,
    since_unix_ms: u64,
}

impl PolicyCalls {
    /// Of the VMM's process `pid`.
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            listener: None,
            in_force: None,
        }
    }

    /// Takes calls at `path` from now on, in a directory that only this user may enter.
    ///
    /// # Errors
    /// As bind(2).
    pub fn listen(&mut self, path: &Path) -> io::Result<()> {
        if self.listener.is_none() {
            let listener = UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            self.listener = Some(listener);
        }
        Ok(())
    }

    /// Carries out calls until `other` is readable.
    pub fn until(&mut self, other: BorrowedFd<'_>) {
        while let Some(listener) = &self.listener {
            let files = [other, listener.as_fd()];
            let mut files = files.map(|file| PollFd::new(file, PollFlags::POLLIN));
            match poll(&mut files, PollTimeout::NONE) {
                Ok(_) if files[0].any() == Some(false) => {}
                Err(Errno::EINTR) => continue,
                _ => return,
            }
            match listener.accept() {
                // A client that has gone needs no answer.
                Ok((client, _)) => drop(self.answer(&client)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    fn answer(&mut self, mut client: &UnixStream) -> io::Result<()> {
        let user = getsockopt(client, PeerCredentials)?.uid();
        if ![0, geteuid().as_raw()].contains(&user) {
            return Ok(());
        }
        client.set_nonblocking(false)?;
        client.set_write_timeout(Some(PATIENCE))?;
        let until = Instant::now() + PATIENCE;
        let mut input = BufReader::new(TimedInput { client, until });
        let mut line = Vec::new();
        (&mut input).take(LINE).read_until(b'\n', &mut line)?;
        let done = PolicyVerb::read(&line).and_then(|call| self.carry_out(call, input));
        let answer = match done {
            Ok(()) => PolicyAnswer::InForce(self.in_force.as_ref().map(HeldPolicy::shown)),
            Err(why) => PolicyAnswer::Error(why),
        };
        client.write_all(answer.line()?.as_bytes())
    }

    fn carry_out(&mut self, call: PolicyVerb, input: impl io::Read) -> Result<(), String> {
        // Of a VMM that has lost the path it is no more than in memory.
        self.in_force.take_if(|held| !held.vm.decides());
        let (name, bytes, trial) = match call {
            PolicyVerb::Show => return Ok(()),
            PolicyVerb::Reset => {
                self.in_force = None;
                return Ok(());
            }
            PolicyVerb::Load { name, bytes, trial } => (name, bytes, trial),
        };
        if !is_name(&name) || bytes >= OBJECT {
            return Err("not a policy: its name or its size is none".to_owned());
        }
        let mut object = Vec::new();
        let read = input.take(bytes).read_to_end(&mut object);
        read.map_err(|error| format!("the policy doesn't come: {error}"))?;
        self.load(&object, name, trial)
            .map_err(|error| error.to_string())
    }

    fn load(
        &mut self,
        object: &[u8],
        name: String,
        trial: bool,
    ) -> Result<(), vcpufreq_host_bpf::BpfError> {
        let mut fresh = match self.in_force {
            Some(_) => None,
            None => Some(OperatorVm::find(self.pid)?),
        };
        let held = self.in_force.as_mut().map(|held| &mut held.vm);
        let Some(vm) = held.or(fresh.as_mut()) else {
            return Ok(());
        };
        if trial {
            return vm.judge(object);
        }
        vm.load(object, &name)?;
        let taken = self.in_force.take().map(|held| held.vm).or(fresh);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let since = since.map_or(0, |since| since.as_millis());
        self.in_force = taken.map(|vm| HeldPolicy {
            vm,
            name,
            sha256: sha256(object),
            since_unix_ms: u64::try_from(since).unwrap_or(u64::MAX),
        });
        Ok(())
    }
}

/// What a client sends, until then.
struct TimedInput<'a> {
    client: &'a UnixStream,
    until: Instant,
}

impl io::Read for TimedInput<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.client.set_read_timeout(Some(left))?;
        self.client.read(buffer)
    }
}

impl HeldPolicy {
    fn shown(&self) -> ShownPolicy {
        let [asked, bounded, silent] = self.vm.counts();
        ShownPolicy {
            name: self.name.clone(),
            sha256: self.sha256.clone(),
            since_unix_ms: self.since_unix_ms,
            asked,
            bounded,
            silent,
        }
    }
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let digits = digest.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    let digits = digits.filter_map(|digit| char::from_digit(digit.into(), 16));
    digits.collect()
}

#[cfg(test)]
mod tests {
    //! Promises: a call of this user has one answer, in one line; what is refused changes nothing; a
    //! client that sends nothing holds no other up for ever; the VMM's word ends the wait. Another user
    //! has no answer.
    use std::{
        fs,
        os::unix::{fs::PermissionsExt as _, net::UnixDatagram},
    };

    use super::super::wire::{PolicyReply, VERSION};
    use super::*;
    use crate::as_other::as_user;

    /// What a guardian of this process, which has no programs, answers.
    fn answer_to(sent: &str) -> PolicyAnswer {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("42.policy");
        let mut calls = PolicyCalls::new(std::process::id());
        calls.listen(&path).unwrap();
        let (vmm, guardian) = UnixDatagram::pair().unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(sent.as_bytes()).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut line = String::new();
        std::thread::scope(|scope| {
            scope.spawn(|| calls.until(guardian.as_fd()));
            BufReader::new(&client).read_line(&mut line).unwrap();
            vmm.send(&[1]).unwrap();
        });
        let reply: PolicyReply = serde_json::from_str(&line).expect(&line);
        assert_eq!(reply.version, VERSION);
        reply.reply
    }

    #[test]
    fn without_a_policy_the_built_in_rule_is_shown_and_stays() {
        for call in [PolicyVerb::Show, PolicyVerb::Reset] {
            let answer = answer_to(&call.line().unwrap());
            assert_eq!(answer, PolicyAnswer::InForce(None));
        }
    }

    #[test]
    fn what_is_refused_has_one_line() {
        let load = |name: &str, bytes| {
            let (name, trial) = (name.to_owned(), false);
            let load = PolicyVerb::Load { name, bytes, trial };
            load.line().unwrap() + "object"
        };
        for (sent, said) in [
            ("no call\n".to_owned(), "not a call"),
            (String::new(), "not a call"),
            (load("a b", 6), "its name"),
            (load("night", OBJECT), "its size"),
            (load("night", 6), "has no programs that ask a policy"),
        ] {
            let PolicyAnswer::Error(why) = answer_to(&sent) else {
                panic!("{sent} is taken");
            };
            assert!(why.contains(said) && !why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn another_user_has_no_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("42.policy");
        let listener = UnixListener::bind(&path).unwrap();
        // What keeps others off is neither directory nor socket.
        for (path, mode) in [(dir.path(), 0o755), (&path, 0o777)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let sent = PolicyVerb::Show.line().unwrap();
        let client = as_user(65534, || {
            let mut client = UnixStream::connect(&path).unwrap();
            client.write_all(sent.as_bytes()).unwrap();
            client
        });
        let mut client = match client {
            Ok(client) => client,
            Err(error) => return println!("SKIP: only root can be another user: {error}"),
        };
        let mut calls = PolicyCalls::new(std::process::id());
        calls.answer(&listener.accept().unwrap().0).unwrap();
        let mut answer = Vec::new();
        // The call that was not read is an error.
        let _ = client.read_to_end(&mut answer);
        assert_eq!(answer, b"");
    }

    #[test]
    fn what_comes_too_late_is_not_read() {
        let (client, mut other) = UnixStream::pair().unwrap();
        other.write_all(b"ab").unwrap();
        let mut input = TimedInput {
            client: &client,
            until: Instant::now() + Duration::from_secs(600),
        };
        let mut byte = [0];
        assert_eq!(input.read(&mut byte).unwrap(), 1);
        input.until = Instant::now();
        let late = input.read(&mut byte).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_hash_is_that_of_sha256sum() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sha256(b""), empty);
    }
}
