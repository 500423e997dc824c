// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One virtual machine that is served: from the VMM's connection to its end.

use std::{
    cell::Cell,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use vcpufreq_device::{
    Headroom, VcpuId,
    host::{
        ActuatorChoice, ActuatorKind, Chosen, CpuList, HostActuator, HostRoot, KernelTree, Tid,
    },
};

use super::{
    EndSignals, Served, ServedVmm, SharedWithVmm,
    bridge::BridgePlan,
    groups::{SeenGroups, choose},
    hand_over::{HandOver, RING_EVERY},
    takeover,
    threads::FoundThreads,
    vm_process::{Order, VmProcess},
};
use crate::{
    config::resolve,
    lifecycle::{
        host_changes::{HostChanges, put_back_of_dead},
        record::{VmmRecord, owner_of},
        state::StateDir,
    },
    message::{chain, warn},
    patience::patience,
};

/// How long a VMM may take to take what it is sent.
const TAKEN_WITHIN: Duration = patience(5);
/// How often a VM is looked at for what no file tells.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a process whose threads have ended may take to end, in ms.
const ENDING: u16 = 100;
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
    /// Its guardian has ended, and another one could not be started.
    is_unguarded: bool,
}

/// What has become of a machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
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
    pub fn goes_on(&self, why: Fate) -> bool {
        self.lives && (self.some_ended || why == Fate::Plugged)
    }
}

