// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One virtual machine that is served: from the VMM's connection to its end.

use std::{
    cell::Cell,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use vcpufreq_device::VcpuId;
use vcpufreq_host::{CpuList, Tid};

use super::{
    Served, ServedVmm, SharedWithVmm,
    groups::SeenGroups,
    hand_over::{HandOver, RING_EVERY},
    other_threads::OtherThreads,
    starting::Starting,
    takeover,
    threads::FoundThreads,
    vm_process::{Order, VmProcess},
};
use crate::{
    lifecycle::{guardian::Guardian, host_changes::HostChanges},
    message::{chain, warn},
    patience::{patience, patiently},
};

/// How often a VM is looked at for what no file tells.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a process whose threads have ended may take to end, in ms.
pub const ENDING: u16 = 100;
/// How long a VMM may take to give its memory back to the kernel. Meanwhile its cgroups can't be
/// removed.
const FREES_WITHIN: Duration = patience(120);

/// A virtual machine with the process of its bridge.
pub struct ServedVm {
    vmm: ServedVmm,
    shared: SharedWithVmm,
    hand_over: HandOver,
    /// When it's looked at again for more than silent vCPUs.
    next_look: Instant,
    process: VmProcess,
    is_paused: bool,
    changes: HostChanges,
    groups: Option<SeenGroups>,
    /// Why its vCPUs have no cgroups, until that is reported.
    no_groups: Cell<Option<String>>,
    threads: FoundThreads,
    /// Those that run no vCPU.
    others: OtherThreads,
    /// Its guardian has ended, and another one could not be started.
    is_unguarded: bool,
}

/// What has become of a machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum VmChange {
    /// It is as it was.
    Same,
    /// Its manager has moved its vCPUs: other cgroups are to be clamped.
    Moved,
    /// A vCPU has ended, or all of it.
    Ended,
    /// A vCPU was plugged in again.
    Plugged,
}

/// A VMM whose bridge has ended.
pub struct LeftVmm {
    /// The VMM.
    pub vmm: ServedVmm,
    /// The threads of its vCPUs, as far as they live.
    pub threads: Vec<Option<Tid>>,
    lives: bool,
    some_ended: bool,
}

impl LeftVmm {
    /// Whether it goes on with other vCPUs, if this has ended its bridge.
    pub fn goes_on(&self, why: VmChange) -> bool {
        self.lives && (self.some_ended || why == VmChange::Plugged)
    }
}

impl ServedVm {
    /// Makes the bridge of `vmm`, whose vCPUs have these threads (none of one that was unplugged), and
    /// lets it go on.
    ///
    /// # Errors
    /// What the host refused, or the VMM lacks; nothing is left then.
    pub fn start(served: &Served, vmm: ServedVmm, threads: &[Option<Tid>]) -> anyhow::Result<Self> {
        let shared = match &vmm.inherited {
            Some(shared) => shared.clone(),
            None => SharedWithVmm::new(served.count()?)?,
        };
        let starting = Starting {
            served,
            vmm: &vmm,
            shared: &shared,
        };
        match starting.all(threads) {
            Ok(parts) => Ok(Self {
                vmm,
                hand_over: HandOver::new(&shared),
                shared,
                next_look: Instant::now() + LOOK_EVERY,
                process: parts.process,
                is_paused: false,
                changes: parts.changes,
                groups: parts.groups,
                no_groups: parts.no_groups,
                threads: parts.threads,
                others: parts.others,
                is_unguarded: false,
            }),
            Err(error) => {
                shared.memory.say_gone();
                // A VMM that was taken over may be another server's, unless it has ended. One that
                // is ending has memory to free when its vCPUs' threads are gone.
                let is_ending = || starting.that_live(threads).iter().all(Option::is_none);
                if vmm.inherited.is_none()
                    || vmm.is_new_in_ram()
                    || vmm.gone_within(0)
                    || is_ending()
                {
                    takeover::forget(&vmm);
                }
                Err(error)
            }
        }
    }

    /// Files of which one is readable when the VMM or a vCPU has ended.
    pub fn ends(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.vmm.ends().chain(self.threads.ends())
    }

