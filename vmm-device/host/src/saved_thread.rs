// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thread of another process that a server clamps and pins for a while.

#![forbid(unsafe_code)]

use std::fs;
use std::io;

use super::HostRoot;
use super::cpu_list::CpuList;
use super::host_thread::HostThread;
use super::proc_text::stat_field;
use super::sys::{SchedAttr, Tid, affinity_of, pin};

/// What a fair thread has without a clamp of its own, and the value that takes its clamp away.
const NO_CLAMP: (u32, u32) = (0, 1024);
const RESET: u32 = u32::MAX;

/// A thread as it was: what a server changes of it, to be put back.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SavedThread {
    /// Its process.
    pub pid: u32,
    /// Its number.
    pub tid: i32,
    /// When it started, in clock ticks since the boot: another thread of this number has another.
    pub started: u64,
    /// Its clamps (uclamp.min, uclamp.max), 0 to 1024 each, as sched_getattr(2) has them.
    pub clamp: (u32, u32),
    /// Its children start without its clamps.
    pub reset_on_fork: bool,
    /// The pCPUs that it was allowed, if that is changed.
    pub pcpus: Option<CpuList>,
    /// How it was scheduled, if that is changed.
    #[cfg_attr(feature = "serde", serde(default))]
    pub policy: Option<PolicyBefore>,
}

/// A scheduling policy with its parameters, as sched_getattr(2) has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PolicyBefore {
    policy: u32,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

impl PolicyBefore {
    fn read(tid: Tid) -> io::Result<Self> {
        let attr = SchedAttr::read(tid)?;
        Ok(Self {
            policy: attr.policy,
            nice: SchedAttr::nice_of(tid)?,
            priority: attr.priority,
            runtime_ns: attr.runtime_ns,
            deadline_ns: attr.deadline_ns,
            period_ns: attr.period_ns,
        })
    }

    /// The same, with the flags of `now` that a policy goes with.
    fn with_flags_of(self, now: &SchedAttr) -> SchedAttr {
        SchedAttr {
            policy: self.policy,
            flags: now.flags & SchedAttr::RESET_ON_FORK,
            nice: self.nice,
            priority: self.priority,
            runtime_ns: self.runtime_ns,
            deadline_ns: self.deadline_ns,
            period_ns: self.period_ns,
            ..SchedAttr::default()
        }
    }
}

impl SavedThread {
    /// Thread `tid` of process `pid`, which is going to be pinned, or not.
    ///
    /// # Errors
    /// `ESRCH`, or `NotFound` in procfs, when the process has no such thread; `InvalidData` when
    /// procfs shows no start.
    pub fn look(root: &HostRoot, pid: u32, tid: Tid, pinned: bool) -> io::Result<Self> {
        let attr = SchedAttr::read(tid)?;
        Ok(Self {
            pid,
            tid: tid.get(),
            started: started(root, pid, tid)?,
            clamp: (attr.util_min, attr.util_max),
            reset_on_fork: attr.flags & SchedAttr::RESET_ON_FORK != 0,
            pcpus: pinned.then(|| affinity_of(tid)).transpose()?,
            policy: None,
        })
    }

    /// The same, which is going to be scheduled otherwise.
    ///
    /// # Errors
    /// `ESRCH` when it has ended.
    pub fn rescheduled(self) -> io::Result<Self> {
        let tid = Tid::new(self.tid).ok_or(io::ErrorKind::InvalidData)?;
        let policy = Some(PolicyBefore::read(tid)?);
        Ok(Self { policy, ..self })
    }

    /// Whether it hasn't ended; another thread may have its number.
    #[must_use]
    pub fn lives(&self, root: &HostRoot) -> bool {
        let tid = Tid::new(self.tid);
        tid.is_some_and(|tid| started(root, self.pid, tid).ok() == Some(self.started))
    }

    /// Puts its scheduling policy back, if that was changed. To be called first: a real-time thread that
    /// leaves its pCPU starves others. A real-time policy that its children inherit is not the server's,
    /// but what its manager has set since, and stays.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_NICE for another user's thread, or for a real-time policy that it had.
    pub fn put_policy_back(&self, root: &HostRoot) -> io::Result<()> {
        let Some(policy) = self.policy else {
            return Ok(());
        };
        self.on_thread(root, |thread| {
            let tid = thread.tid()?;
            let now = SchedAttr::read(tid)?;
            let is_managers = now.is_real_time() && now.flags & SchedAttr::RESET_ON_FORK == 0;
            match is_managers || PolicyBefore::read(tid)? == policy {
                true => Ok(()),
                false => policy.with_flags_of(&now).set(thread.tid()?),
            }
        })
    }

    /// Puts the rest of it back; nothing is to be done for a thread that has ended.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_NICE for another user's thread; `EINVAL` when none of its pCPUs is
    /// left to it, or from Linux before 5.11, which can't take a clamp away; `EBUSY` for a
    /// SCHED_DEADLINE thread that would leave pCPUs of its root domain. The pCPUs come first: when
    /// they are refused, the clamps stay too.
    pub fn put_back(&self, root: &HostRoot) -> io::Result<()> {
        self.on_thread(root, |thread| self.put_back_on(thread))
    }

