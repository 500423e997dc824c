// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMMs that are to be served, while they start the threads of their vCPUs.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::bail;
use vcpufreq_bridge::shm::vcpu_threads;
use vcpufreq_device::MAX_VCPUS;
use vcpufreq_host::{HostRoot, Tid};

use super::{
    Refusals, Served, ServedVmm, give_memory,
    groups::are_placed,
    qmp::{Qmp, other_count},
    takeover,
};
use crate::{
    message::{chain, warn},
    patience::patience,
};

/// How long a VMM may do nothing before it has its vCPUs' threads. One that allocates memory for
/// longer is at work.
const THREADS_WITHIN: Duration = patience(30);
/// How often that is renewed for one that works: 600 s in all, as with QEMU's control socket. Then another
/// VMM may have its place.
const RENEWALS: u32 = 19;
/// How long libvirt may take to place them, once QEMU has its memory.
const PLACED_WITHIN: Duration = patience(30);
/// How often to look for them.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// VMMs that may wait at once.
const MOST: usize = 16;

/// Those VMMs.
#[derive(Default)]
pub struct PendingVmms {
    /// QEMU's control socket, if that is to be asked for the threads.
    qmp: Option<PathBuf>,
    /// Where the command's own hint for a VMM without named threads goes on.
    or: &'static str,
    all: Vec<Candidate>,
}

/// One of them.
struct Candidate {
    vmm: ServedVmm,
    /// Whether a later server may take it over: at first, whether one before this served it.
    is_kept: bool,
    /// The end of the server's patience, unless the VMM works.
    until: Instant,
    /// What it had worked until then.
    worked: u64,
    /// How often the patience was renewed.
    renewals: u32,
    named: NamedThreads,
    /// The end of the server's patience with libvirt, since that places its vCPUs.
    placed_until: Option<Instant>,
    qmp: Option<Asked>,
}

/// The threads of a VMM's vCPUs by their names, as they were at the last look, and when that was.
#[derive(Default)]
struct NamedThreads(Option<(Instant, Vec<Option<Tid>>)>);

impl NamedThreads {
    /// Those of process `pid`, of `vcpus` vCPUs or more, once two looks find the same: a VMM starts
    /// one after the other.
    fn look(
        &mut self,
        host: &HostRoot,
        (pid, vcpus): (u32, usize),
        now: Instant,
    ) -> Option<Vec<Option<Tid>>> {
        let last = self.0.as_ref().map(|(last, _)| *last);
        if last.is_some_and(|last| now < last + LOOK_EVERY) {
            return None;
        }
        let most = u16::try_from(MAX_VCPUS).unwrap_or(u16::MAX);
        let mut threads = vcpu_threads(host, pid, most);
        let last = threads.iter().rposition(Option::is_some);
        threads.truncate(last.map_or(0, |last| last + 1).max(vcpus));
        let before = self.0.replace((now, threads.clone()));
        before
            .is_some_and(|(_, before)| before == threads)
            .then_some(threads)
    }
}

/// QEMU's control socket, which may come after the connection: QEMU makes both in the order of its
/// command line.
struct Asked {
    path: PathBuf,
    qmp: anyhow::Result<Qmp>,
}

impl Asked {
    fn new(path: PathBuf) -> Self {
        Self {
            qmp: Qmp::ask(&path),
            path,
        }
    }

    /// The question, once QEMU listens.
    fn question(&mut self) -> Option<&mut Qmp> {
        if self.qmp.is_err() {
            self.qmp = Qmp::ask(&self.path);
        }
        self.qmp.as_mut().ok()
    }

    /// What to do about no answer.
    fn silence(&self) -> String {
        match &self.qmp {
            Ok(qmp) => qmp.silence(),
            Err(error) => chain(error),
        }
    }
}

impl Candidate {
    fn new(vmm: ServedVmm, host: &HostRoot, now: Instant) -> Self {
        Self {
            is_kept: vmm.was_served(),
            worked: vmm.worked(host),
            vmm,
            until: now + THREADS_WITHIN,
            renewals: 0,
            named: NamedThreads::default(),
            placed_until: None,
            qmp: None,
        }
    }

