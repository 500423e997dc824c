// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One virtual machine that is served: from the VMM's connection to its end.

use std::{
    cell::Cell,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow, bail};
use vcpufreq_device::{
    Device, Headroom, VcpuId,
    host::{
        self, ActuatorChoice, ActuatorFacts, ActuatorKind, AdoptedGroups, Chosen, HostActuator,
        HostRoot, KernelTree, RaisedGroups, SysfsSource, Tid,
    },
    kvm::{
        Bridge, BridgeConfig, BridgeDevice, Diagnostics, EventStats, Offered, Unconfined,
        shm::{AllVcpus, ShmBackend},
    },
};
use vmm_sys_util::eventfd::EventFd;

use super::{Served, Shared, Vmm, groups::SeenGroups, takeover, threads::FoundThreads};
use crate::{
    config::resolve,
    events::{EventReport, EventWriter},
    kernel_version::host_headroom,
    lifecycle::{
        host_changes::{HostChanges, put_back_of_dead},
        state::{StateDir, VmmRecord, owner_of},
    },
    message::{chain, warn},
    run::bridge::{Stderr, answer_stats, observe},
    stats::{StatsServer, TimeInState},
    sys,
};

/// How long a VMM may take to take what it is sent.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);
/// How long a process whose threads have ended may take to end, in ms.
const ENDING: u16 = 100;

/// A virtual machine with its bridge.
pub struct ServedVm {
    vmm: Vmm,
    shared: Shared,
    lost: Arc<EventFd>,
    all: AllVcpus,
    is_paused: bool,
    bridge: Bridge,
    stats: Option<StatsServer>,
    events: Option<EventWriter>,
    changes: HostChanges,
    groups: Option<SeenGroups>,
    /// Why its vCPUs have no cgroups, until that is reported.
    no_groups: Cell<Option<String>>,
    threads: FoundThreads,
}

/// What has become of a machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is as it was.
    Same,
    /// Its manager has moved its vCPUs: other cgroups are to be clamped.
    Moved,
    /// A vCPU has ended.
    Ended,
}

