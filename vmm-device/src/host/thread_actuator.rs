// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clamps on threads, by `sched_setattr`.
//!
//! Needs no cgroup and no privilege, and ends with the thread. But the kernel dequeues a running
//! thread to change its clamp, cpufreq sees the run queue without it, and the rate limit of
//! schedutil swallows the update at the enqueue: the frequency dips, for up to 10 ms on
//! SCHED_OTHER and 40 ms on SCHED_FIFO. [`super::CgroupActuator`] has no dip.

#![forbid(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::thread;

use super::sys::{SchedAttr, Tid};
use super::text::errno;
use crate::policy::Clamp;
use crate::ports::{ActuateError, Actuator};
use crate::units::{DomainId, Util, VcpuId};

const CALL: &str = "sched_setattr";
pub(super) const DEADLINE: &str = "its threads are SCHED_DEADLINE, whose floor is their bandwidth";

/// Takes the calling thread out of the host's choice of frequency: with uclamp.max 0 it neither
/// raises one nor lifts the ceiling of a vCPU beside it.
///
/// # Errors
/// What the kernel said; one without uclamp has no such clamp.
pub fn clamp_current_thread_to_zero() -> io::Result<()> {
    SchedAttr::clamp(0, 0).set(Tid::current())
}

/// Clamps each thread of a domain.
#[derive(Debug)]
pub struct ThreadActuator {
    threads: DomainThreads,
}

/// A thread's clamps and whether its children inherit them, as `sched_getattr` reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadClamp {
    /// The clamp that the thread asks for; groups and system limits may narrow it.
    pub clamp: Clamp,
    /// Children start without the clamp.
    pub reset_on_fork: bool,
}

impl ThreadActuator {
    /// For vCPUs whose domains are `domains`, in order of their numbers.
    #[must_use]
    pub fn new(domains: &[DomainId]) -> Self {
        Self {
            threads: DomainThreads::new(domains),
        }
    }

    /// Says that `vcpu` runs on thread `tid`, takes its clamp away, and sees to it that what the
    /// thread forks doesn't inherit later ones.
    ///
    /// # Errors
    /// What the kernel said; `NotFound` when there is no such vCPU.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> io::Result<()> {
        self.threads.register(vcpu, tid)?;
        prepare_thread(tid)
    }
}

impl Actuator for ThreadActuator {
    /// One call for each thread of the domain. When one fails, the others are clamped all the
    /// same, and a failure is returned.
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        let mut first_error = None;
        let mut clamped = 0;
        for tid in self.threads.of(domain) {
            match clamp_thread(tid, clamp) {
                Ok(true) => clamped += 1,
                Ok(false) => {
                    let reason = DEADLINE;
                    first_error.get_or_insert(ActuateError::NotApplicable { domain, reason });
                }
                Err(error) => {
                    let (call, errno) = (CALL, errno(&error));
                    first_error = Some(ActuateError::Refused {
                        domain,
                        call,
                        errno,
                    });
                }
            }
        }
        match first_error {
            Some(ActuateError::NotApplicable { .. }) if clamped > 0 => Ok(()),
            Some(error) => Err(error),
            None if clamped > 0 => Ok(()),
            None => Err(ActuateError::NoThread { domain }),
        }
    }
}

/// Makes `tid` fit to be clamped: takes its own clamp away (a SCHED_FIFO or SCHED_RR thread starts
/// with the maximum for its minimum) and lets its children start without one. The kernel takes
/// that flag only in a call that gives the policy too, so this is done once; requests keep policy
/// and parameters.
pub(super) fn prepare_thread(tid: Tid) -> io::Result<()> {
    let attr = SchedAttr::of(tid)?;
    if attr.policy == SchedAttr::DEADLINE {
        return Ok(());
    }
    let attr = SchedAttr {
        flags: attr.flags
            | SchedAttr::RESET_ON_FORK
            | SchedAttr::UTIL_CLAMP_MIN
            | SchedAttr::UTIL_CLAMP_MAX,
        util_min: Clamp::NONE.min.get().into(),
        util_max: Clamp::NONE.max.get().into(),
        ..attr
    };
    attr.set(tid)
}

