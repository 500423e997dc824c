// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which actuator a VM gets, and why.

#![forbid(unsafe_code)]

use std::io;

use super::HostRoot;
use super::cgroup::{CgroupError, CgroupTree, GroupRecord};
use super::cgroup_actuator::CgroupActuator;
use super::placement::Placement;
use super::sys::Tid;
use super::thread_actuator::{ThreadActuator, uclamp_available};
use crate::policy::Demand;
use crate::ports::{ActuateError, Actuator};
use crate::units::{DomainId, VcpuId};

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
}

/// What the host offers.
#[derive(Debug)]
pub struct ActuatorFacts {
    /// Whether the kernel clamps threads, and if not, what it said.
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
    /// [`ThreadActuator`].
    Thread,
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

/// Either actuator.
#[derive(Debug)]
pub enum HostActuator {
    /// On groups.
    Cgroup(CgroupActuator),
    /// On threads.
    Thread(ThreadActuator),
}

impl ActuatorFacts {
    /// Looks at the host below `root`.
    #[must_use]
    pub fn probe(root: &HostRoot) -> Self {
        Self {
            uclamp: uclamp_available(),
            cgroup: Placement::find(root),
        }
    }
}

/// Chooses. Groups come first, for one vCPU as for many: their clamps change without the frequency
/// dip that `sched_setattr` causes on a running thread.
///
/// # Errors
/// When the host can't do what is wanted, or clamp at all.
pub fn choose(wish: ActuatorChoice, facts: ActuatorFacts) -> Result<Chosen, ChoiceError> {
    facts.uclamp.map_err(ChoiceError::NoUclamp)?;
    let (kind, reason) = match (wish, facts.cgroup) {
        (ActuatorChoice::Cgroup, Err(error)) => return Err(error.into()),
        (ActuatorChoice::Cgroup, Ok(place)) => (ActuatorKind::Cgroup(place), "as asked".into()),
        (ActuatorChoice::Thread, _) => (ActuatorKind::Thread, "as asked".into()),
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
    /// When groups can't be made.
    pub fn build(
        kind: &ActuatorKind,
        tree: &dyn CgroupTree,
        domains: &[DomainId],
    ) -> Result<Self, CgroupError> {
        match kind {
            ActuatorKind::Cgroup(place) => {
                CgroupActuator::create(tree, place, domains).map(Self::Cgroup)
            }
            ActuatorKind::Thread => Ok(Self::Thread(ThreadActuator::new(domains))),
        }
    }

    /// Says that `vcpu` runs on thread `tid`. Call it on that thread before it runs the guest.
    ///
    /// # Errors
    /// What the kernel said; `NotFound` when there is no such vCPU.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> io::Result<()> {
        match self {
            Self::Cgroup(actuator) => actuator.register_thread(vcpu, tid),
            Self::Thread(actuator) => actuator.register_thread(vcpu, tid),
        }
    }

    /// Says that somebody else clamps from now on: what is in force isn't known.
    pub fn forget(&self) {
        match self {
            Self::Cgroup(actuator) => actuator.forget(),
            // It remembers nothing.
            Self::Thread(_) => {}
        }
    }

    /// The groups to remove in the end, if there are any.
    #[must_use]
    pub fn record(&self) -> Option<&GroupRecord> {
        match self {
            Self::Cgroup(actuator) => Some(actuator.record()),
            Self::Thread(_) => None,
        }
    }
}

impl Actuator for HostActuator {
    fn apply(&self, domain: DomainId, demand: Demand) -> Result<(), ActuateError> {
        match self {
            Self::Cgroup(actuator) => actuator.apply(domain, demand),
            Self::Thread(actuator) => actuator.apply(domain, demand),
        }
    }
}