/// Gives `vmm` its memory before its vCPUs' threads are known. From then on it is as one that is
/// taken over.
///
/// # Errors
/// As [`ServedVm::start`].
pub fn give_memory(served: &Served, vmm: Vmm) -> anyhow::Result<Vmm> {
    let shared = Shared::new(served.count()?)?;
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
    /// Makes the bridge of `vmm`, whose vCPUs have these threads, and lets it go on.
    ///
    /// # Errors
    /// What the host refused, or the VMM lacks; nothing is left then.
    pub fn start(served: &Served, vmm: Vmm, threads: &[Tid]) -> anyhow::Result<Self> {
        let shared = match &vmm.inherited {
            Some(shared) => shared.clone(),
            None => Shared::new(served.count()?)?,
        };
        let started = Starting {
            served,
            vmm: &vmm,
            shared: &shared,
        };
        let pins = served.vcpus.iter().map(|vcpu| &vcpu.pin[..]);
        let times = TimeInState::start(&served.host, pins);
        match started.all(threads) {
            Ok((changes, groups, threads, parts)) => Ok(Self {
                groups,
                threads,
                vmm,
                shared,
                lost: parts.lost,
                all: parts.all,
                is_paused: false,
                no_groups: parts.no_groups,
                stats: answer_stats(parts.bridge.handle(), times, None),
                bridge: parts.bridge,
                events: parts.events,
                changes,
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

    /// A file that is readable when no thread answers the doorbells any more.
    pub fn lost(&self) -> BorrowedFd<'_> {
        sys::file_of(&self.lost)
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
            self.bridge.handle().reset();
        }
        if is_paused != self.is_paused {
            self.is_paused = is_paused;
            match is_paused {
                true => self.all.withdraw(),
                false => self.all.carry_out(),
            }
        }
    }

    /// Looks for what no file tells.
    pub fn look(&self, served: &Served) -> Fate {
        let groups = self.groups.as_ref();
        if self.threads.have_ended() {
            Fate::Ended
        } else if groups.is_some_and(|groups| groups.have_changed(&served.host)) {
            Fate::Moved
        } else {
            self.warn_of_no_groups();
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
    /// over, or served again.
    ///
    /// # Errors
    /// When a cgroup, clamp or pin can't be put back, which stays in the record, or when the events
    /// file is not complete. The bridge has ended all the same.
    pub fn end(self) -> anyhow::Result<Vmm> {
        let pid = self.vmm.pid();
        let handle = self.bridge.handle();
        handle.guest_ended();
        if let Some(stats) = self.stats {
            stats.stop();
        }
        let totals = self.bridge.stop();
        handle.reset();
        let written = self.events.map(EventWriter::finish).transpose();
        self.shared.memory.say_gone();
        let undone = self.changes.undo();
        let has_ended = self.threads.have_ended();
        let gone = self.vmm.gone_within(if has_ended { ENDING } else { 0 });
        if gone || has_ended {
            takeover::forget(&self.vmm);
        }
        undone?;
        if let Some(EventReport { dropped, .. }) =
            written.context("the events file is not complete")?
            && dropped > 0
        {
            warn(&format!(
                "events: {dropped} dropped because they came faster than they could be written"
            ));
        }
        let sum = totals.counters;
        let what = match (gone, has_ended) {
            (true, _) => "has ended",
            (_, true) => "has ended a vCPU",
            _ => "goes on",
        };
        warn(&format!(
            "process {pid} {what}: requests {}, applied {}, unchanged {}, coalesced {}, refused {}, \
             not applicable {}, delayed by the limit {}",
            sum.requests,
            sum.applied,
            sum.unchanged,
            sum.coalesced,
            sum.refused,
            sum.not_applicable,
            sum.limited,
        ));
        Ok(self.vmm.inheriting(self.shared))
    }
}

/// A machine while it is made.
struct Starting<'a> {
    served: &'a Served,
    vmm: &'a Vmm,
    shared: &'a Shared,
}

/// What is made once the changes are on record.
struct Parts {
    lost: Arc<EventFd>,
    all: AllVcpus,
    bridge: Bridge,
    events: Option<EventWriter>,
    no_groups: Cell<Option<String>>,
}

impl Starting<'_> {
    fn all(
        &self,
        threads: &[Tid],
    ) -> anyhow::Result<(HostChanges, Option<SeenGroups>, FoundThreads, Parts)> {
        let taken_over = self.vmm.inherited.is_some();
        if taken_over {
            // Before its threads are looked at: what the server before this one set isn't theirs.
            put_back_of_dead(&StateDir::of_user()?, &HostRoot::default(), warn)?;
            // From now on the VM is this server's.
            takeover::keep(self.vmm, self.shared)?;
        }
        self.describe()?;
        let (served, pid) = (self.served, self.vmm.pid());
        let borrowed = FoundThreads::look(served, pid, threads)?;
        // Else the number may be another process's, and so the threads.
        self.vmm.check()?;
        let groups = SeenGroups::look(&served.host, pid, threads);
        let chosen = choose(served, pid, threads)?;
        let changes = HostChanges::begin(self.record(&chosen, &borrowed)?, warn)?;
        let made = self.parts(&chosen, threads, &borrowed).and_then(|parts| {
            if !taken_over {
                self.hand_over()?;
            }
            Ok(parts)
        });
        match made {
            Ok(parts) => {
                let adaptable = served.actuator == ActuatorChoice::Auto;
                let groups = groups.clamped_by(&chosen.kind).filter(|_| adaptable);
                Ok((changes, groups, borrowed, parts))
            }
            Err(error) => {
                // The first failure is the one to tell.
                drop(changes.undo());
                Err(error)
            }
        }
    }

    /// Writes the guest's description of its vCPUs.
    fn describe(&self) -> anyhow::Result<()> {
        let served = self.served;
        let config =
            resolve::device_config(&served.vcpus, served.options.bridge.clamp, Headroom::None)?;
        for (vcpu, spec) in (0..).map(VcpuId).zip(&config.vcpus) {
            let opps = &served.vcpus[vcpu.index()].opps;
            let microwatts: Vec<_> = opps.iter().map(|opp| opp.uw.unwrap_or(0)).collect();
            let (table, capacity) = (&spec.table, spec.capacity);
            let memory = &self.shared.memory;
            memory.describe(vcpu, table, capacity, &microwatts);
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
            owner: owner_of(&served.host, std::process::id())?,
            groups,
            rt: None,
            pinned: pinned.collect(),
            threads: threads.borrowed().to_vec(),
            adopted: match &chosen.kind {
                ActuatorKind::Adopted(groups) => Some(groups.clone()),
                _ => None,
            },
            raised: RaisedGroups::default(),
        })
    }

    fn parts(
        &self,
        chosen: &Chosen,
        threads: &[Tid],
        borrowed: &FoundThreads,
    ) -> anyhow::Result<Parts> {
        let served = self.served;
        let (stats, events) = observe(
            served.options.bridge.events.as_deref(),
            served.vcpus.len(),
            None,
        )?;
        let device = device(served, self.vmm.pid(), &chosen.kind, stats)?;
        let Shared { memory, bells } = self.shared.clone();
        let backend =
            ShmBackend::new(memory, bells).context("can't make an eventfd for all vCPUs")?;
        let (lost, all) = (backend.lost(), backend.all_vcpus());
        let config = BridgeConfig {
            base: 0,
            pins: served.vcpus.iter().map(|vcpu| vcpu.pin.clone()).collect(),
            rt_pcpus: Vec::new(),
            kick: None,
            ioeventfd: None,
            confinement: Arc::new(Unconfined),
        };
        let offered = Offered {
            backend: Box::new(backend),
            required: Some("the VM can't be served".to_owned()),
        };
        let diagnostics: Arc<dyn Diagnostics> = Arc::new(Stderr {
            explain: served.options.bridge.explain,
        });
        let bridge = Bridge::start(device, &config, &[offered], &diagnostics)?;
        let handle = bridge.handle();
        // To change what was recorded may have waited for others.
        if borrowed.have_ended() {
            bail!("one of its vCPUs' threads has ended");
        }
        for (vcpu, tid) in (0..).map(VcpuId).zip(threads) {
            handle.register_thread(vcpu, *tid)?;
            let pcpus = &served.vcpus[vcpu.index()].pin;
            if !pcpus.is_empty() {
                host::pin(*tid, pcpus)
                    .with_context(|| format!("vCPU {vcpu} can't be pinned; correct --pin"))?;
            }
        }
        let lost = lost.get().cloned().context("the bridge has no worker")?;
        // What a server before this one was asked for.
        all.carry_out();
        let by_default = served.actuator == ActuatorChoice::Auto;
        let no_groups = by_default && chosen.kind == ActuatorKind::Thread;
        Ok(Parts {
            no_groups: Cell::new(no_groups.then(|| chosen.reason.clone())),
            lost,
            all,
            bridge,
            events,
        })
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

/// Groups that the VM's manager has made for its vCPUs come first: it knows its threads there.
fn choose(served: &Served, pid: u32, threads: &[Tid]) -> anyhow::Result<Chosen> {
    let parent = served.options.bridge.cgroup_parent.as_deref();
    if served.actuator == ActuatorChoice::Auto {
        match AdoptedGroups::find(&served.host, pid, threads) {
            Ok(Some(groups)) => {
                return Ok(Chosen {
                    kind: ActuatorKind::Adopted(groups),
                    reason: "each vCPU has a cgroup already".to_owned(),
                });
            }
            Ok(None) => {}
            Err(error) => warn(&format!(
                "the cgroups that the vCPUs have can't be clamped: {error}"
            )),
        }
    }
    let facts = ActuatorFacts::probe_for(&served.host, pid, parent);
    host::choose(served.actuator, facts).map_err(|why| {
        anyhow!("{why}; change that, or let the VM only read what it gets (--actuator none)")
    })
}

fn device(
    served: &Served,
    pid: u32,
    kind: &ActuatorKind,
    stats: Arc<EventStats>,
) -> anyhow::Result<BridgeDevice> {
    let (options, headroom) = (&served.options.bridge, host_headroom(&served.host));
    let config = resolve::bridge_device_config(&served.vcpus, options, headroom)?;
    let domains: Vec<_> = served.vcpus.iter().map(|vcpu| vcpu.domain).collect();
    let actuator = HostActuator::build(kind, &KernelTree, &domains)
        .context("can't make this VM's cgroups; see vcpufreq doctor")?;
    let source = SysfsSource::new(&served.host, served.count()?)?.for_process(pid);
    Ok(Device::new(config, actuator, Arc::new(source), stats)?)
}
