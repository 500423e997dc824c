// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM that is served: its process, its connection, and what it shares with the server.

use std::{
    cell::Cell,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vcpufreq_bridge::shm::{SharedMemory, hand_over, refuse};
use vcpufreq_device::{Headroom, VcpuId};
use vcpufreq_host::{HostRoot, stat_field};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Served, qmp::Qmp};
use crate::{config::resolve, sys};

/// A VMM that has connected, or was taken over.
pub struct ServedVmm {
    process: OwnedFd,
    pid: u32,
    /// Closed by the VMM when it ends; a VMM that was taken over may have lost it.
    pub stream: Option<Connection>,
    /// Its server's socket, by which the next server finds it.
    pub socket: Option<PathBuf>,
    /// What it has of the server before this one.
    pub inherited: Option<SharedWithVmm>,
    /// Whether a server before this one has served it.
    was_served: bool,
    /// Its control socket, by which its threads were found.
    pub control: Option<Qmp>,
}

/// What a VMM and its server both have.
#[derive(Clone)]
pub struct SharedWithVmm {
    /// Memory of the guest's registers.
    pub memory: Arc<SharedMemory>,
    /// A doorbell for each vCPU.
    pub bells: Arc<[EventFd]>,
}

impl SharedWithVmm {
    /// New ones.
    pub fn new(vcpus: u16) -> anyhow::Result<Self> {
        let memory = Arc::new(SharedMemory::new(vcpus).context("can't make shared memory")?);
        let bells = (0..vcpus).map(|_| EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC));
        let bells: Result<Vec<_>, _> = bells.collect();
        let bells = bells.context("can't make an eventfd for each vCPU")?.into();
        Ok(Self { memory, bells })
    }

    /// Pages in the guest's RAM, which has no doorbells.
    pub fn in_guest_ram(memory: SharedMemory) -> Self {
        Self {
            memory: Arc::new(memory),
            bells: [].into(),
        }
    }

    /// Writes the guest's description of its vCPUs.
    ///
    /// # Errors
    /// What of their options no device can have.
    pub fn describe(&self, served: &Served) -> anyhow::Result<()> {
        let mode = served.options.bridge.clamp;
        let config = resolve::device_config(&served.vcpus, mode, Headroom::None)?;
        let specs = config.vcpus.iter().zip(config.guest_capacities());
        for (vcpu, (spec, capacity)) in (0..).map(VcpuId).zip(specs) {
            let opps = &served.vcpus[vcpu.index()].opps;
            let microwatts: Vec<_> = opps.iter().map(|opp| opp.uw.unwrap_or(0)).collect();
            self.memory.describe(vcpu, spec, capacity, &microwatts);
        }
        Ok(())
    }
}

/// A VMM's connection. Dropping it refuses the VMM, if that was not given its memory.
pub struct Connection {
    stream: UnixStream,
    given: Cell<bool>,
}

impl Connection {
    /// One on which nothing was sent.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            given: Cell::new(false),
        }
    }

    /// One on which a server before this one gave the memory.
    pub fn resumed(stream: UnixStream) -> Self {
        Self {
            stream,
            given: Cell::new(true),
        }
    }

    /// Gives the VMM its memory and doorbells, which it has to take within so long.
    ///
    /// # Errors
    /// As [`hand_over`].
    pub fn give(&self, shared: &SharedWithVmm, within: Duration) -> io::Result<()> {
        self.given.set(true);
        hand_over(&self.stream, &shared.memory, &shared.bells, within)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.given.get() {
            refuse(&self.stream);
        }
    }
}

impl ServedVmm {
    /// The one at the other end of `stream`, which named process `pid`.
    ///
    /// # Errors
    /// When that process has ended.
    pub fn connected(stream: Connection, pid: u32, socket: PathBuf) -> anyhow::Result<Self> {
        // Before Linux 6.5 the number may have become another process' since.
        let process = match sys::peer_pidfd(stream.as_fd()) {
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => sys::pidfd_open(pid),
            process => process,
        };
        Ok(Self {
            process: process.with_context(|| format!("process {pid} has ended"))?,
            pid,
            stream: Some(stream),
            socket: Some(socket),
            inherited: None,
            was_served: false,
            control: None,
        })
    }

    /// A child of this process, at the other end of `stream`.
    ///
    /// # Errors
    /// As pidfd_open(2): `EMFILE` or `ENFILE` (no more open files), `ENOSYS` before Linux 5.3. The
    /// child goes on.
    pub fn child(stream: Connection, pid: u32) -> anyhow::Result<Self> {
        Ok(Self {
            process: sys::pidfd_open(pid).context("it can't be watched")?,
            pid,
            stream: Some(stream),
            socket: None,
            inherited: None,
            was_served: false,
            control: None,
        })
    }

    /// The one of this number, which `process` watches, and whose guest has `shared` in its RAM. If it
    /// `was_served`, a server before this one did that.
    pub fn with_ram(
        shared: SharedWithVmm,
        (pid, process): (u32, OwnedFd),
        was_served: bool,
    ) -> Self {
        Self {
            process,
            pid,
            stream: None,
            socket: None,
            inherited: Some(shared),
            was_served,
            control: None,
        }
    }

    /// Whether its guest has its registers in its RAM, and no server before this one has served it.
    pub fn is_new_in_ram(&self) -> bool {
        let memory = self.inherited.as_ref().map(|shared| &shared.memory);
        !self.was_served && memory.is_some_and(|memory| memory.offset_in_ram().is_some())
    }

    /// Whether a server before this one has served it.
    pub fn was_served(&self) -> bool {
        self.was_served
    }

    /// One that a server before the one at `socket` has served.
    pub fn taken_over(process: OwnedFd, pid: u32, socket: PathBuf, shared: SharedWithVmm) -> Self {
        Self {
            process,
            pid,
            stream: None,
            socket: Some(socket),
            inherited: Some(shared),
            was_served: true,
            control: None,
        }
    }

    /// The same, which has what the server until now shares with it.
    pub fn inheriting(self, shared: SharedWithVmm) -> Self {
        Self {
            inherited: Some(shared),
            ..self
        }
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its CPU time, in ticks (proc(5), utime and stime): one that works has more at the next look.
    pub fn worked(&self, host: &HostRoot) -> u64 {
        let stat = fs::read_to_string(host.path(format!("proc/{}/stat", self.pid)));
        let stat = stat.unwrap_or_default();
        let ticks = [14, 15].into_iter();
        let ticks = ticks.filter_map(|number| stat_field(&stat, number)?.parse::<u64>().ok());
        ticks.sum()
    }

    /// Files of which one is readable when it has ended, or has dropped the connection.
    pub fn ends(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let stream = self.stream.iter().map(AsFd::as_fd);
        stream.chain([self.process.as_fd()])
    }

    /// Whether it has, within so many milliseconds.
    pub fn gone_within(&self, milliseconds: u16) -> bool {
        let ends = self.ends().map(|file| PollFd::new(file, PollFlags::POLLIN));
        let mut ends: Vec<_> = ends.collect();
        poll(&mut ends, PollTimeout::from(milliseconds)).is_ok_and(|ready| ready > 0)
    }

    /// A file that is readable when no thread of it is left.
    pub fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Fails if it has ended.
    ///
    /// # Errors
    /// When it has ended or has dropped the connection.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.gone_within(0) {
            bail!("it has ended");
        }
        Ok(())
    }
}
