// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clamps on groups: `cpu.uclamp.min` and `.max` of a threaded cgroup v2 per domain.
//!
//! One write clamps all threads of a domain, and unlike `sched_setattr` it takes no running
//! thread off its run queue, so that the frequency doesn't dip.
//!
//! The maximum is written first on the way up, the minimum first on the way down. The kernel's
//! effective minimum of a group is the lower one of its two values (`cpu_util_update_eff`). From
//! 300..300 to 500..500 the thread therefore sees 300..500 in between, as it does on the way back:
//! the floor is never below the lower request.

#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use vcpufreq_device::{ActuateError, Actuator, Clamp, DomainId, Util, VcpuId};

use super::HostRoot;
use super::adopted_groups::AdoptedGroups;
use super::cgroup::{self, CgroupTree, GroupRecord};
use super::cgroup_error::CgroupError;
use super::cgroup_fs::write;
use super::placement::Placement;
use super::sys::Tid;
use super::text::errno;
use super::thread_actuator::{DomainThreads, prepare_thread};

/// A file that another part of the host has written to: no clamp has this value.
const UNKNOWN: u16 = u16::MAX;

/// Clamps the group of a domain.
#[derive(Debug)]
pub struct CgroupActuator {
    /// The groups that it has made; `None` in a partition.
    record: Option<GroupRecord>,
    /// The threads are in their groups already.
    adopted: bool,
    /// In order of their numbers; of groups that are adopted, a domain has one for each vCPU.
    domains: Box<[DomainGroup]>,
    threads: DomainThreads,
}

#[derive(Debug)]
struct DomainGroup {
    id: DomainId,
    /// Its `cgroup.threads`.
    members: PathBuf,
    min: ClampFile,
    max: ClampFile,
}

/// One of a group's two clamp files, kept open, and what it holds.
#[derive(Debug)]
struct ClampFile {
    file: File,
    value: AtomicU16,
}

impl CgroupActuator {
    /// Makes the groups for vCPUs whose domains are `domains` (in order of the vCPUs' numbers) at
    /// `place`, and moves the VMM's process there. On failure nothing of it stays.
    ///
    /// # Errors
    /// [`CgroupError::Taken`] when a process is in that group already, [`CgroupError::Busy`] when a
    /// dead VMM's threads there are still ending, [`CgroupError::InternalProcesses`] when other
    /// processes are in the process' own group, [`CgroupError::NoUclamp`] from a kernel without
    /// uclamp on groups; else [`CgroupError::File`], such as `EACCES`, or `EAGAIN` over
    /// `cgroup.max.descendants`.
    pub fn create(
        tree: &dyn CgroupTree,
        place: &Placement,
        domains: &[DomainId],
    ) -> Result<Self, CgroupError> {
        let record = place.record(std::process::id());
        // Before anything that would be undone on failure.
        cgroup::check_unused(&record.group)?;
        let mut ids = domains.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let made = cgroup::create(tree, &record, &ids, place.process);
        let opened = made.and_then(|()| {
            let groups = ids.iter();
            let groups = groups.map(|id| DomainGroup::open(&record.domain(*id), *id));
            groups.collect::<Result<_, _>>()
        });
        match opened {
            Ok(domains_open) => Ok(Self {
                record: Some(record),
                adopted: false,
                domains: domains_open,
                threads: DomainThreads::new(domains),
            }),
            Err(error) => {
                // The first failure is the one to tell.
                drop(cgroup::remove(tree, &record));
                Err(error)
            }
        }
    }

    /// For existing groups: `group` returns a domain's. Their maker removes them.
    ///
    /// # Errors
    /// [`CgroupError::File`] with the clamp file that can't be opened for writing: `ENOENT` when
    /// the group or uclamp is missing, `EACCES`. The groups stay as they were.
    pub fn within(
        group: impl Fn(DomainId) -> PathBuf,
        domains: &[DomainId],
    ) -> Result<Self, CgroupError> {
        let mut ids = domains.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let groups = ids.iter().map(|id| DomainGroup::open(&group(*id), *id));
        Ok(Self {
            record: None,
            adopted: false,
            domains: groups.collect::<Result<_, _>>()?,
            threads: DomainThreads::new(domains),
        })
    }

    /// For groups that a VMM's manager has made, one for each vCPU that has a thread. Raise what
    /// caps them first.
    /// [`AdoptedGroups::put_back`] undoes the rest.
    ///
    /// # Errors
    /// As [`Self::within`].
    pub fn adopt(groups: &AdoptedGroups, domains: &[DomainId]) -> Result<Self, CgroupError> {
        let of_vcpus = (0..=u16::MAX).map(VcpuId).zip(domains);
        let of_vcpus = of_vcpus.filter_map(|(vcpu, id)| Some((groups.of_vcpu(vcpu)?, *id)));
        let open = of_vcpus.map(|(group, id)| DomainGroup::open(group, id));
        let mut open = open.collect::<Result<Vec<_>, _>>()?;
        open.sort_by_key(|group| group.id);
        let actuator = Self {
            record: None,
            adopted: true,
            domains: open.into(),
            threads: DomainThreads::new(domains),
        };
        // They may hold anything.
        actuator.forget();
        Ok(actuator)
    }

    /// What removes the groups that it has made, from this process or another one.
    #[must_use]
    pub fn record(&self) -> Option<&GroupRecord> {
        self.record.as_ref()
    }

    /// The same for vCPUs that are threads of process `pid`, as
    /// [`ThreadActuator::for_process`](super::ThreadActuator::for_process).
    #[must_use]
    pub fn for_process(self, root: &HostRoot, pid: u32) -> Self {
        let threads = self.threads.for_process(root, pid);
        Self { threads, ..self }
    }