    /// Has `put` put something back on it, if it has not ended.
    fn on_thread(
        &self,
        root: &HostRoot,
        put: impl FnOnce(&HostThread) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(tid) = Tid::new(self.tid) else {
            return Ok(());
        };
        let thread = HostThread::of_process(root, self.pid, tid);
        // Now the file is of the thread that is looked at, or that has ended.
        if !self.lives(root) {
            return Ok(());
        }
        let put = thread.and_then(|thread| put(&thread));
        // It may have ended since; and without uclamp in the kernel it has no clamps.
        put.or_else(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH | libc::EOPNOTSUPP) => Ok(()),
            _ => Err(error),
        })
    }

    fn put_back_on(&self, thread: &HostThread) -> io::Result<()> {
        if let Some(pcpus) = &self.pcpus {
            pin(thread.tid()?, pcpus.as_slice())?;
        }
        let attr = SchedAttr::read(thread.tid()?)?;
        if attr.policy == SchedAttr::DEADLINE {
            return Ok(());
        }
        let (util_min, util_max) = match self.clamp {
            NO_CLAMP => (RESET, RESET),
            clamp => clamp,
        };
        let clamped = SchedAttr {
            flags: attr.flags | SchedAttr::UTIL_CLAMP_MIN | SchedAttr::UTIL_CLAMP_MAX,
            util_min,
            util_max,
            ..attr
        };
        clamped.set(thread.tid()?)?;
        if self.reset_on_fork {
            return Ok(());
        }
        let inherited = SchedAttr {
            flags: attr.flags & !SchedAttr::RESET_ON_FORK,
            ..attr
        };
        // Takes CAP_SYS_NICE; without it the thread's children start without a clamp.
        let set = inherited.set(thread.tid()?);
        set.or_else(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => Ok(()),
            _ => Err(error),
        })
    }
}

/// Field 22 of its stat.
fn started(root: &HostRoot, pid: u32, tid: Tid) -> io::Result<u64> {
    let stat = fs::read_to_string(root.path(format!("proc/{pid}/task/{tid}/stat")))?;
    let started = stat_field(&stat, 22).and_then(|ticks| ticks.parse().ok());
    started.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    //! A thread is again as it was, and another one of its number is left alone.
    use std::thread;

    use super::*;

    #[test]
    fn a_pinned_thread_gets_its_cpus_back() {
        thread::spawn(|| {
            let (root, pid, tid) = (HostRoot::default(), std::process::id(), Tid::current());
            let before = affinity_of(tid).unwrap();
            let borrowed = SavedThread::look(&root, pid, tid, true).unwrap();
            pin(tid, &before.as_slice()[..1]).unwrap();
            let other = SavedThread {
                started: borrowed.started + 1,
                ..borrowed.clone()
            };
            assert!(borrowed.lives(&root) && !other.lives(&root));
            other.put_back(&root).unwrap();
            assert_eq!(affinity_of(tid).unwrap().as_slice().len(), 1);
            // A kernel without uclamp refuses the clamps, which come last.
            let put = borrowed
                .put_back(&root)
                .map_err(|error| error.raw_os_error());
            assert!(
                matches!(put, Ok(()) | Err(Some(libc::EOPNOTSUPP))),
                "{put:?}"
            );
            assert_eq!(affinity_of(tid).unwrap(), before);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_has_its_policy_again() {
        let (root, pid) = (HostRoot::default(), std::process::id());
        let tried = thread::spawn(move || {
            let tid = Tid::current();
            let borrowed = SavedThread::look(&root, pid, tid, false)?.rescheduled()?;
            let fifo = SchedAttr {
                policy: SchedAttr::FIFO,
                priority: 1,
                flags: SchedAttr::RESET_ON_FORK,
                ..SchedAttr::default()
            };
            fifo.set(tid)?;
            // Twice, as by a server and then its guardian.
            borrowed.put_policy_back(&root)?;
            borrowed.put_policy_back(&root)?;
            Ok::<_, io::Error>((PolicyBefore::read(tid)?, borrowed.policy))
        });
        match tried.join().unwrap() {
            Err(error) => println!("SKIP: this process may not raise priorities: {error}"),
            Ok((now, before)) => assert_eq!(Some(now), before),
        }
    }

    // libvirt schedules a vCPU after the server has.
    #[test]
    fn a_policy_that_its_manager_has_set_since_stays() {
        let (root, pid) = (HostRoot::default(), std::process::id());
        let tried = thread::spawn(move || {
            let tid = Tid::current();
            let borrowed = SavedThread::look(&root, pid, tid, false)?.rescheduled()?;
            let servers = SchedAttr {
                policy: SchedAttr::FIFO,
                priority: 1,
                flags: SchedAttr::RESET_ON_FORK,
                ..SchedAttr::default()
            };
            servers.set(tid)?;
            let managers = SchedAttr {
                flags: 0,
                ..servers
            };
            managers.set(tid)?;
            borrowed.put_policy_back(&root)?;
            SchedAttr::read(tid)
        });
        match tried.join().unwrap() {
            Err(error) => println!("SKIP: this process may not raise priorities: {error}"),
            Ok(now) => assert_eq!((now.policy, now.priority), (SchedAttr::FIFO, 1)),
        }
    }

    #[test]
    fn a_thread_that_has_ended_needs_nothing() {
        let (root, pid) = (HostRoot::default(), std::process::id());
        let ended = thread::spawn(move || {
            SavedThread::look(&HostRoot::default(), pid, Tid::current(), false)
        });
        ended.join().unwrap().unwrap().put_back(&root).unwrap();
    }
}
