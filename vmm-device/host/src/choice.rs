// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which actuator a VM gets, and why.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::OnceLock;
use std::{fmt, io};

use vcpufreq_device::{ActuateError, Actuator, Clamp, DomainId, Util, VcpuId};

use super::HostRoot;
use super::adopted_groups::AdoptedGroups;
use super::cgroup::{CgroupTree, GroupRecord};
use super::cgroup_actuator::CgroupActuator;
use super::cgroup_error::CgroupError;
use super::partition::PartitionGroups;
use super::placement::Placement;
use super::sys::Tid;
use super::thread_actuator::{ThreadActuator, uclamp_available};

/// What the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActuatorChoice {
    /// The best that the host offers.
    #[default]
    Auto,
    /// Groups or nothing.
    Cgroup,
    /// Threads.
    Thread,
    /// No clamps at all: the guest reads what it gets, and its requests are counted as not
    /// applicable. For hosts without uclamp.
    Nothing,
}

/// What the host offers.
#[derive(Debug)]
pub struct ActuatorFacts {
    /// Whether the kernel clamps threads, and if not, its error.
    pub uclamp: io::Result<()>,
    /// Where groups can be, and if nowhere, why.
    pub cgroup: Result<Placement, CgroupError>,
}

/// What a VM gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Which actuator.
    pub kind: ActuatorKind,
    /// Why, in a sentence.
    pub reason: String,
}

/// An actuator that isn't made yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActuatorKind {
    /// [`CgroupActuator`], at this place.
    Cgroup(Placement),
    /// The same, on groups that are there.
    Adopted(AdoptedGroups),
    /// The same, on the VM's groups in a real-time partition.
    Partition(PartitionGroups),
    /// [`ThreadActuator`].
    Thread,
    /// Nothing: every request is [`ActuateError::NotApplicable`].
    Nothing,
}

/// Why a VM gets none.
#[derive(Debug, thiserror::Error)]
pub enum ChoiceError {
    /// The kernel has no uclamp.
    #[error(
        "this kernel can't clamp utilization ({0}); it needs CONFIG_UCLAMP_TASK, Linux 5.3 or later"
    )]
    NoUclamp(io::Error),
    /// Groups were wanted.
    #[error("no cgroup for this VM: {0}")]
    NoCgroup(#[from] CgroupError),
}

/// Either actuator, with lower bounds that no request undercuts.
#[derive(Debug)]
pub struct HostActuator {
    on: On,
    domains: Box<[DomainId]>,
    /// In order of the vCPUs, as `domains`; empty: none.
    floors: Box<[Util]>,
    /// Its guest has a real-time vCPU.
    real_time: bool,
    sum: OnceLock<ClampSum>,
}

/// What is to be in force where a domain asks for a clamp.
struct ClampSum(Box<dyn Fn(DomainId, Clamp) -> Clamp + Send + Sync>);

impl fmt::Debug for ClampSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClampSum")
    }
}

/// What is clamped.
#[derive(Debug)]
enum On {
    Groups(CgroupActuator),
    Threads(ThreadActuator),
    Nothing,
}

impl ActuatorFacts {
    /// Looks at the host below `root`, for groups in `parent` if that is named.
    #[must_use]
    pub fn probe(root: &HostRoot, parent: Option<&Path>) -> Self {
        Self::probe_for(root, std::process::id(), parent)
    }

    /// The same for the VM of process `pid`, which need not be the calling one.
    #[must_use]
    pub fn probe_for(root: &HostRoot, pid: u32, parent: Option<&Path>) -> Self {
        Self {
            uclamp: uclamp_available(),
            cgroup: Placement::find_for(root, pid, parent),
        }
    }
}

