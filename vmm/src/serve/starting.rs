// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A machine while it is made: what is changed for it on the host, the process of its bridge, and what
//! its VMM gets.

use std::{cell::Cell, io::ErrorKind, os::fd::AsRawFd};

use anyhow::{Context, anyhow, bail};
use vcpufreq_device::VcpuId;
use vcpufreq_host::undo::{JournalEntry, KernelHost};
use vcpufreq_host::{
    ActuatorChoice, ActuatorKind, Chosen, CpuList, HostActuator, HostCpus, HostRoot, KernelTree,
    SavedThread, Tid, affinity_of,
};

use super::{
    Served, ServedVmm, SharedWithVmm,
    bridge::BridgePlan,
    groups::{SeenGroups, choose},
    hand_over::READ_CURE,
    locked::wait_for_lock,
    other_threads::OtherThreads,
    takeover,
    threads::FoundThreads,
    vm_process::VmProcess,
};
use crate::{
    lifecycle::{
        host_changes::{HostChanges, put_back_of_dead},
        record::{VmmRecord, owner_of},
        state::StateDir,
    },
    message::warn,
    patience::patience_of,
    rt_guest::{InForce, Record, RtGuest},
};

/// How many seconds a VMM may take to take what it is sent. What up to some 130 vCPUs are sent fits into
/// the socket, and waits for no reader.
const TAKEN_WITHIN: u64 = 5;

/// Gives `vmm` its memory before its vCPUs are served. From then on it is as one that is taken over.
/// What can be checked of `threads`, its vCPUs' as far as they are known, is checked before.
///
/// # Errors
/// As [`ServedVm::start`](super::ServedVm::start).
pub fn give_memory(
    served: &Served,
    vmm: &ServedVmm,
    threads: &[Option<Tid>],
) -> anyhow::Result<SharedWithVmm> {
    let shared = SharedWithVmm::new(served.count()?)?;
    let starting = Starting {
        served,
        vmm,
        shared: &shared,
    };
    if !threads.is_empty() {
        let applied = served.applied()?;
        starting.look(threads, applied.as_ref().and_then(InForce::record))?;
    }
    let given = shared.describe(served).and_then(|()| starting.hand_over());
    given.inspect_err(|_| takeover::forget(vmm))?;
    Ok(shared)
}

/// A machine while it is made.
pub struct Starting<'a> {
    pub served: &'a Served,
    pub vmm: &'a ServedVmm,
    pub shared: &'a SharedWithVmm,
}

/// What a machine is made of.
pub struct ServedParts {
    pub process: VmProcess,
    pub changes: HostChanges,
    pub groups: Option<SeenGroups>,
    pub no_groups: Cell<Option<String>>,
    pub threads: FoundThreads,
    pub others: OtherThreads,
}

/// What was found of a machine before anything is changed.
struct FoundVm {
    threads: FoundThreads,
    others: OtherThreads,
    /// All of them that are going to be changed, as they are.
    borrowed: Vec<SavedThread>,
    rt: RtGuest,
    groups: SeenGroups,
    chosen: Chosen,
}