    /// Whether it has done nothing for as long as the server waits, or has worked for too long.
    fn is_given_up(&mut self, host: &HostRoot, now: Instant) -> bool {
        if now <= self.until {
            return false;
        }
        let worked = self.vmm.worked(host);
        if worked == self.worked || self.renewals == RENEWALS {
            return true;
        }
        if self.renewals == 0 {
            let (pid, most) = (self.vmm.pid(), (THREADS_WITHIN * RENEWALS).as_secs());
            warn(&format!(
                "waits for process {pid} to start its vCPUs, at most {most} s"
            ));
        }
        self.renewals += 1;
        self.until = now + THREADS_WITHIN;
        self.worked = worked;
        false
    }

    /// The threads of its vCPUs, once they are known. One that was served before may have unplugged
    /// some of them, and may have more.
    fn threads(&mut self, served: &Served) -> anyhow::Result<Option<Vec<Option<Tid>>>> {
        let (host, pid, vcpus) = (&served.host, self.vmm.pid(), served.vcpus.len());
        let threads = match &mut self.qmp {
            None => self.named.look(host, (pid, vcpus), Instant::now()),
            Some(asked) => match asked.question() {
                Some(qmp) => qmp.vcpu_threads(host, (pid, vcpus), Instant::now())?,
                None => None,
            },
        };
        let Some(mut threads) = threads else {
            return Ok(None);
        };
        let found = threads.iter().flatten().count();
        if self.is_kept {
            threads.truncate(vcpus);
            if threads.iter().all(Option::is_none) {
                return Ok(None);
            }
        } else if found != vcpus || threads.len() != found {
            return match &self.qmp {
                None if found <= vcpus => Ok(None),
                _ => Err(other_count(found)),
            };
        }
        let is_placed = self.is_placed(served, &threads)?;
        Ok(is_placed.then_some(threads))
    }

    /// Whether libvirt has placed the vCPUs, if it does that. It makes their cgroups and pins them once
    /// QEMU answers, and QEMU answers once it has its memory. Until then a vCPU may not run on its
    /// pCPU, if the domain has <emulatorpin>.
    fn is_placed(&mut self, served: &Served, threads: &[Option<Tid>]) -> anyhow::Result<bool> {
        if are_placed(served, self.vmm.pid(), threads) {
            return Ok(true);
        }
        if self.vmm.inherited.is_none() {
            self.vmm.inherited = Some(give_memory(served, &self.vmm, threads)?);
        }
        let now = Instant::now();
        Ok(now >= *self.placed_until.get_or_insert(now + PLACED_WITHIN))
    }

    /// Tells its guest that it has no server. A later server takes over what one before has served.
    fn give_up(&self) {
        if let Some(shared) = &self.vmm.inherited {
            shared.memory.say_gone();
            if !self.is_kept {
                takeover::forget(&self.vmm);
            }
        }
    }

    /// Why it has waited in vain.
    fn lacks(&self, vcpus: usize, or: &str) -> String {
        match &self.qmp {
            Some(asked) => asked.silence(),
            None => format!(
                "it has no thread named \"CPU {}/KVM\"; give --cpus the number that the VM has, and \
                 QEMU -name debug-threads=on{or}",
                vcpus - 1
            ),
        }
    }
}

impl PendingVmms {
    /// None yet, and QEMU's control socket; `or` follows the hint for a VMM without named threads.
    pub fn by(qmp: Option<PathBuf>, or: &'static str) -> Self {
        Self {
            qmp,
            or,
            all: Vec::new(),
        }
    }

    /// Has `vmm` wait too. QEMU answers at its control socket only once it has its memory.
    ///
    /// # Errors
    /// When too many wait, or it doesn't take its memory.
    pub fn add(&mut self, mut vmm: ServedVmm, served: &Served) -> anyhow::Result<()> {
        if self.all.len() == MOST {
            let pid = vmm.pid();
            bail!("process {pid} is one too many: {MOST} wait at the socket; give each VM its own");
        }
        let qmp = self.qmp.clone().map(Asked::new);
        if qmp.is_some() && vmm.inherited.is_none() {
            vmm.inherited = Some(give_memory(served, &vmm, &[])?);
        }
        let candidate = Candidate::new(vmm, &served.host, Instant::now());
        self.all.push(Candidate { qmp, ..candidate });
        Ok(())
    }

    /// When to call [`Self::ready`] again; never while no VMM waits.
    pub fn next_look(&self) -> Option<Duration> {
        (!self.all.is_empty()).then_some(LOOK_EVERY)
    }

