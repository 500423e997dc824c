// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads of a VM's vCPUs while it is served. They live as long as the VM, or until the vCPU is
//! unplugged; the kernel may give the number of one that has ended to another thread, which must not
//! be clamped.

use std::{
    cell::Cell,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vcpufreq_bridge::shm::vcpu_threads;
use vcpufreq_device::VcpuId;
use vcpufreq_host::{HostRoot, HostThread, SavedThread, SchedAttr, Tid};

use super::Served;
use crate::{options::rt_values::RtPolicy, rt_guest::adopted::changed_since, sys};

/// These threads as they were.
pub struct FoundThreads {
    host: HostRoot,
    pid: u32,
    threads: Vec<HostThread>,
    borrowed: Vec<SavedThread>,
    /// The pCPUs that each is pinned to; empty: any.
    pins: Vec<(Tid, Vec<u32>)>,
    /// How each is scheduled; empty: as it was, of a VM without real-time vCPUs.
    policies: Vec<(VcpuId, Option<RtPolicy>)>,
    /// A line has told that one is scheduled otherwise.
    has_told: Cell<bool>,
    /// By vCPU; none of one that was unplugged.
    of_vcpus: Vec<Option<Tid>>,
    /// Of each thread one that is readable when it has ended; none before Linux 6.9.
    ends: Vec<OwnedFd>,
}

/// What has become of a VM's vCPUs.
#[derive(Default)]
pub struct VcpusNow {
    /// The threads of all of them, but none of those that have ended.
    pub threads: Vec<Option<Tid>>,
    /// Those whose threads have ended.
    pub ended: Vec<u32>,
    /// Those that were unplugged and have a thread again.
    pub come: Vec<u32>,
}

impl FoundThreads {
    /// Those of process `pid`, in the order of its vCPUs: of one that was unplugged, none.
    ///
    /// # Errors
    /// When one has ended.
    pub fn look(served: &Served, pid: u32, threads: &[Option<Tid>]) -> anyhow::Result<Self> {
        let found = threads.iter().zip(&served.vcpus);
        let found = found.filter_map(|(tid, vcpu)| Some(((*tid)?, vcpu)));
        let looks = found.clone().map(|(tid, vcpu)| {
            let thread = HostThread::of_process(&served.host, pid, tid);
            let look = |thread| {
                let is_pinned = !vcpu.pin.is_empty();
                let borrowed = SavedThread::look(&served.host, pid, tid, is_pinned)?;
                let borrowed = match vcpu.rt {
                    Some(_) => borrowed.rescheduled()?,
                    None => borrowed,
                };
                Ok((thread, borrowed))
            };
            thread
                .and_then(look)
                .with_context(|| format!("its thread {tid} can't be looked at"))
        });
        let looks: Vec<_> = looks.collect::<anyhow::Result<_>>()?;
        let (handles, borrowed) = looks.into_iter().unzip();
        let pins: Vec<_> = found.map(|(tid, vcpu)| (tid, vcpu.pin.clone())).collect();
        let ends = pins.iter().map(|(tid, _)| sys::pidfd_of_thread(*tid));
        let found = Self {
            host: served.host.clone(),
            pid,
            threads: handles,
            borrowed,
            policies: policies_of(served, threads),
            has_told: Cell::new(false),
            ends: ends.collect::<Result<_, _>>().unwrap_or_default(),
            pins,
            of_vcpus: threads.to_vec(),
        };
        // The files are of the threads that were looked at.
        if found.are_others() {
            bail!("one of its vCPUs' threads has ended");
        }
        Ok(found)
    }

    /// As they were.
    pub fn borrowed(&self) -> &[SavedThread] {
        &self.borrowed
    }

    /// Files of which one is readable when a thread has ended.
    pub fn ends(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.ends.iter().map(AsFd::as_fd)
    }

    /// Pins those again that run elsewhere, as after their pCPUs were offline.
    pub fn pin_again(&self) {
        let pinned = self.threads.iter().zip(&self.pins);
        for (thread, (_, pcpus)) in pinned.filter(|(_, (_, pcpus))| !pcpus.is_empty()) {
            let is_within = thread
                .tid()
                .and_then(|tid| vcpufreq_host::is_within(tid, pcpus));
            if is_within.is_ok_and(|within| !within) {
                // Fails while all of them are offline; the bridge reports that.
                let _ = thread.tid().and_then(|tid| vcpufreq_host::pin(tid, pcpus));
            }
        }
    }

    /// That one is scheduled otherwise than it was by the server, once.
    pub fn other_policy(&self) -> Option<String> {
        if self.has_told.get() {
            return None;
        }
        let threads = self.threads.iter().zip(&self.policies);
        let mut lines = threads.filter_map(|(thread, (vcpu, wanted))| {
            // One that has ended is noticed by itself.
            let now = thread.tid().and_then(SchedAttr::read).ok()?;
            changed_since(*vcpu, &now, *wanted)
        });
        let line = lines.next()?;
        self.has_told.set(true);
        Some(format!("process {}: {line}", self.pid))
    }

    /// Whether one has ended.
    pub fn have_ended(&self) -> bool {
        self.ended().next().is_some()
    }

    /// Whether a vCPU that was unplugged has a thread again, by its name.
    pub fn have_come(&self) -> bool {
        self.of_vcpus.contains(&None)
            && self
                .found()
                .any(|(tid, found)| tid.is_none() && found.is_some())
    }

    /// What has become of the vCPUs.
    pub fn now(&self) -> VcpusNow {
        let ended: Vec<_> = self.ended().collect();
        let mut now = VcpusNow::default();
        for (vcpu, (tid, found)) in (0..).zip(self.found()) {
            let left = tid.filter(|tid| !ended.contains(tid));
            match tid {
                Some(_) if left.is_none() => now.ended.push(vcpu),
                None if found.is_some() => now.come.push(vcpu),
                _ => {}
            }
            now.threads.push(tid.map_or(found, |_| left));
        }
        now
    }

    /// Of each vCPU the thread that it had, and the one that has its name now.
    fn found(&self) -> impl Iterator<Item = (Option<Tid>, Option<Tid>)> {
        let count = self.of_vcpus.len().try_into().unwrap_or(u16::MAX);
        let found = vcpu_threads(&self.host, self.pid, count);
        self.of_vcpus.iter().copied().zip(found)
    }

    fn ended(&self) -> impl Iterator<Item = Tid> {
        let ends = self.ends().map(|file| PollFd::new(file, PollFlags::POLLIN));
        let mut ends: Vec<_> = ends.collect();
        // If it fails, none is readable; the next look is in a second.
        let _ = poll(&mut ends, PollTimeout::ZERO);
        let threads = self.borrowed.iter().zip(&self.pins).enumerate();
        let ended = threads.filter(move |(index, (thread, _))| match ends.get(*index) {
            Some(end) => end.any() == Some(true),
            None => !thread.lives(&self.host),
        });
        ended.map(|(_, (_, (tid, _)))| *tid)
    }

    fn are_others(&self) -> bool {
        let mut threads = self.borrowed.iter();
        !threads.all(|thread| thread.lives(&self.host))
    }
}

/// How those of these threads that are there are scheduled, if the VM has real-time vCPUs.
fn policies_of(served: &Served, threads: &[Option<Tid>]) -> Vec<(VcpuId, Option<RtPolicy>)> {
    let vcpus = (0..).map(VcpuId).zip(&served.vcpus).zip(threads);
    let there = vcpus.filter(|(_, tid)| tid.is_some() && served.rt().is_real_time());
    there.map(|((vcpu, config), _)| (vcpu, config.rt)).collect()
}

#[cfg(test)]
mod tests {
    //! Promise: what a manager makes of a vCPU's thread later is one line.
    use super::*;

    // A <vcpusched> that came after the server's check was no contradiction.
    #[test]
    fn another_policy_is_told_once() {
        let (host, pid, tid) = (HostRoot::default(), std::process::id(), Tid::current());
        let of = |policies| FoundThreads {
            host: host.clone(),
            pid,
            threads: vec![HostThread::of_process(&host, pid, tid).unwrap()],
            borrowed: Vec::new(),
            pins: Vec::new(),
            policies,
            has_told: Cell::new(false),
            of_vcpus: vec![Some(tid)],
            ends: Vec::new(),
        };
        let found = of(vec![(VcpuId(1), Some(RtPolicy::Fifo(1)))]);
        let line = found.other_policy().unwrap();
        let said = format!("process {pid}: vCPU 1 has become not real-time while it is served");
        assert!(line.starts_with(&said), "{line}");
        assert_eq!(found.other_policy(), None);
        assert_eq!(of(vec![(VcpuId(1), None)]).other_policy(), None);
        assert_eq!(of(Vec::new()).other_policy(), None);
    }
}
