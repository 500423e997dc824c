// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads of a VM's vCPUs while it is served. They live as long as the VM; the kernel may give
//! the number of one that has ended to another thread, which must not be clamped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vcpufreq_device::host::{self, BorrowedThread, HostRoot, Tid};

use super::Served;
use crate::sys;

/// These threads as they were.
pub struct FoundThreads {
    host: HostRoot,
    borrowed: Vec<BorrowedThread>,
    /// The pCPUs that each is pinned to; empty: any.
    pins: Vec<(Tid, Vec<u32>)>,
    /// Of each thread one that is readable when it has ended; none before Linux 6.9.
    ends: Vec<OwnedFd>,
}

impl FoundThreads {
    /// Those of process `pid`, in the order of its vCPUs.
    ///
    /// # Errors
    /// When one has ended.
    pub fn look(served: &Served, pid: u32, threads: &[Tid]) -> anyhow::Result<Self> {
        let pins = served.vcpus.iter().map(|vcpu| vcpu.pin.clone());
        let pinned = pins.clone().map(|pcpus| !pcpus.is_empty());
        let borrowed = threads.iter().zip(pinned).map(|(tid, pinned)| {
            BorrowedThread::look(&served.host, pid, *tid, pinned)
                .with_context(|| format!("its thread {tid} can't be looked at"))
        });
        let borrowed = borrowed.collect::<anyhow::Result<_>>()?;
        let ends = threads.iter().map(|tid| sys::pidfd_of_thread(*tid));
        let threads = Self {
            host: served.host.clone(),
            borrowed,
            pins: threads.iter().copied().zip(pins).collect(),
            ends: ends.collect::<Result<_, _>>().unwrap_or_default(),
        };
        // The files are of the threads that were looked at.
        if threads.are_others() {
            bail!("one of its vCPUs' threads has ended");
        }
        Ok(threads)
    }

    /// As they were.
    pub fn borrowed(&self) -> &[BorrowedThread] {
        &self.borrowed
    }

    /// Files of which one is readable when a thread has ended.
    pub fn ends(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.ends.iter().map(AsFd::as_fd)
    }

    /// Pins those again that run elsewhere, as after their pCPUs were offline.
    pub fn pin_again(&self) {
        for (tid, pcpus) in self.pins.iter().filter(|(_, pcpus)| !pcpus.is_empty()) {
            if host::is_within(*tid, pcpus).is_ok_and(|within| !within) {
                // Fails while all of them are offline; the bridge reports that.
                let _ = host::pin(*tid, pcpus);
            }
        }
    }

    /// Whether one has ended.
    pub fn have_ended(&self) -> bool {
        if self.ends.is_empty() {
            return self.are_others();
        }
        let ends = self.ends().map(|file| PollFd::new(file, PollFlags::POLLIN));
        let mut ends: Vec<_> = ends.collect();
        poll(&mut ends, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    fn are_others(&self) -> bool {
        let mut threads = self.borrowed.iter();
        !threads.all(|thread| thread.lives(&self.host))
    }
}
