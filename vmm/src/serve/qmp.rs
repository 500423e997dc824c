// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! QEMU's control socket (QMP): which threads run a VM's vCPUs, and whether they run. QEMU before 11
//! names its threads with `-name debug-threads=on` only.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};
use serde::Deserialize;
use vcpufreq_device::MAX_VCPUS;
use vcpufreq_host::{HostRoot, Tid};

use crate::{message::printable, sys::connect_now};

/// QEMU carries out each once it has carried out the one before.
const COMMANDS: &[u8] = b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-cpus-fast\"}\n\
    {\"execute\":\"query-status\"}\n";
/// More than QEMU writes up to its answer of 512 vCPUs.
const MOST: usize = 1 << 20;
/// How long QEMU may take from its first byte to that answer. It greets, and answers when it has its
/// memory.
const ANSWERS_WITHIN: Duration = Duration::from_secs(600);

/// More than a line has behind that answer: the VM's status, or an event.
const LINE: usize = 64 << 10;

/// A connection to QEMU, and a question that it may not have answered yet.
pub struct Qmp {
    path: PathBuf,
    stream: UnixStream,
    /// What was heard and isn't a whole line yet.
    said: Vec<u8>,
    /// When the first byte came, and how many came.
    heard: Option<(Instant, usize)>,
    paused: bool,
    ending: bool,
}

