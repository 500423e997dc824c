// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clamps on threads, by `sched_setattr`.
//!
//! Needs no cgroup and no privilege, and ends with the thread. But the frequency dips for up to 10
//! ms on SCHED_OTHER and 40 ms on SCHED_FIFO: the kernel dequeues a running thread to change its
//! clamp, cpufreq sees the run queue without it, and the rate limit of schedutil swallows the
//! update at the enqueue. [`super::CgroupActuator`] has no dip.

#![forbid(unsafe_code)]

use std::io;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread;

use vcpufreq_device::{ActuateError, Actuator, Clamp, DomainId, VcpuId};

use super::HostRoot;
use super::host_thread::HostThread;
use super::sync::unpoisoned;
use super::sys::{SchedAttr, Tid, sched_policy};
use super::text::errno;

const CALL: &str = "sched_setattr";
const DEADLINE: &str = "its threads are SCHED_DEADLINE, whose floor is their bandwidth";

/// Keeps the calling thread out of the host's choice of frequency. With uclamp.max 0 it neither
/// raises the frequency nor lifts the ceiling of a vCPU beside it.
///
/// # Errors
/// As [`uclamp_available`]; the thread's clamp stays as it was.
pub fn clamp_current_thread_to_zero() -> io::Result<()> {
    SchedAttr::clamp(0, 0).set(Tid::current())
}

/// Clamps each thread of a domain.
#[derive(Debug)]
pub struct ThreadActuator {
    threads: DomainThreads,
}

impl ThreadActuator {
    /// For vCPUs whose domains are `domains`, in order of their numbers.
    #[must_use]
    pub fn new(domains: &[DomainId]) -> Self {
        Self {
            threads: DomainThreads::new(domains),
        }
    }

    /// The same for vCPUs that are threads of process `pid`, not of this one: each may end at any
    /// time, and its number be another thread's.
    #[must_use]
    pub fn for_process(self, root: &HostRoot, pid: u32) -> Self {
        let threads = self.threads.for_process(root, pid);
        Self { threads }
    }

    /// Registers `tid` as the thread of `vcpu` and clears its clamp. Threads that it forks don't
    /// inherit later clamps.
    ///
    /// # Errors
    /// `NotFound` when there is no such vCPU, or the process of [`Self::for_process`] has no such
    /// thread. `ESRCH` when there is no such thread, `EPERM` without CAP_SYS_NICE for another user's
    /// thread, `EOPNOTSUPP` from a kernel without uclamp: the thread is registered then, with its own
    /// clamp as it was.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> io::Result<()> {
        let thread = self.threads.find(tid)?;
        prepare_thread(self.threads.register(vcpu, thread)?)
    }

    /// The thread of `vcpu` has ended, or ends next.
    pub fn unregister_thread(&self, vcpu: VcpuId) {
        self.threads.unregister(vcpu);
    }

    /// Reads from the kernel which threads are SCHED_DEADLINE; requests use the result. Returns the
    /// vCPUs whose thread no longer is: their requests had no effect.
    pub fn refresh_deadline_threads(&self) -> Vec<VcpuId> {
        self.threads.refresh_deadline_threads()
    }

    /// Forgets the clamps in force. To be called when another part of the host takes over clamping.
    pub fn forget(&self) {
        let threads = self.threads.of_vcpus.iter();
        threads.for_each(|thread| thread.clamp.put(None));
    }
}