    /// The first VMM that has its vCPUs' threads. One that has ended, or has had its time, waits no
    /// longer, and is one of `refusals`.
    pub fn ready(
        &mut self,
        served: &Served,
        refusals: &mut Refusals,
    ) -> Option<(ServedVmm, Vec<Option<Tid>>)> {
        let (or, mut index) = (self.or, 0);
        while let Some(candidate) = self.all.get_mut(index) {
            let threads = candidate.threads(served);
            let vmm = &candidate.vmm;
            let pid = vmm.pid();
            // Afterwards: the threads were its own.
            let is_gone = vmm.gone_within(0);
            let why = if is_gone {
                candidate.is_kept = false;
                "it has ended".to_owned()
            } else {
                match threads {
                    Ok(Some(threads)) => {
                        let mut found = self.all.remove(index);
                        found.vmm.control = found.qmp.and_then(|asked| asked.qmp.ok());
                        return Some((found.vmm, threads));
                    }
                    Err(error) => chain(&error),
                    Ok(None) if candidate.is_given_up(&served.host, Instant::now()) => {
                        candidate.lacks(served.vcpus.len(), or)
                    }
                    Ok(None) => {
                        index += 1;
                        continue;
                    }
                }
            };
            self.all.remove(index).give_up();
            let line = || format!("process {pid} isn't served: {why}");
            match is_gone {
                true => refusals.add(line),
                false => refusals.refuse(line),
            }
        }
        None
    }

    /// Ends the connections of all that wait, and returns their processes. What was served before
    /// stays.
    pub fn refuse(&mut self) -> Vec<u32> {
        let all = std::mem::take(&mut self.all).into_iter();
        let (kept, refused): (Vec<_>, Vec<_>) = all.partition(|one| one.is_kept);
        self.all = kept;
        let refused = refused.into_iter().map(|one| {
            one.give_up();
            one.vmm.pid()
        });
        refused.collect()
    }
}

#[cfg(test)]
mod tests {
    //! All vCPUs of a VM are found, also more than the server was started for. A process that works
    //! without an end is given up.
    use std::os::unix::net::UnixStream;

    use vcpufreq_host::fakes::FakeHost;

    use super::*;
    use crate::serve::Connection;

    #[test]
    fn a_vmm_is_given_up_that_does_nothing_or_works_without_an_end() {
        let (host, pid) = (FakeHost::empty(), std::process::id());
        let work = |ticks: u32| {
            let stat = format!("{pid} (qemu) R {}{ticks} 0 4000", "1 ".repeat(10));
            host.write(&format!("proc/{pid}/stat"), stat);
        };
        for (works, given_up_at) in [(0, 1), (3, 4), (u32::MAX, RENEWALS + 1)] {
            work(0);
            let (own, _other) = UnixStream::pair().unwrap();
            let vmm = ServedVmm::child(Connection::resumed(own), pid).unwrap();
            let mut now = Instant::now();
            let mut candidate = Candidate::new(vmm, &host.root(), now);
            let looks = (1..=RENEWALS + 2).find(|look| {
                work((*look).min(works));
                now += THREADS_WITHIN + LOOK_EVERY;
                candidate.is_given_up(&host.root(), now)
            });
            assert_eq!(looks, Some(given_up_at));
        }
    }

    #[test]
    fn threads_are_those_that_two_looks_find() {
        let host = FakeHost::empty();
        let (mut named, mut now) = (NamedThreads::default(), Instant::now());
        let mut look_after = |passed| {
            now += passed;
            named.look(&host.root(), (7, 2), now)
        };
        let too_soon = LOOK_EVERY / 2;
        assert_eq!([look_after(LOOK_EVERY), look_after(too_soon)], [None, None]);
        let mut look = || look_after(LOOK_EVERY);
        assert_eq!(look(), Some(vec![None; 2]));
        for vcpu in [0u32, 1, 2] {
            let begun = format!("proc/7/task/{}/comm", 8 + vcpu);
            host.write(&begun, format!("CPU {vcpu}/KVM\n"));
            assert_eq!(look(), None);
        }
        host.write("proc/7/task/11/comm", "IO iothread3\n");
        assert_eq!(look(), Some([8, 9, 10].map(Tid::new).into()));
    }
}
