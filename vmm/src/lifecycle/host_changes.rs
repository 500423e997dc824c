// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a running VMM changes on its host. Record and guardian come before the first change, and go
//! after the last is undone.

use std::{process, thread::sleep, time::Duration};

use anyhow::{Context, anyhow};
use vcpufreq_device::host::{self, CgroupError, GroupRecord, HostRoot, KernelTree};
use vcpufreq_rt::{KernelHost, RtHostChanges, Vcpus};

use crate::{
    lifecycle::cleanup::{Cleaned, Cleaner},
    lifecycle::guardian::Guardian,
    lifecycle::state::{self, Record, StateDir, owner_of},
};

/// How often to try to remove a cgroup that a thread is just leaving.
const TRIES: u32 = 100;
/// The time between two tries.
const TRY_EVERY: Duration = Duration::from_millis(5);

/// What this VMM is about to make and to use.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Its cgroups, if it makes any.
    pub groups: Option<GroupRecord>,
    /// What it changes for real-time vCPUs, if it has any.
    pub rt: Option<RtHostChanges>,
    /// The pCPUs that its vCPUs are pinned to.
    pub pinned: Vec<u32>,
}

/// What this VMM has changed on the host, as recorded.
#[derive(Debug)]
pub struct HostChanges {
    dir: StateDir,
    groups: Option<GroupRecord>,
    rt: Option<RtHostChanges>,
    guardian: Guardian,
}

impl HostChanges {
    /// Removes what dead VMMs left, then starts a guardian and records what this process is about
    /// to make. `report` gets a line for each thing that could not be removed.
    ///
    /// # Errors
    /// Why there can't be a record or a guardian, or which guest has one of the pCPUs. Nothing is
    /// left then.
    pub fn begin(wanted: Wanted, report: impl Fn(&str)) -> anyhow::Result<Self> {
        let host = HostRoot::default();
        let dir = StateDir::of_user()?;
        let Cleaned { left, .. } = Cleaner::new(&host).by_records(&dir)?;
        left.iter().for_each(|why| report(why));
        let pid = process::id();
        let mut record = Record {
            owner: owner_of(&host, pid)?,
            groups: wanted.groups.clone(),
            rt: wanted.rt,
            pinned: wanted.pinned,
        };
        let guardian = Guardian::start(&dir.record_path(pid))?;
        match write_alone(&dir, &host, &mut record) {
            Ok(()) => Ok(Self {
                dir,
                groups: wanted.groups,
                rt: record.rt,
                guardian,
            }),
            Err(error) => {
                // There is nothing else to remove yet.
                drop(state::remove(&dir.record_path(pid)));
                guardian.dismiss();
                Err(error)
            }
        }
    }

    /// Undoes everything, the guardian last. The vCPU threads have ended.
    ///
    /// # Errors
    /// What could not be removed. The guardian stays and tries again when this
    /// process is gone.
    pub fn undo(self) -> anyhow::Result<()> {
        if let Some(groups) = &self.groups {
            remove_groups(groups).context("can't remove this VM's cgroup")?;
        }
        if let Some(rt) = &self.rt {
            let host = HostRoot::default();
            rt.undo(&host, &KernelTree, process::id(), TRY_EVERY * TRIES)
                .context("can't undo what was changed for real-time vCPUs")?;
        }
        let path = self.dir.record_path(process::id());
        state::remove(&path).with_context(|| format!("can't remove {}", path.display()))?;
        self.guardian.dismiss();
        Ok(())
    }
}

/// Writes the record, if no other guest has vCPUs in the way. From then on this process alone changes
/// these pCPUs' bounds, so the bounds are read again: a guest may have ended and put its back since.
fn write_alone(dir: &StateDir, host: &HostRoot, record: &mut Record) -> anyhow::Result<()> {
    dir.write(record)?;
    // After the record: of two that start at once, one sees the other.
    check_free(dir, host, record)?;
    let Some(rt) = &mut record.rt else {
        return Ok(());
    };
    rt.look_again(host)?;
    dir.write(record)
}

fn remove_groups(groups: &GroupRecord) -> Result<(), CgroupError> {
    for _ in 1..TRIES {
        match host::remove(&KernelTree, groups) {
            Err(CgroupError::Busy { .. }) => sleep(TRY_EVERY),
            done => return done,
        }
    }
    host::remove(&KernelTree, groups)
}