/// Clamps `tid`, if it isn't yet; false when clamps mean nothing to it.
fn clamp_thread(tid: Tid, clamp: Clamp) -> io::Result<bool> {
    // The kernel accepts clamps for SCHED_DEADLINE and ignores them. The policy can change at any
    // time, so it is looked at each time.
    let attr = SchedAttr::of(tid)?;
    if attr.policy == SchedAttr::DEADLINE {
        return Ok(false);
    }
    // A call that changes nothing makes the frequency dip all the same.
    if clamp_of(&attr) != clamp {
        set_clamp(tid, clamp)?;
    }
    Ok(true)
}

fn set_clamp(tid: Tid, clamp: Clamp) -> io::Result<()> {
    SchedAttr::clamp(clamp.min.get().into(), clamp.max.get().into()).set(tid)
}

fn clamp_of(attr: &SchedAttr) -> Clamp {
    Clamp {
        min: Util::saturating(attr.util_min.into()),
        max: Util::saturating(attr.util_max.into()),
    }
}

/// The clamps of `tid`.
///
/// # Errors
/// What the kernel said.
pub fn thread_clamp(tid: Tid) -> io::Result<ThreadClamp> {
    let attr = SchedAttr::of(tid)?;
    Ok(ThreadClamp {
        clamp: clamp_of(&attr),
        reset_on_fork: attr.flags & SchedAttr::RESET_ON_FORK != 0,
    })
}

/// Whether the running kernel has uclamp: a thread that ends at once asks for the clamp that it
/// has anyway.
///
/// # Errors
/// `EOPNOTSUPP` from a kernel without `CONFIG_UCLAMP_TASK`, `EINVAL` or `E2BIG` from one before
/// 5.3, `EPERM` where a sandbox forbids the call.
pub fn uclamp_available() -> io::Result<()> {
    let probe = thread::Builder::new().name("uclamp-probe".into());
    let probe = probe.spawn(|| set_clamp(Tid::current(), Clamp::NONE))?;
    probe
        .join()
        .map_err(|_| io::Error::other("the probe panicked"))?
}

/// Which threads run the vCPUs of which domain. Fixed in size; registering is one store.
#[derive(Debug)]
pub(super) struct DomainThreads(Box<[(DomainId, AtomicI32)]>);

impl DomainThreads {
    pub fn new(domains: &[DomainId]) -> Self {
        let slots = domains.iter().map(|domain| (*domain, AtomicI32::new(0)));
        Self(slots.collect())
    }

    pub fn register(&self, vcpu: VcpuId, tid: Tid) -> io::Result<()> {
        let (_, slot) = self.0.get(vcpu.index()).ok_or(io::ErrorKind::NotFound)?;
        slot.store(tid.get(), Relaxed);
        Ok(())
    }

    pub fn domain(&self, vcpu: VcpuId) -> Option<DomainId> {
        self.0.get(vcpu.index()).map(|(domain, _)| *domain)
    }

    /// The registered threads of `domain`.
    pub fn of(&self, domain: DomainId) -> impl Iterator<Item = Tid> {
        let members = self.0.iter().filter(move |(d, _)| *d == domain);
        members.filter_map(|(_, slot)| Tid::new(slot.load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: DomainId = DomainId(0);

    /// Makes the calling thread SCHED_DEADLINE, which needs privilege.
    fn become_deadline() -> io::Result<()> {
        SchedAttr::deadline(1_000_000, 100_000_000).set(Tid::current())
    }

    #[test]
    fn clamps_do_not_apply_to_sched_deadline() {
        let actuator = ThreadActuator::new(&[DOMAIN]);
        let answer = thread::scope(|scope| {
            let vcpu = scope.spawn(|| {
                become_deadline()?;
                actuator.register_thread(VcpuId(0), Tid::current())?;
                Ok::<_, io::Error>(actuator.apply(DOMAIN, Clamp::NONE))
            });
            vcpu.join().unwrap()
        });
        match answer {
            Err(error) => println!("SKIP: no SCHED_DEADLINE here: {error}"),
            Ok(answer) => {
                let (domain, reason) = (DOMAIN, DEADLINE);
                assert_eq!(answer, Err(ActuateError::NotApplicable { domain, reason }));
            }
        }
    }
}