impl Actuator for ThreadActuator {
    /// One call for each thread of the domain that hasn't the clamp yet: a call that changes
    /// nothing makes the frequency dip, too. If one fails, the others are still clamped, and the
    /// failure is returned.
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        self.threads.check_applies(domain)?;
        let mut refused = None;
        for thread in self.threads.clampable(domain) {
            if thread.clamp.get() == Some(clamp) {
                continue;
            }
            let set = thread.tid().and_then(|tid| set_clamp(tid, clamp));
            thread.clamp.put(set.is_ok().then_some(clamp));
            if let Err(error) = set {
                refused = Some(ActuateError::Refused {
                    domain,
                    call: CALL,
                    errno: errno(&error),
                });
            }
        }
        refused.map_or(Ok(()), Err)
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

/// Prepares `tid` for clamps. Clears its own clamp (a SCHED_FIFO or SCHED_RR thread starts with the
/// maximum as its minimum) and lets its children start without one. The kernel takes that flag only
/// in a call that gives the policy too, so this is done once; requests keep policy and parameters.
pub(super) fn prepare_thread(tid: Tid) -> io::Result<()> {
    let attr = SchedAttr::read(tid)?;
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

fn set_clamp(tid: Tid, clamp: Clamp) -> io::Result<()> {
    SchedAttr::clamp(clamp.min.get().into(), clamp.max.get().into()).set(tid)
}

/// What to do about a kernel without uclamp.
pub const NEEDS_UCLAMP: &str = "use a kernel with CONFIG_UCLAMP_TASK and CONFIG_UCLAMP_TASK_GROUP";

/// Whether the running kernel has uclamp: a short-lived thread sets the clamp that it has anyway.
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

/// Which threads run the vCPUs of which domain. Fixed in size. A request reads it without a call of
/// the host, except for a thread of another process: that it lives takes one pread.
#[derive(Debug)]
pub(super) struct DomainThreads {
    of_vcpus: Box<[DomainThread]>,
    /// The process that they are of, if it isn't this one.
    process: Option<(HostRoot, u32)>,
}

/// The thread of one vCPU.
#[derive(Debug)]
pub(super) struct DomainThread {
    domain: DomainId,
    is_registered: AtomicBool,
    thread: RwLock<Option<HostThread>>,
    /// It is SCHED_DEADLINE: the kernel accepts its clamps and ignores them.
    deadline: AtomicBool,
    /// What it was clamped to last, if that is known.
    clamp: LastClamp,
}

/// A clamp, or none, in one word.
#[derive(Debug)]
struct LastClamp(AtomicU32);

impl LastClamp {
    const UNKNOWN: u32 = u32::MAX;

    fn get(&self) -> Option<Clamp> {
        Clamp::from_bits(self.0.load(Relaxed))
    }

    fn put(&self, clamp: Option<Clamp>) {
        self.0
            .store(clamp.map_or(Self::UNKNOWN, Clamp::bits), Relaxed);
    }
}

impl DomainThread {
    /// The number of the thread, which has not ended.
    fn tid(&self) -> io::Result<Tid> {
        let thread = unpoisoned(self.thread.read());
        thread.as_ref().ok_or(io::ErrorKind::NotFound)?.tid()
    }

    /// Whether it was SCHED_DEADLINE and no longer is.
    fn look_at_policy(&self) -> bool {
        // One that has ended is none of either kind.
        let Ok(policy) = self.tid().and_then(sched_policy) else {
            return false;
        };
        let deadline = policy == libc::SCHED_DEADLINE;
        self.deadline.swap(deadline, Relaxed) && !deadline
    }
}

impl DomainThreads {
    pub fn new(domains: &[DomainId]) -> Self {
        let threads = domains.iter().map(|domain| DomainThread {
            domain: *domain,
            is_registered: AtomicBool::new(false),
            thread: RwLock::default(),
            deadline: AtomicBool::new(false),
            clamp: LastClamp(AtomicU32::new(LastClamp::UNKNOWN)),
        });
        Self {
            of_vcpus: threads.collect(),
            process: None,
        }
    }

    pub fn for_process(self, root: &HostRoot, pid: u32) -> Self {
        let process = Some((root.clone(), pid));
        Self { process, ..self }
    }

    /// Thread `tid` of the process.
    pub fn find(&self, tid: Tid) -> io::Result<HostThread> {
        match &self.process {
            Some((root, pid)) => HostThread::of_process(root, *pid, tid),
            None => Ok(HostThread::own(tid)),
        }
    }

    /// Returns the thread's number, as [`HostThread::tid`].
    pub fn register(&self, vcpu: VcpuId, thread: HostThread) -> io::Result<Tid> {
        let slot = self.of_vcpus.get(vcpu.index());
        let slot = slot.ok_or(io::ErrorKind::NotFound)?;
        *unpoisoned(slot.thread.write()) = Some(thread);
        slot.look_at_policy();
        slot.clamp.put(None);
        slot.is_registered.store(true, Relaxed);
        slot.tid()
    }

    /// The vCPU has no thread any more.
    pub fn unregister(&self, vcpu: VcpuId) {
        if let Some(slot) = self.of_vcpus.get(vcpu.index()) {
            slot.is_registered.store(false, Relaxed);
            if let Ok(mut thread) = slot.thread.write() {
                *thread = None;
            }
            slot.clamp.put(None);
        }
    }

    pub fn domain(&self, vcpu: VcpuId) -> Option<DomainId> {
        let slot = self.of_vcpus.get(vcpu.index());
        slot.map(|thread| thread.domain)
    }

    /// Reads from the kernel which threads are SCHED_DEADLINE; returns the vCPUs whose thread no
    /// longer is.
    pub fn refresh_deadline_threads(&self) -> Vec<VcpuId> {
        let vcpus = (0..=u16::MAX).map(VcpuId).zip(&self.of_vcpus);
        let clampable = vcpus.filter(|(_, thread)| thread.look_at_policy());
        clampable.map(|(vcpu, _)| vcpu).collect()
    }

    /// Whether a clamp means something to a thread of `domain`, by what is known.
    pub fn check_applies(&self, domain: DomainId) -> Result<(), ActuateError> {
        let mut error = ActuateError::NoThread { domain };
        for thread in self.in_domain(domain) {
            if !thread.deadline.load(Relaxed) {
                return Ok(());
            }
            let reason = DEADLINE;
            error = ActuateError::NotApplicable { domain, reason };
        }
        Err(error)
    }

    fn clampable(&self, domain: DomainId) -> impl Iterator<Item = &DomainThread> {
        let threads = self.in_domain(domain);
        threads.filter(|thread| !thread.deadline.load(Relaxed))
    }

    /// The registered threads of `domain`.
    fn in_domain(&self, domain: DomainId) -> impl Iterator<Item = &DomainThread> {
        let members = self.of_vcpus.iter();
        let members = members.filter(move |thread| thread.domain == domain);
        members.filter(|thread| thread.is_registered.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vcpufreq_device::Util;

    const DOMAIN: DomainId = DomainId(0);

    /// Makes the calling thread SCHED_DEADLINE, which needs privilege.
    fn become_deadline() -> io::Result<()> {
        SchedAttr::deadline(1_000_000, 100_000_000).set(Tid::current())
    }

    #[test]
    fn a_clamp_is_what_was_put() {
        let last = LastClamp(AtomicU32::new(LastClamp::UNKNOWN));
        assert_eq!(last.get(), None);
        for (min, max) in [(0, 1024), (329, 329), (1024, 1024), (0, 0)] {
            let (min, max) = (Util::saturating(min), Util::saturating(max));
            last.put(Some(Clamp { min, max }));
            assert_eq!(last.get(), Some(Clamp { min, max }));
        }
    }

    #[test]
    fn an_unplugged_vcpu_has_no_thread() {
        let threads = DomainThreads::new(&[DOMAIN]);
        let registered = threads.register(VcpuId(0), HostThread::own(Tid::current()));
        assert!(registered.is_ok());
        assert_eq!(threads.check_applies(DOMAIN), Ok(()));
        threads.unregister(VcpuId(0));
        let none = ActuateError::NoThread { domain: DOMAIN };
        assert_eq!(threads.check_applies(DOMAIN), Err(none));
        assert_eq!(threads.clampable(DOMAIN).count(), 0);
    }

    /// A request doesn't query the policy: the result of the last look counts.
    #[test]
    fn a_thread_that_becomes_sched_deadline_is_found_by_a_look() {
        let threads = DomainThreads::new(&[DOMAIN]);
        let answers = thread::scope(|scope| {
            let vcpu = scope.spawn(|| {
                threads.register(VcpuId(0), HostThread::own(Tid::current()))?;
                become_deadline()?;
                let before = threads.check_applies(DOMAIN);
                assert_eq!(threads.refresh_deadline_threads(), []);
                let after = threads.check_applies(DOMAIN);
                SchedAttr::default().set(Tid::current())?;
                assert_eq!(threads.refresh_deadline_threads(), [VcpuId(0)]);
                assert_eq!(threads.check_applies(DOMAIN), Ok(()));
                Ok::<_, io::Error>((before, after))
            });
            vcpu.join().unwrap()
        });
        match answers {
            Err(error) => println!("SKIP: no SCHED_DEADLINE here: {error}"),
            Ok(answers) => {
                let (domain, reason) = (DOMAIN, DEADLINE);
                let after = Err(ActuateError::NotApplicable { domain, reason });
                assert_eq!(answers, (Ok(()), after));
            }
        }
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