    /// Registers `tid` as the thread of `vcpu` and moves it into its domain's group. Clears the
    /// thread's own clamp once: SCHED_FIFO and SCHED_RR threads start with the maximum, which would
    /// override the group's.
    ///
    /// # Errors
    /// `NotFound` when there is no such vCPU, or the process of [`Self::for_process`] has no such
    /// thread. Kind `Other` with a [`CgroupError::File`] when the kernel refuses the move (`ESRCH`:
    /// the thread has ended; `EACCES`): the thread stays in its group. If only clearing the thread's
    /// own clamp fails, the error is as of
    /// [`ThreadActuator::register_thread`](super::ThreadActuator::register_thread), and the thread
    /// is in its new group.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> io::Result<()> {
        let domain = self.threads.domain(vcpu).ok_or(io::ErrorKind::NotFound)?;
        let group = self.groups(domain).next().ok_or(io::ErrorKind::NotFound)?;
        let thread = self.threads.find(tid)?;
        if !self.adopted {
            let tid = thread.tid()?.to_string();
            write(&group.members, &tid).map_err(io::Error::other)?;
        }
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

    /// Forgets the clamps in force. To be called when another part of the host takes over writing
    /// them.
    pub fn forget(&self) {
        for group in &self.domains {
            for file in [&group.min, &group.max] {
                file.value.store(UNKNOWN, Relaxed);
            }
        }
    }

    /// The directory of a domain's group.
    #[must_use]
    pub fn dir(&self, domain: DomainId) -> Option<&Path> {
        self.groups(domain).next()?.members.parent()
    }

    fn groups(&self, domain: DomainId) -> impl Iterator<Item = &DomainGroup> {
        let first = self.domains.partition_point(|group| group.id < domain);
        let groups = self.domains[first..].iter();
        groups.take_while(move |group| group.id == domain)
    }
}

impl Actuator for CgroupActuator {
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        self.threads.check_applies(domain)?;
        self.groups(domain).try_for_each(|group| group.set(clamp))
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

impl DomainGroup {
    fn open(dir: &Path, id: DomainId) -> Result<Self, CgroupError> {
        Ok(Self {
            id,
            members: dir.join("cgroup.threads"),
            min: ClampFile::open(&dir.join("cpu.uclamp.min"), Clamp::NONE.min)?,
            max: ClampFile::open(&dir.join("cpu.uclamp.max"), Clamp::NONE.max)?,
        })
    }

    fn set(&self, clamp: Clamp) -> Result<(), ActuateError> {
        let min = (&self.min, clamp.min, "a write of cpu.uclamp.min");
        let max = (&self.max, clamp.max, "a write of cpu.uclamp.max");
        let up = clamp.max.get() > self.max.value.load(Relaxed);
        for (file, util, call) in if up { [max, min] } else { [min, max] } {
            file.set(util).map_err(|error| ActuateError::Refused {
                domain: self.id,
                call,
                errno: errno(&error),
            })?;
        }
        Ok(())
    }
}

impl ClampFile {
    /// The file of a new group, which holds `value`.
    fn open(path: &Path, value: Util) -> Result<Self, CgroupError> {
        let file = OpenOptions::new().write(true).open(path);
        let file = file.map_err(|error| CgroupError::File {
            path: path.to_path_buf(),
            error,
        })?;
        Ok(Self {
            file,
            value: AtomicU16::new(value.get()),
        })
    }

    /// Makes it hold `util`; one write, or none when it does already.
    fn set(&self, util: Util) -> io::Result<()> {
        if self.value.load(Relaxed) != util.get() {
            self.file.write_all_at(&percent_bytes(util), 0)?;
            self.value.store(util.get(), Relaxed);
        }
        Ok(())
    }
}

/// `util` as `cpu.uclamp.min` and `.max` take it: percent with two decimals, at a fixed width
/// (`032.13`), without an allocation on a guest's path. The kernel reads decimal numbers, leading
/// zeros or not.
///
/// The kernel reads `p` hundredths of a percent as `DIV_ROUND_CLOSEST(p * 1024, 10000)`. Rounding
/// to the nearest is off by half a hundredth at most, 0.0512 of a utilization step. The kernel's
/// own rounding therefore returns to `util`: 329 is written as 32.13, which is 329.01.
fn percent_bytes(util: Util) -> [u8; 6] {
    let hundredths = (u32::from(util.get()) * 10_000 + 512) / 1024;
    let digit = |scale: u32| b'0' + (hundredths / scale % 10).to_le_bytes()[0];
    [
        digit(10_000),
        digit(1_000),
        digit(100),
        b'.',
        digit(10),
        digit(1),
    ]
}

#[cfg(test)]
mod tests {
    //! The clamp that the kernel reads is the clamp.
    use super::*;

    /// What the kernel makes of a text (`capacity_from_percent` with `cgroup_parse_float`).
    fn kernel_reads(text: &str) -> u64 {
        let (whole, frac) = text.split_once('.').unwrap();
        assert_eq!(frac.len(), 2);
        let hundredths = whole.parse::<u64>().unwrap() * 100 + frac.parse::<u64>().unwrap();
        assert!(hundredths <= 10_000, "ERANGE for {text}");
        (hundredths * 1024 + 5_000) / 10_000
    }

    #[test]
    fn every_utilization_comes_back_from_the_kernel_exactly() {
        for util in (0..=1024).filter_map(Util::new) {
            let bytes = percent_bytes(util);
            let text = std::str::from_utf8(&bytes).unwrap();
            assert_eq!(kernel_reads(text), u64::from(util.get()));
        }
    }
}