/// Checks that no pCPU of a real-time vCPU has a pinned vCPU of another guest, whichever of the two
/// guests came first. vCPUs that aren't pinned don't count.
///
/// # Errors
/// Which guest has one there; or the records can't be listed.
fn check_free(dir: &StateDir, host: &HostRoot, mine: &Record) -> anyhow::Result<()> {
    let mine = mine.cpus();
    let look = KernelHost::from(host);
    for (_, other) in dir.list()? {
        let Ok(other) = other.map(|record| record.cpus()) else {
            continue;
        };
        if other.owner.pid == mine.owner.pid {
            continue;
        }
        let checked = other
            .check_off(&look, &mine.real_time, Vcpus::Pinned)
            .and_then(|()| other.check_off(&look, &mine.pinned, Vcpus::RealTime));
        checked.map_err(|why| anyhow!("{why}, or pin this one to other CPUs"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Promise: a pCPU has one real-time guest.
    use vcpufreq_device::fakes::FakeHost;

    use super::*;
    use crate::lifecycle::state::ROOT_DIR;

    fn changes(cpus: &[u32]) -> RtHostChanges {
        RtHostChanges {
            cpus: cpus.to_vec(),
            idle: Vec::new(),
            partition: None,
        }
    }

    /// Records of processes, in a directory and in procfs.
    struct Scene {
        host: FakeHost,
        dir: StateDir,
    }

    impl Scene {
        fn new() -> Self {
            let host = FakeHost::empty();
            host.write("proc/sys/kernel/random/boot_id", "boot");
            host.write("run/empty", "");
            let dir = StateDir::at(host.root().path(ROOT_DIR));
            Self { host, dir }
        }

        /// A running guest that has real-time vCPUs on `rt`, and others pinned to `pinned`.
        fn guest(&self, pid: u32, rt: &[u32], pinned: &[u32]) -> Record {
            let stat = format!("{pid} (vcpufreq) S {}4000", "1 ".repeat(18));
            self.host.write(&format!("proc/{pid}/stat"), stat);
            Record {
                owner: owner_of(&self.host.root(), pid).unwrap(),
                groups: None,
                rt: (!rt.is_empty()).then(|| changes(rt)),
                pinned: [rt, pinned].concat(),
            }
        }

        /// What another one would hear.
        fn told(&self, rt: &[u32], pinned: &[u32]) -> Option<String> {
            let mine = self.guest(8, rt, pinned);
            let told = check_free(&self.dir, &self.host.root(), &mine).err();
            told.map(|error| error.to_string())
        }
    }

    #[test]
    fn a_real_time_vcpus_cpu_is_nobody_elses() {
        let scene = Scene::new();
        scene.dir.write(&scene.guest(7, &[3], &[0, 1])).unwrap();
        scene.dir.write(&scene.guest(8, &[3], &[0])).unwrap();
        assert_eq!(scene.told(&[2], &[0, 1]), None, "beside it, and its own");
        assert_eq!(scene.told(&[], &[]), None, "not pinned");
        for (rt, pinned) in [(&[3][..], &[][..]), (&[], &[3]), (&[], &[0, 1, 2, 3])] {
            let line = scene.told(rt, pinned).unwrap();
            assert!(
                line.contains("CPU 3") && line.contains("process 7 already"),
                "{line}"
            );
            assert_eq!(line.lines().count(), 1);
        }
        let line = scene.told(&[1], &[]).unwrap();
        assert!(line.contains("process 7 is pinned to CPU 1"), "{line}");
    }

    #[test]
    fn what_a_killed_guest_left_comes_first() {
        let scene = Scene::new();
        scene.dir.write(&scene.guest(7, &[3], &[0])).unwrap();
        scene.host.remove("proc/7");
        let line = scene.told(&[3], &[]).unwrap();
        assert!(line.contains("vcpufreq cleanup"), "{line}");
        assert_eq!(scene.told(&[0], &[]), None, "nothing was changed there");
    }

    #[test]
    fn apply_and_restore_read_what_is_recorded() {
        use vcpufreq_rt::{InTheWay, check_free};
        let scene = Scene::new();
        scene.dir.write(&scene.guest(7, &[3], &[0])).unwrap();
        let look = KernelHost::from(&scene.host.root());
        let of = |cpu: u32, whose| check_free(&look, &[cpu].into_iter().collect(), whose);
        assert!(matches!(
            of(3, Vcpus::RealTime),
            Err(InTheWay::RealTime { pid: 7, .. })
        ));
        assert!(matches!(
            of(0, Vcpus::Pinned),
            Err(InTheWay::Pinned { pid: 7, .. })
        ));
        assert_eq!(of(0, Vcpus::RealTime), Ok(()));
        assert_eq!(of(1, Vcpus::Pinned), Ok(()));
    }
}