impl Starting<'_> {
    /// Makes it, of a vCPU that ends meanwhile without that.
    ///
    /// # Errors
    /// What the host refused, or the VMM lacks; nothing is left then.
    pub fn all(&self, threads: &[Option<Tid>]) -> anyhow::Result<ServedParts> {
        let taken_over = self.vmm.inherited.is_some();
        if taken_over {
            // Before its threads are looked at: what the server before this one set isn't theirs.
            put_back_of_dead(&StateDir::of_user()?, &HostRoot::default(), warn)?;
            // From now on the VM is this server's.
            takeover::keep(self.vmm, self.shared)?;
        }
        self.shared.describe(self.served)?;
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
    pub fn that_live(&self, threads: &[Option<Tid>]) -> Vec<Option<Tid>> {
        let lives = |tid: &Tid| {
            let task = format!("proc/{}/task/{tid}", self.vmm.pid());
            self.served.host.path(task).exists()
        };
        threads.iter().map(|tid| tid.filter(lives)).collect()
    }

    fn with(&self, threads: &[Option<Tid>], taken_over: bool) -> anyhow::Result<ServedParts> {
        let served = self.served;
        // It stays so until the VM is on record.
        let applied = served.applied()?;
        let found = self.look(threads, applied.as_ref().and_then(InForce::record))?;
        let record = self.record(&found)?;
        let changes = match served.has_guardian {
            true => HostChanges::begin(record, warn)?.0,
            false => HostChanges::begin_unguarded(record, warn)?,
        };
        let kernel = KernelHost::from(&served.host);
        let still = applied.as_ref().map(|applied| applied.check_still(&kernel));
        // From here on the VM's record keeps apply and restore off. Its process would hold this on.
        drop(applied);
        let begun = still.transpose().map_err(anyhow::Error::from);
        let begun = begun.and_then(|_| self.begin(&found, threads));
        let FoundVm {
            threads: borrowed,
            others,
            groups,
            chosen,
            ..
        } = found;
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
                    others,
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

    /// Looks at all that is going to be changed.
    ///
    /// # Errors
    /// What the host lacks, or the VMM, or where its manager wants something else.
    fn look(&self, threads: &[Option<Tid>], applied: Option<&Record>) -> anyhow::Result<FoundVm> {
        let (served, pid) = (self.served, self.vmm.pid());
        let found = FoundThreads::look(served, pid, threads)?;
        // Else the number may be another process's, and so the threads.
        self.vmm.check()?;
        let rt = RtGuest::of_process(&served.rt(), &served.host, applied, pid)?;
        let others = OtherThreads::new(&served.host, (pid, threads), rt.cpus(), rt.partition());
        let mut borrowed = found.borrowed().to_vec();
        if served.rt().is_real_time() {
            let main = i32::try_from(pid).ok().and_then(Tid::new);
            let allowed = affinity_of(main.context("it has no main thread")?)?;
            let unpinned = [allowed, not_set_apart(&served.host, applied)];
            let vcpus = (0..).map(VcpuId).zip(threads).zip(&served.vcpus);
            for ((vcpu, tid), config) in vcpus {
                let agrees = tid.map(|tid| rt.check_agrees((vcpu, tid), &config.pin, &unpinned));
                agrees.transpose()?;
            }
            wait_for_lock(&served.host, self.vmm)?;
            borrowed.extend(others.look()?);
        }
        let groups = SeenGroups::look(&served.host, pid, threads);
        let in_partition = rt.clamped_in_partition(served.actuator);
        Ok(FoundVm {
            chosen: in_partition.map_or_else(|| choose(served, pid, threads), Ok)?,
            threads: found,
            others,
            borrowed,
            rt,
            groups,
        })
    }

    fn record(&self, found: &FoundVm) -> anyhow::Result<VmmRecord> {
        let (served, chosen) = (self.served, &found.chosen);
        let clamped = match &chosen.kind {
            ActuatorKind::Cgroup(place) => {
                Some(JournalEntry::Groups(place.record(std::process::id())))
            }
            ActuatorKind::Adopted(groups) => Some(JournalEntry::Cgroup(groups.clone())),
            _ => None,
        };
        let threads = found.borrowed.iter().cloned().map(JournalEntry::Thread);
        let changes = clamped.into_iter().chain(found.rt.changes(&served.host));
        let pinned = served.vcpus.iter().flat_map(|vcpu| vcpu.pin.clone());
        Ok(VmmRecord {
            real_time: found.rt.cpus().iter().collect(),
            pinned: pinned.collect(),
            entries: changes.chain(threads).collect(),
            ..VmmRecord::new(owner_of(&served.host, std::process::id())?)
        })
    }

    /// Starts the process of the bridge, which is in force then.
    fn begin(&self, found: &FoundVm, threads: &[Option<Tid>]) -> anyhow::Result<VmProcess> {
        let (served, chosen, rt) = (self.served, &found.chosen, &found.rt);
        let clamps_threads = chosen.kind == ActuatorKind::Thread;
        if clamps_threads && served.options.bridge.multi_tenant {
            bail!(
                "--multi-tenant takes a cgroup for each vCPU: its process would keep the right to \
                 schedule any thread"
            );
        }
        // The process goes into its partition before a real-time vCPU does.
        rt.begin(&served.host)?;
        found.others.keep_off();
        let domains: Vec<_> = served.vcpus.iter().map(|vcpu| vcpu.domain).collect();
        // The server's cgroups, which are on record by its number.
        let actuator = HostActuator::build(&chosen.kind, &KernelTree, &domains)
            .context("can't make this VM's cgroups; see vcpufreq doctor")?
            .for_process(&served.host, self.vmm.pid());
        let actuator = rt.actuator(actuator);
        // To change what was recorded may have waited for others.
        if found.threads.have_ended() {
            bail!("one of its vCPUs' threads has ended");
        }
        let plan = BridgePlan {
            served,
            server: std::process::id(),
            vmm: self.vmm.pid(),
            shared: self.shared.clone(),
            threads,
            rt,
            clamps_threads,
        };
        let (memory, bells) = (&self.shared.memory, &self.shared.bells);
        // A mapping of a guest's RAM is all that its process needs of that.
        let memory = memory.offset_in_ram().is_none().then(|| memory.fd());
        let keep = bells.iter().map(AsRawFd::as_raw_fd).chain(memory);
        let keep: Vec<_> = keep.collect();
        VmProcess::start(&keep, |server| plan.run(actuator, server))
    }

    /// From then on the guest runs, and a later server can take it over.
    fn hand_over(&self) -> anyhow::Result<()> {
        let stream = self.vmm.stream.as_ref().context("it isn't connected")?;
        takeover::keep(self.vmm, self.shared)?;
        let given = stream.give(self.shared, patience_of(TAKEN_WITHIN));
        given.map_err(|error| {
            let why = match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("; {READ_CURE}"),
                _ => format!(": {error}"),
            };
            anyhow!("the VMM doesn't take its memory{why}")
        })?;
        // Not before: a server that finds the connection there has nothing to give.
        takeover::store(self.vmm, self.shared)
    }
}

/// The pCPUs of threads that are not pinned: those that neither `vcpufreq rt apply` nor `isolcpus=` sets
/// apart.
fn not_set_apart(host: &HostRoot, applied: Option<&Record>) -> CpuList {
    let isolated = host.text("sys/devices/system/cpu/isolated");
    let isolated = isolated.and_then(|text| text.trim().parse().ok());
    let isolated: CpuList = isolated.unwrap_or_default();
    let given = applied.map(|record| record.partition.rt());
    let online = HostCpus::read(host).online();
    online.without(&isolated.or(&given.unwrap_or_default()))
}