/// Chooses. Groups come first, for one vCPU as for many: their clamps change without the frequency
/// dip that `sched_setattr` causes on a running thread.
///
/// # Errors
/// [`ChoiceError::NoUclamp`] when the kernel clamps no thread; [`ChoiceError::NoCgroup`] when
/// groups are wanted and there is no place for them.
pub fn choose(wish: ActuatorChoice, facts: ActuatorFacts) -> Result<Chosen, ChoiceError> {
    if wish != ActuatorChoice::Nothing {
        facts.uclamp.map_err(ChoiceError::NoUclamp)?;
    }
    let (kind, reason) = match (wish, facts.cgroup) {
        (ActuatorChoice::Nothing, _) => (ActuatorKind::Nothing, "as configured".into()),
        (ActuatorChoice::Cgroup, Err(error)) => return Err(error.into()),
        (ActuatorChoice::Cgroup, Ok(place)) => {
            (ActuatorKind::Cgroup(place), "as configured".into())
        }
        (ActuatorChoice::Thread, _) => (ActuatorKind::Thread, "as configured".into()),
        (ActuatorChoice::Auto, Ok(place)) => (
            ActuatorKind::Cgroup(place),
            "a cgroup's clamp changes without a dip of the frequency".into(),
        ),
        (ActuatorChoice::Auto, Err(error)) => (
            ActuatorKind::Thread,
            format!("no cgroup to be had, and sched_setattr dips the frequency: {error}"),
        ),
    };
    Ok(Chosen { kind, reason })
}

impl HostActuator {
    /// Makes what was chosen, for vCPUs whose domains are `domains`, in order of their numbers.
    ///
    /// # Errors
    /// As [`CgroupActuator::create`], [`CgroupActuator::adopt`] and [`CgroupActuator::within`]; without
    /// groups there is none.
    pub fn build(
        kind: &ActuatorKind,
        tree: &dyn CgroupTree,
        domains: &[DomainId],
    ) -> Result<Self, CgroupError> {
        let on = match kind {
            ActuatorKind::Cgroup(place) => {
                On::Groups(CgroupActuator::create(tree, place, domains)?)
            }
            ActuatorKind::Adopted(groups) => On::Groups(CgroupActuator::adopt(groups, domains)?),
            ActuatorKind::Partition(groups) => On::Groups(CgroupActuator::within(
                |domain| groups.domain(domain),
                domains,
            )?),
            ActuatorKind::Thread => On::Threads(ThreadActuator::new(domains)),
            ActuatorKind::Nothing => On::Nothing,
        };
        Ok(Self {
            real_time: matches!(kind, ActuatorKind::Partition(_)),
            ..Self::new(on, domains)
        })
    }

    fn new(on: On, domains: &[DomainId]) -> Self {
        Self {
            on,
            domains: domains.into(),
            floors: Box::default(),
            real_time: false,
            sum: OnceLock::new(),
        }
    }

    /// For vCPUs that are threads of process `pid`, as [`ThreadActuator::for_process`].
    #[must_use]
    pub fn for_process(self, root: &HostRoot, pid: u32) -> Self {
        let on = match self.on {
            On::Groups(actuator) => On::Groups(actuator.for_process(root, pid)),
            On::Threads(actuator) => On::Threads(actuator.for_process(root, pid)),
            On::Nothing => On::Nothing,
        };
        Self { on, ..self }
    }

    /// With a lower bound for each vCPU, in order of their numbers; a domain's is the highest of
    /// its vCPUs'. It is in force from a thread's registration on. Zero is none.
    #[must_use]
    pub fn with_floors(self, floors: Vec<Util>) -> Self {
        Self {
            floors: floors.into(),
            ..self
        }
    }

    /// With `real_time`, for a guest with a real-time vCPU: a vCPU writes set_perf of its own domain
    /// only.
    #[must_use]
    pub fn for_real_time_guest(self, real_time: bool) -> Self {
        Self {
            real_time: self.real_time || real_time,
            ..self
        }
    }

    /// From now on, puts what `sum` makes of each clamp into force: uclamp takes the maximum over a
    /// pCPU's threads, and not the sum. Of several calls the first one counts.
    pub fn add_to_clamps(&self, sum: impl Fn(DomainId, Clamp) -> Clamp + Send + Sync + 'static) {
        let _ = self.sum.set(ClampSum(Box::new(sum)));
    }