/// A line behind the answer.
#[derive(Deserialize)]
struct Notice {
    event: Option<VmEvent>,
    #[serde(rename = "return")]
    status: Option<Status>,
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum VmEvent {
    Stop,
    Resume,
    /// After a suspend to memory; no RESUME comes with it.
    Wakeup,
    Reset,
    Shutdown,
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Status {
    running: bool,
}

#[derive(Deserialize)]
struct QmpLine {
    #[serde(rename = "return")]
    answer: Option<Answer>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Cpus(Vec<Cpu>),
    Other(serde::de::IgnoredAny),
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cpu {
    cpu_index: usize,
    thread_id: i32,
}

#[derive(Deserialize)]
struct Refusal {
    desc: String,
}

impl Qmp {
    /// Asks the QEMU that listens at `path`.
    ///
    /// # Errors
    /// When it can't be asked.
    pub fn ask(path: &Path) -> anyhow::Result<Self> {
        let sent = || {
            let mut stream = connect_now(path)?;
            stream.write_all(COMMANDS)?;
            anyhow::Ok(stream)
        };
        let stream = sent().with_context(|| {
            let path = path.display();
            format!("can't connect to QEMU's control socket {path}; correct --qmp")
        })?;
        Ok(Self {
            path: path.to_owned(),
            stream,
            said: Vec::new(),
            heard: None,
            paused: false,
            ending: false,
        })
    }

    /// The threads of process `pid` that run vCPUs, in this order, of `vcpus` of them or more; none for
    /// one that isn't plugged in, or has ended since. `None` while QEMU hasn't answered.
    ///
    /// # Errors
    /// When its answer is an error, of another VM, or has no end at `now`.
    pub fn vcpu_threads(
        &mut self,
        host: &HostRoot,
        (pid, vcpus): (u32, usize),
        now: Instant,
    ) -> anyhow::Result<Option<Vec<Option<Tid>>>> {
        let path = self.path.display().to_string();
        let Some(cpus) = self.answer(now).with_context(|| path.clone())? else {
            return Ok(None);
        };
        let last = cpus.iter().map(|cpu| cpu.cpu_index).max();
        let count = last.map_or(0, |last| last.min(MAX_VCPUS - 1) + 1);
        let mut threads = vec![None; count.max(vcpus)];
        for cpu in &cpus {
            let of_pid = host.path(format!("proc/{pid}/task/{}", cpu.thread_id));
            if let Some(thread) = threads.get_mut(cpu.cpu_index) {
                *thread = Tid::new(cpu.thread_id).filter(|_| of_pid.exists());
            }
        }
        if threads.iter().all(Option::is_none) {
            bail!("{path} is another VM's; correct --qmp");
        }
        Ok(Some(threads))
    }

    /// What to do about no answer.
    pub fn silence(&self) -> String {
        let path = self.path.display();
        format!("{path} doesn't answer; disconnect other programs from it, or correct --qmp")
    }

    /// Whether QEMU has paused the VM, as far as it was heard.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether QEMU has reported that it ends. To give its memory back may take it long.
    pub fn is_ending(&self) -> bool {
        self.ending
    }

    /// Hears on, behind [`Self::vcpu_threads`]; whether the VM was reset. It reads once: what QEMU
    /// writes beyond that is the next call's.
    ///
    /// # Errors
    /// When QEMU has closed the connection, or writes something else than QMP.
    pub fn hear(&mut self) -> anyhow::Result<bool> {
        let mut part = [0; 4096];
        match self.stream.read(&mut part) {
            Ok(0) => bail!("QEMU has closed the connection"),
            Ok(read) => self.said.extend_from_slice(&part[..read]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        let end = self.said.iter().rposition(|byte| *byte == b'\n');
        let whole: Vec<_> = self.said.drain(..end.map_or(0, |end| end + 1)).collect();
        if self.said.len() > LINE {
            bail!("a line of QEMU's has no end");
        }
        let mut is_reset = false;
        for line in whole.split_inclusive(|byte| *byte == b'\n') {
            let notice: Notice = serde_json::from_slice(line).context("this isn't QMP")?;
            match notice.event {
                Some(VmEvent::Stop) => self.paused = true,
                Some(VmEvent::Resume | VmEvent::Wakeup) => self.paused = false,
                Some(VmEvent::Reset) => is_reset = true,
                Some(VmEvent::Shutdown) => self.ending = true,
                Some(VmEvent::Other) | None => {}
            }
            if let Some(Status { running }) = notice.status {
                self.paused = !running;
            }
        }
        Ok(is_reset)
    }

    fn answer(&mut self, now: Instant) -> anyhow::Result<Option<Vec<Cpu>>> {
        let mut part = [0; 4096];
        let mut has_lines = false;
        loop {
            match self.stream.read(&mut part) {
                Ok(0) => bail!("QEMU has closed the connection"),
                Ok(read) => {
                    let part = &part[..read];
                    has_lines |= part.contains(&b'\n');
                    self.said.extend_from_slice(part);
                    let (since, bytes) = self.heard.unwrap_or((now, 0));
                    self.heard = Some((since, bytes + read));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
            if self.heard.is_some_and(|(_, bytes)| bytes > MOST) {
                bail!("QEMU's answer has no end");
            }
        }
        let found = if has_lines { self.find_answer()? } else { None };
        let since = self.heard.map(|(since, _)| since);
        if found.is_none() && since.is_some_and(|since| now > since + ANSWERS_WITHIN) {
            let within = ANSWERS_WITHIN.as_secs();
            bail!("QEMU has begun to answer, and has not ended in {within} s");
        }
        Ok(found)
    }

    /// The answer among the whole lines. Each is looked at once.
    fn find_answer(&mut self) -> anyhow::Result<Option<Vec<Cpu>>> {
        let lines = self.said.split_inclusive(|byte| *byte == b'\n');
        let (mut read, mut found) = (0, None);
        for line in lines.filter(|line| line.ends_with(b"\n")) {
            read += line.len();
            let line: QmpLine = serde_json::from_slice(line).context("this isn't QMP")?;
            if let Some(Refusal { desc }) = line.error {
                bail!("QEMU doesn't list its vCPUs: {}", printable(&desc));
            }
            if let Some(Answer::Cpus(cpus)) = line.answer {
                found = Some(cpus);
                break;
            }
        }
        self.said.drain(..read);
        Ok(found)
    }
}

/// What to do about a VM with so many vCPUs.
pub fn other_count(vcpus: usize) -> anyhow::Error {
    anyhow!("it has {vcpus} vCPUs; start the server with --cpus {vcpus}")
}

impl AsFd for Qmp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    //! What QEMU writes in parts is put together, and what isn't this VM's is refused. A peer that
    //! isn't QEMU costs a bounded memory.
    use std::os::unix::net::UnixListener;

    use vcpufreq_host::fakes::FakeHost;

    use super::*;
    use crate::message::chain;

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";
    const EVENT: &str = "{\"event\": \"RESUME\", \"timestamp\": {}}\n{\"return\": {}}\n";
    const CPUS: &str = "{\"return\": [{\"thread-id\": 9, \"cpu-index\": 1, \"props\": {}}, \
                        {\"thread-id\": 8, \"cpu-index\": 0}]}\n";

    /// What is learnt of a VM of threads 8 and 9 after each of these parts.
    fn learnt(vcpus: usize, parts: &[&str]) -> Vec<Result<Option<Vec<Option<i32>>>, String>> {
        let host = FakeHost::empty();
        for tid in [8, 9] {
            host.write(&format!("proc/7/task/{tid}/comm"), "qemu-system-aar\n");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let mut qmp = Qmp::ask(&path).unwrap();
        let (mut qemu, _) = listener.accept().unwrap();
        let learnt = parts.iter().map(|part| {
            qemu.write_all(part.as_bytes()).unwrap();
            let threads = qmp.vcpu_threads(&host.root(), (7, vcpus), Instant::now());
            let number = |tid: Option<Tid>| tid.map(Tid::get);
            let numbers = |tids: Vec<_>| tids.into_iter().map(number).collect();
            let threads = threads.map(|threads| threads.map(numbers));
            threads.map_err(|error| format!("{error:#}"))
        });
        learnt.collect()
    }

    #[test]
    fn threads_are_those_of_vcpus_in_order() {
        let (half, rest) = CPUS.split_at(30);
        let found = learnt(2, &["", GREETING, EVENT, half, rest]);
        let none = Ok(None);
        let all = Ok(Some(vec![Some(8), Some(9)]));
        assert_eq!(found, [none.clone(), none.clone(), none.clone(), none, all]);
        let with_unplugged = Ok(Some(vec![Some(8), Some(9), None]));
        assert_eq!(learnt(3, &[CPUS]), [with_unplugged]);
        assert_eq!(learnt(1, &[CPUS]), [Ok(Some(vec![Some(8), Some(9)]))]);
        let ended = CPUS.replace("9,", "10,");
        assert_eq!(learnt(2, &[&ended]), [Ok(Some(vec![Some(8), None]))]);
    }

    /// Connected, and QEMU's end.
    fn connected() -> (Qmp, UnixStream) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let qmp = Qmp::ask(&path).unwrap();
        (qmp, listener.accept().unwrap().0)
    }

    #[test]
    fn an_answer_without_end_is_refused_by_bytes_and_by_time() {
        let host = FakeHost::empty();
        let start = Instant::now();
        let look = |qmp: &mut Qmp, now| qmp.vcpu_threads(&host.root(), (7, 1), now);
        // Short lines, of which each is looked at once.
        let (mut qmp, mut qemu) = connected();
        let lines = b"{}\n".repeat(1024);
        let mut bytes = 0;
        let error = loop {
            qemu.write_all(&lines).unwrap();
            bytes += lines.len();
            match look(&mut qmp, start) {
                Ok(found) => assert_eq!((found, qmp.said.len()), (None, 0)),
                Err(error) => break error,
            }
        };
        assert!(
            chain(&error).contains("no end") && bytes > MOST,
            "{error:#}"
        );
        // A few bytes at a time.
        let (mut qmp, mut qemu) = connected();
        let later = |part: u32| start + ANSWERS_WITHIN * part / 10;
        for part in 3..14 {
            // Silence before the first byte doesn't count.
            qemu.write_all(b"{}\n").unwrap();
            assert_eq!(look(&mut qmp, later(part)).unwrap(), None);
        }
        let error = look(&mut qmp, later(14)).unwrap_err();
        assert!(chain(&error).contains("not ended"), "{error:#}");
    }

    #[test]
    fn pauses_and_resets_are_heard() {
        let (mut qmp, mut qemu) = connected();
        // Each part, whether the VM is paused then, and whether it was reset.
        for (part, heard) in [
            ("", (false, false)),
            (
                "{\"return\": {\"running\": false, \"status\": \"paused\"}}\r\n",
                (true, false),
            ),
            (
                "{\"event\": \"RESUME\", \"timestamp\": {}}\r\n{\"ev",
                (false, false),
            ),
            ("ent\": \"STOP\"}\r\n", (true, false)),
            ("{\"event\": \"WAKEUP\"}\r\n", (false, false)),
            ("{\"event\": \"STOP\"}\r\n", (true, false)),
            (
                "{\"event\": \"RTC_CHANGE\", \"data\": {}}\r\n",
                (true, false),
            ),
            (
                "{\"error\": {\"class\": \"x\", \"desc\": \"no\"}}\r\n",
                (true, false),
            ),
            (
                "{\"event\": \"RESET\"}\r\n{\"event\": \"RESUME\"}\r\n",
                (false, true),
            ),
        ] {
            qemu.write_all(part.as_bytes()).unwrap();
            let is_reset = qmp.hear().unwrap();
            assert_eq!((qmp.is_paused(), is_reset), heard, "{part}");
        }
        qemu.write_all(b"{\"event\": \"SHUTDOWN\"}\n").unwrap();
        assert!(!qmp.is_ending() && qmp.hear().is_ok() && qmp.is_ending());
        drop(qemu);
        assert!(qmp.hear().is_err());
    }

    #[test]
    fn what_is_no_event_ends_the_hearing() {
        let (mut qmp, mut qemu) = connected();
        qemu.write_all(b"[[[[\n").unwrap();
        assert!(qmp.hear().unwrap_err().to_string().contains("isn't QMP"));
        let (mut qmp, mut qemu) = connected();
        let error = loop {
            qemu.write_all(&[b'['; 4096]).unwrap();
            if let Err(error) = qmp.hear() {
                break error;
            }
            assert!(qmp.said.len() <= LINE);
        };
        assert!(error.to_string().contains("no end"), "{error}");
    }

    #[test]
    fn what_is_not_this_vms_is_refused() {
        let others = CPUS.replace("9,", "10,").replace(": 8,", ": 11,");
        for (vcpus, said, line) in [
            (2, &*others, "another VM's"),
            (
                2,
                "{\"error\": {\"class\": \"x\", \"desc\": \"no\"}}\n",
                "no",
            ),
            (
                2,
                "{\"error\": {\"class\": \"x\", \"desc\": \"\\u001b[2J\\nno\"}}\n",
                "vCPUs: ?[2J?no",
            ),
            (2, "HTTP/1.1 400\n", "isn't QMP"),
        ] {
            let found = learnt(vcpus, &[said]);
            let Err(error) = &found[0] else {
                panic!("{found:?}")
            };
            assert!(error.contains(line), "{error}");
        }
    }
}