/// Gives `vmm` its memory before its vCPUs' threads are known. From then on it is as one that is
/// taken over.
///
/// # Errors
/// As [`ServedVm::start`].
pub fn give_memory(served: &Served, vmm: ServedVmm) -> anyhow::Result<ServedVmm> {
    let shared = SharedWithVmm::new(served.count()?)?;
    let starting = Starting {
        served,
        vmm: &vmm,
        shared: &shared,
    };
    let given = starting.describe().and_then(|()| starting.hand_over());
    if let Err(error) = given {
        takeover::forget(&vmm);
        return Err(error);
    }
    Ok(vmm.inheriting(shared))
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
        let started = Starting {
            served,
            vmm: &vmm,
            shared: &shared,
        };
        match started.all(threads) {
            Ok(parts) => Ok(Self {
                vmm,
                shared,
                hand_over: HandOver::new(),
                next_look: Instant::now() + LOOK_EVERY,
                process: parts.process,
                is_paused: false,
                changes: parts.changes,
                groups: parts.groups,
                no_groups: parts.no_groups,
                threads: parts.threads,
                is_unguarded: false,
            }),
            Err(error) => {
                shared.memory.say_gone();
                // A VMM that was taken over may be another server's, unless it has ended.
                if vmm.inherited.is_none() || vmm.gone_within(0) {
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
        (!self.is_unguarded).then(|| self.changes.guardian().ended())
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
    pub fn look(&mut self, served: &Served) -> Fate {
        self.hand_over.ring(&self.shared);
        let now = Instant::now();
        if now < self.next_look {
            return Fate::Same;
        }
        self.next_look = now + LOOK_EVERY;
        let lacks = self.hand_over.look(&served.host, &self.vmm, &self.shared);
        lacks.iter().for_each(|line| warn(line));
        let groups = self.groups.as_ref();
        if self.threads.have_ended() {
            Fate::Ended
        } else if self.threads.have_come() {
            Fate::Plugged
        } else if groups.is_some_and(|groups| groups.have_changed(&served.host)) {
            Fate::Moved
        } else {
            self.warn_of_no_groups();
            self.threads.pin_again();
            Fate::Same
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
    pub fn end(mut self, signals: &EndSignals) -> (LeftVmm, anyhow::Result<()>) {
        if self.guardian_ended().is_some() && self.changes.guardian().has_ended() {
            self.guard_again();
        }
        let counts = self.process.end();
        self.shared.memory.say_gone();
        let undone = self.changes.undo().or_else(|error| {
            // The cgroups of a VMM that is ending stay until the kernel has freed its memory.
            match self.threads.have_ended() && frees_its_memory(&self.vmm, signals) {
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
fn frees_its_memory(vmm: &ServedVmm, signals: &EndSignals) -> bool {
    let (pid, most) = (vmm.pid(), FREES_WITHIN.as_secs());
    warn(&format!(
        "waits for process {pid} to end, at most {most} s: its cgroups are in use until then"
    ));
    signals.is_ready(vmm.process(), FREES_WITHIN)
}

/// A machine while it is made.
struct Starting<'a> {
    served: &'a Served,
    vmm: &'a ServedVmm,
    shared: &'a SharedWithVmm,
}

/// What a machine is made of.
struct ServedParts {
    process: VmProcess,
    changes: HostChanges,
    groups: Option<SeenGroups>,
    no_groups: Cell<Option<String>>,
    threads: FoundThreads,
}

impl Starting<'_> {
    fn all(&self, threads: &[Option<Tid>]) -> anyhow::Result<ServedParts> {
        let taken_over = self.vmm.inherited.is_some();
        if taken_over {
            // Before its threads are looked at: what the server before this one set isn't theirs.
            put_back_of_dead(&StateDir::of_user()?, &HostRoot::default(), warn)?;
            // From now on the VM is this server's.
            takeover::keep(self.vmm, self.shared)?;
        }
        self.describe()?;
        let mut threads = threads.to_vec();
        loop {
            let made = self.with(&threads, taken_over);
            let left = self.that_live(&threads);
            // A vCPU that ends meanwhile is one that is unplugged.
            if made.is_ok() || left == threads || left.iter().all(Option::is_none) {
                return made;
            }
            threads = left;
        }
    }

    /// Those of these threads that have not ended.
    fn that_live(&self, threads: &[Option<Tid>]) -> Vec<Option<Tid>> {
        let lives = |tid: &Tid| {
            let task = format!("proc/{}/task/{tid}", self.vmm.pid());
            self.served.host.path(task).exists()
        };
        threads.iter().map(|tid| tid.filter(lives)).collect()
    }

    fn with(&self, threads: &[Option<Tid>], taken_over: bool) -> anyhow::Result<ServedParts> {
        let (served, pid) = (self.served, self.vmm.pid());
        let borrowed = FoundThreads::look(served, pid, threads)?;
        // Else the number may be another process's, and so the threads.
        self.vmm.check()?;
        let groups = SeenGroups::look(&served.host, pid, threads);
        let chosen = choose(served, pid, threads)?;
        let changes = HostChanges::begin(self.record(&chosen, &borrowed)?, warn)?;
        let begun = self.begin(&chosen, threads, &borrowed);
        let made = begun.and_then(|process| {
            if !taken_over {
                self.hand_over()?;
            }
            Ok(process)
        });
        match made {
            Ok(process) => {
                let by_default = served.actuator == ActuatorChoice::Auto;
                let no_groups = by_default && chosen.kind == ActuatorKind::Thread;
                Ok(ServedParts {
                    process,
                    changes,
                    groups: groups.clamped_by(&chosen.kind).filter(|_| by_default),
                    no_groups: Cell::new(no_groups.then(|| chosen.reason.clone())),
                    threads: borrowed,
                })
            }
            Err(error) => {
                // The first failure is the one to tell.
                drop(changes.undo());
                changes.end();
                Err(error)
            }
        }
    }

    /// Writes the guest's description of its vCPUs.
    fn describe(&self) -> anyhow::Result<()> {
        let served = self.served;
        let config =
            resolve::device_config(&served.vcpus, served.options.bridge.clamp, Headroom::None)?;
        let specs = config.vcpus.iter().zip(config.guest_capacities());
        for (vcpu, (spec, capacity)) in (0..).map(VcpuId).zip(specs) {
            let opps = &served.vcpus[vcpu.index()].opps;
            let microwatts: Vec<_> = opps.iter().map(|opp| opp.uw.unwrap_or(0)).collect();
            let memory = &self.shared.memory;
            memory.describe(vcpu, &spec.table, capacity, &microwatts);
        }
        Ok(())
    }

    fn record(&self, chosen: &Chosen, threads: &FoundThreads) -> anyhow::Result<VmmRecord> {
        let served = self.served;
        let groups = match &chosen.kind {
            ActuatorKind::Cgroup(place) => Some(place.record(std::process::id())),
            _ => None,
        };
        let pinned = served.vcpus.iter().flat_map(|vcpu| vcpu.pin.clone());
        Ok(VmmRecord {
            groups,
            pinned: pinned.collect(),
            threads: threads.borrowed().to_vec(),
            adopted: match &chosen.kind {
                ActuatorKind::Adopted(groups) => Some(groups.clone()),
                _ => None,
            },
            ..VmmRecord::new(owner_of(&served.host, std::process::id())?)
        })
    }

    /// Starts the process of the bridge, which is in force then.
    fn begin(
        &self,
        chosen: &Chosen,
        threads: &[Option<Tid>],
        borrowed: &FoundThreads,
    ) -> anyhow::Result<VmProcess> {
        let served = self.served;
        let clamps_threads = chosen.kind == ActuatorKind::Thread;
        if clamps_threads && served.options.bridge.multi_tenant {
            bail!(
                "--multi-tenant takes a cgroup for each vCPU: its process would keep the right to \
                 schedule any thread"
            );
        }
        let domains: Vec<_> = served.vcpus.iter().map(|vcpu| vcpu.domain).collect();
        // The server's cgroups, which are on record by its number.
        let actuator = HostActuator::build(&chosen.kind, &KernelTree, &domains)
            .context("can't make this VM's cgroups; see vcpufreq doctor")?
            .for_process(&served.host, self.vmm.pid());
        // To change what was recorded may have waited for others.
        if borrowed.have_ended() {
            bail!("one of its vCPUs' threads has ended");
        }
        let plan = BridgePlan {
            served,
            server: std::process::id(),
            vmm: self.vmm.pid(),
            shared: self.shared.clone(),
            threads,
            clamps_threads,
        };
        let bells = self.shared.bells.iter().map(AsRawFd::as_raw_fd);
        let keep: Vec<_> = bells.chain([self.shared.memory.fd()]).collect();
        VmProcess::start(&keep, |server| plan.run(actuator, server))
    }

    /// From then on the guest runs, and a later server can take it over.
    fn hand_over(&self) -> anyhow::Result<()> {
        let stream = self.vmm.stream.as_ref().context("it isn't connected")?;
        takeover::keep(self.vmm, self.shared)?;
        let given = stream.give(self.shared, TAKEN_WITHIN);
        given.context("the VMM doesn't take its memory")?;
        // Not before: a server that finds the connection there has nothing to give.
        takeover::store(self.vmm, self.shared)
    }
}