    /// The directory of a domain's group, when domains have groups.
    #[must_use]
    pub fn group(&self, domain: DomainId) -> Option<&Path> {
        match &self.on {
            On::Groups(actuator) => actuator.dir(domain),
            On::Threads(_) | On::Nothing => None,
        }
    }

    /// Whether there is anything to clamp by.
    #[must_use]
    pub fn clamps(&self) -> bool {
        !matches!(self.on, On::Nothing)
    }

    /// The lower bound of a domain's clamps; zero is none.
    #[must_use]
    pub fn floor(&self, domain: DomainId) -> Util {
        let members = self.domains.iter().zip(&self.floors);
        let floors = members.filter_map(|(of, floor)| (*of == domain).then_some(*floor));
        floors.max().unwrap_or(Util::ZERO)
    }

    /// Registers `tid` as the thread of `vcpu`. To be called on that thread before it runs the
    /// guest.
    ///
    /// # Errors
    /// `NotFound` when there is no such vCPU; as [`CgroupActuator::register_thread`] or
    /// [`ThreadActuator::register_thread`]. Kind `Other` with an [`ActuateError`] when the floor is
    /// refused: the thread is registered then.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> io::Result<()> {
        match &self.on {
            On::Groups(actuator) => actuator.register_thread(vcpu, tid)?,
            On::Threads(actuator) => actuator.register_thread(vcpu, tid)?,
            On::Nothing => {}
        }
        let domain = *self
            .domains
            .get(vcpu.index())
            .ok_or(io::ErrorKind::NotFound)?;
        if self.floor(domain) == Util::ZERO {
            return Ok(());
        }
        match self.apply(domain, Clamp::NONE) {
            // A SCHED_DEADLINE thread's floor is its bandwidth.
            Ok(()) | Err(ActuateError::NotApplicable { .. }) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// The thread of `vcpu` has ended, or ends next.
    pub fn unregister_thread(&self, vcpu: VcpuId) {
        match &self.on {
            On::Groups(actuator) => actuator.unregister_thread(vcpu),
            On::Threads(actuator) => actuator.unregister_thread(vcpu),
            On::Nothing => {}
        }
    }

    /// Reads from the kernel which threads are SCHED_DEADLINE; uclamp does not apply to them. A
    /// request relies on the last call, so call this periodically. Returns the vCPUs whose thread
    /// has left SCHED_DEADLINE: pass them to [`Device::apply_again`](vcpufreq_device::Device::apply_again).
    pub fn refresh_deadline_threads(&self) -> Vec<VcpuId> {
        match &self.on {
            On::Groups(actuator) => actuator.refresh_deadline_threads(),
            On::Threads(actuator) => actuator.refresh_deadline_threads(),
            On::Nothing => Vec::new(),
        }
    }

    /// Forgets what is in force, for another part of the host clamps from now on.
    pub fn forget(&self) {
        match &self.on {
            On::Groups(actuator) => actuator.forget(),
            On::Threads(actuator) => actuator.forget(),
            On::Nothing => {}
        }
    }

    /// The groups to remove in the end, if there are any.
    #[must_use]
    pub fn record(&self) -> Option<&GroupRecord> {
        match &self.on {
            On::Groups(actuator) => actuator.record(),
            On::Threads(_) | On::Nothing => None,
        }
    }
}

impl Actuator for HostActuator {
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        let clamp = clamp.raised(self.floor(domain));
        let clamp = self.sum.get().map_or(clamp, |sum| sum.0(domain, clamp));
        match &self.on {
            On::Groups(actuator) => actuator.apply(domain, clamp),
            On::Threads(actuator) => actuator.apply(domain, clamp),
            On::Nothing => Err(ActuateError::NotApplicable {
                domain,
                reason: "nothing is to be clamped",
            }),
        }
    }
    /// False for real-time guests: a vCPU that wrote set_perf of a real-time vCPU's domain would
    /// exit while it holds the lock of that vCPU's run queue.
    fn serves_any_vcpu(&self) -> bool {
        !self.real_time
    }
}
