// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM changes on the host for real-time vCPUs while its guest runs, as it is recorded, and
//! how it is undone: by the VMM, or by whoever cleans up after it.

use std::{
    fs, io,
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use vcpufreq_device::host::{CgroupError, CgroupTree, PartitionGroups};
use vcpufreq_rt::Vcpus;

use crate::{
    facts::HostTree,
    state::{Record, StateDir},
};

/// How often to try to remove a cgroup that a thread is just leaving.
const TRY_EVERY: Duration = Duration::from_millis(5);

/// The latency bound of a pCPU as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleBound {
    /// The pCPU.
    pub cpu: u32,
    /// The text of its `pm_qos_resume_latency_us`.
    pub old: String,
}

/// Where the VM's groups are in a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InPartition {
    /// The partition's cgroup.
    pub top: PathBuf,
    /// Where the process was before.
    pub origin: PathBuf,
}

/// What is changed for real-time vCPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RtTraces {
    /// Their pCPUs.
    pub cpus: Vec<u32>,
    /// Bounds that are changed.
    pub idle: Vec<IdleBound>,
    /// Groups in a partition.
    pub partition: Option<InPartition>,
}

/// The file of a pCPU's latency bound.
pub fn bound_file(host: &HostTree, cpu: u32) -> PathBuf {
    host.path(format!(
        "sys/devices/system/cpu/cpu{cpu}/power/pm_qos_resume_latency_us"
    ))
}

impl RtTraces {
    /// Takes the bounds as they are now for what was before.
    ///
    /// # Errors
    /// When one can't be read.
    pub fn look_again(&mut self, host: &HostTree) -> anyhow::Result<()> {
        for IdleBound { cpu, old } in &mut self.idle {
            let path = bound_file(host, *cpu);
            let now = fs::read_to_string(&path)
                .with_context(|| format!("{} can't be read", path.display()))?;
            now.trim().clone_into(old);
        }
        Ok(())
    }

    /// Undoes it for process `pid`; what was removed. Groups whose threads are ending are tried
    /// again for so long.
    ///
    /// # Errors
    /// What could not be undone.
    pub fn undo(
        &self,
        host: &HostTree,
        tree: &dyn CgroupTree,
        pid: u32,
        patience: Duration,
    ) -> Result<Vec<PathBuf>, CgroupError> {
        for IdleBound { cpu, old } in &self.idle {
            let path = bound_file(host, *cpu);
            match fs::write(&path, old) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(CgroupError::File { path, error });
                }
                _ => {}
            }
        }
        let Some(InPartition { top, origin }) = self.partition.clone() else {
            return Ok(Vec::new());
        };
        let groups = PartitionGroups {
            top,
            origin,
            pid,
            rt: Vec::new(),
        };
        let there = groups.rest();
        let deadline = Instant::now() + patience;
        let was_there = there.exists();
        loop {
            match groups.remove(tree) {
                Err(CgroupError::Busy { .. }) if Instant::now() < deadline => sleep(TRY_EVERY),
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        Ok(was_there.then_some(there).into_iter().collect())
    }
}

/// Whether no other VMM is in this one's way: nobody's vCPU may be pinned to a real-time vCPU's
/// pCPU, whichever of the two guests came first. One that isn't pinned may run there, where nothing
/// keeps it off.
///
/// # Errors
/// When one is, or the records can't be listed.
pub fn check_free(dir: &StateDir, host: &HostTree, mine: &Record) -> anyhow::Result<()> {
    let mine = mine.cpus();
    let look = host.look();
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
    //! Promises: bounds come back as they were, and a pCPU has one real-time guest.
    use vcpufreq_device::host::KernelTree;

    use super::*;
    use crate::{
        fake_host::FakeHost,
        state::{ROOT_DIR, owner_of},
    };

    fn traces(cpus: &[u32]) -> RtTraces {
        let bound = |cpu: &u32| IdleBound {
            cpu: *cpu,
            old: "n/a".to_owned(),
        };
        RtTraces {
            cpus: cpus.to_vec(),
            idle: cpus.iter().map(bound).collect(),
            partition: None,
        }
    }

    #[test]
    fn bounds_come_back_and_a_cpu_that_is_gone_is_no_error() {
        let host = FakeHost::two_plus_two();
        host.write(
            "sys/devices/system/cpu/cpu3/power/pm_qos_resume_latency_us",
            "50",
        );
        let undone = traces(&[3, 9]).undo(&host.root(), &KernelTree, 7, Duration::ZERO);
        assert!(undone.unwrap().is_empty());
        let now = fs::read_to_string(bound_file(&host.root(), 3)).unwrap();
        assert_eq!(now, "n/a");
    }

    #[test]
    fn a_bound_is_what_it_was_when_nobody_else_was_there() {
        let host = FakeHost::two_plus_two();
        let file = "sys/devices/system/cpu/cpu3/power/pm_qos_resume_latency_us";
        host.write(file, "50\n");
        let mut traces = traces(&[3]);
        traces.look_again(&host.root()).unwrap();
        assert_eq!(traces.idle[0].old, "50");
        host.remove(file);
        assert!(traces.look_again(&host.root()).is_err());
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
                rt: (!rt.is_empty()).then(|| traces(rt)),
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
        let look = scene.host.root().look();
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