    /// A file that is readable when no process answers the doorbells any more.
    pub fn lost(&self) -> BorrowedFd<'_> {
        self.process.lost()
    }

    /// A file that is readable when the guardian has ended, until [`Self::guard_again`].
    pub fn guardian_ended(&self) -> Option<BorrowedFd<'_>> {
        self.guardian().map(Guardian::ended)
    }

    fn guardian(&self) -> Option<&Guardian> {
        self.changes.guardian().filter(|_| !self.is_unguarded)
    }

    /// Starts another guardian in the place of one that has ended, with a line.
    pub fn guard_again(&mut self) {
        let pid = self.pid();
        let again = self.changes.guard_again();
        self.is_unguarded = again.is_err();
        warn(&match again {
            Ok(()) => format!("process {pid}: its guardian has ended; another is on guard"),
            Err(error) => format!(
                "process {pid}: its guardian has ended ({}); if this program is killed, run vcpufreq \
                 cleanup",
                chain(&error)
            ),
        });
    }

    /// The VMM's process.
    pub fn pid(&self) -> u32 {
        self.vmm.pid()
    }

    /// QEMU's control socket, if the server has one.
    pub fn control(&self) -> Option<BorrowedFd<'_>> {
        self.vmm.control.as_ref().map(AsFd::as_fd)
    }

    /// Hears QEMU at its control socket: a guest that is paused has no request until it goes on, and
    /// one that was reset has none. A connection that is lost is a warning.
    pub fn hear(&mut self) {
        let Some(qmp) = &mut self.vmm.control else {
            return;
        };
        let (is_reset, is_paused) = match qmp.hear() {
            Ok(is_reset) => (is_reset, qmp.is_paused()),
            Err(error) => {
                let is_ending = qmp.is_ending();
                self.vmm.control = None;
                // It is lost when QEMU ends, too.
                if !is_ending && !self.vmm.gone_within(ENDING) {
                    let (pid, why) = (self.pid(), chain(&error));
                    warn(&format!(
                        "process {pid}: its control socket is lost, and with it pauses and resets: {why}"
                    ));
                }
                (false, false)
            }
        };
        // The driver of the new boot comes later than this.
        if is_reset {
            self.process.send(Order::StartAnew);
        }
        if is_paused != self.is_paused {
            self.is_paused = is_paused;
            self.process.send(match is_paused {
                true => Order::Withdraw,
                false => Order::CarryOut,
            });
        }
    }

    /// When to [`Self::look`] again, if nothing else happens.
    pub fn look_within(&self) -> Duration {
        match self.hand_over.has_silent() {
            true => RING_EVERY,
            false => self.next_look.saturating_duration_since(Instant::now()),
        }
    }

    /// Looks for what no file tells, if it is time.
    pub fn look(&mut self, served: &Served) -> VmChange {
        self.hand_over.ring(&self.shared);
        let now = Instant::now();
        if now < self.next_look {
            return VmChange::Same;
        }
        self.next_look = now + LOOK_EVERY;
        let lacks = self.hand_over.look(&served.host, &self.vmm, &self.shared);
        lacks.iter().for_each(|line| warn(line));
        let groups = self.groups.as_ref();
        if self.threads.have_ended() {
            VmChange::Ended
        } else if self.threads.have_come() {
            VmChange::Plugged
        } else if groups.is_some_and(|groups| groups.have_changed(&served.host)) {
            VmChange::Moved
        } else {
            self.warn_of_no_groups();
            self.threads.pin_again();
            self.others.keep_off();
            self.threads
                .other_policy()
                .iter()
                .for_each(|line| warn(line));
            VmChange::Same
        }
    }

    /// Once its guest has requested something: a manager that makes groups makes them before the
    /// guest starts.
    fn warn_of_no_groups(&self) {
        let memory = &self.shared.memory;
        let mut vcpus = (0..memory.vcpus()).map(VcpuId);
        if vcpus.any(|vcpu| memory.requested(vcpu) > 0) {
            self.no_groups.take().iter().for_each(|why| warn(why));
        }
    }

    /// Ends the bridge and puts back what it changed, also of a VMM that goes on: that can be taken
    /// over, or served again. The error is a cgroup, clamp or pin that can't be put back, which stays
    /// in the record.
    pub fn end(mut self) -> (LeftVmm, anyhow::Result<()>) {
        if self.guardian().is_some_and(Guardian::has_ended) {
            self.guard_again();
        }
        let counts = self.process.end();
        self.shared.memory.say_gone();
        let undone = self.changes.undo().or_else(|error| {
            // The cgroups of a VMM that is ending stay until the kernel has freed its memory.
            match self.threads.have_ended() && frees_its_memory(&self.vmm) {
                true => self.changes.undo(),
                false => Err(error),
            }
        });
        self.changes.end();
        let some_ended = self.threads.have_ended();
        let gone = self.vmm.gone_within(if some_ended { ENDING } else { 0 });
        let vcpus = self.threads.now();
        let all_ended = vcpus.threads.iter().all(Option::is_none);
        if gone || all_ended {
            takeover::forget(&self.vmm);
        }
        let list = |vcpus: &[u32]| vcpus.iter().copied().collect::<CpuList>();
        let what = match (&*vcpus.ended, &*vcpus.come) {
            _ if gone => "has ended".to_owned(),
            ([], []) => "goes on".to_owned(),
            ([], come) => format!("has vCPU {} again", list(come)),
            (ended, []) => format!("has ended vCPU {}", list(ended)),
            (ended, come) => format!("has ended vCPU {}, has {} again", list(ended), list(come)),
        };
        let pid = self.vmm.pid();
        match counts {
            Ok(counts) => warn(&format!("process {pid} {what}: {counts}")),
            Err(error) => warn(&format!("process {pid} {what}, and {}", chain(&error))),
        }
        let left = LeftVmm {
            vmm: self.vmm.inheriting(self.shared),
            lives: !gone && !all_ended,
            some_ended,
            threads: vcpus.threads,
        };
        (left, undone)
    }
}

/// Waits for the end of a VMM that is ending; whether it has ended. A signal ends the wait.
fn frees_its_memory(vmm: &ServedVmm) -> bool {
    let what = format!(
        "for process {} to end, which has its cgroups in use",
        vmm.pid()
    );
    let ended = patiently(FREES_WITHIN, &what, |part| {
        let is = part.is_ready(&[vmm.process()], Duration::MAX)?;
        Ok(is.then_some(()))
    });
    ended.is_ok_and(|ended| ended.is_some())
}
