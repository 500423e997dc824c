// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host changes that a VMM makes for real-time vCPUs while its guest runs, as its record lists
//! them. The VMM undoes them, or the program that cleans up after it.

use std::{
    fs, io,
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{CgroupError, CgroupTree, HostRoot, PartitionGroups};

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

/// The place of a VM's groups in a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InPartition {
    /// The partition's cgroup.
    pub top: PathBuf,
    /// The cgroup that the VMM was in before.
    pub origin: PathBuf,
    /// The VMM's process, if that isn't the one that has made the groups.
    #[serde(default)]
    pub process: Option<u32>,
}

/// The changes that a VMM makes for its real-time vCPUs, as its record lists them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RtHostChanges {
    /// The pCPUs of the real-time vCPUs.
    pub cpus: Vec<u32>,
    /// The latency bounds that are changed, with their old values.
    pub idle: Vec<IdleBound>,
    /// The VM's groups, if they are in a partition.
    pub partition: Option<InPartition>,
}

/// The file of a pCPU's latency bound: µs, or `n/a` for none.
#[must_use]
pub fn bound_file(host: &HostRoot, cpu: u32) -> PathBuf {
    host.path(format!(
        "sys/devices/system/cpu/cpu{cpu}/power/pm_qos_resume_latency_us"
    ))
}

/// Has `remove` remove groups whose threads are just leaving.
///
/// # Errors
/// The last error of `remove`: [`CgroupError::Busy`] only after `patience`, all others at once.
pub fn remove_within(
    patience: Duration,
    remove: impl Fn() -> Result<(), CgroupError>,
) -> Result<(), CgroupError> {
    let deadline = Instant::now() + patience;
    loop {
        match remove() {
            Err(CgroupError::Busy { .. }) if Instant::now() < deadline => sleep(TRY_EVERY),
            done => return done,
        }
    }
}

impl RtHostChanges {
    /// Records the current bounds as the old ones.
    ///
    /// # Errors
    /// [`CgroupError::File`] when one can't be read.
    pub fn look_again(&mut self, host: &HostRoot) -> Result<(), CgroupError> {
        for IdleBound { cpu, old } in &mut self.idle {
            let path = bound_file(host, *cpu);
            match fs::read_to_string(&path) {
                Ok(now) => now.trim().clone_into(old),
                Err(error) => return Err(CgroupError::File { path, error }),
            }
        }
        Ok(())
    }

    /// Undoes it for the VMM or server with process number `pid`; returns the groups that were removed. A
    /// bound whose CPU is gone counts as undone. Groups whose threads are still ending are tried
    /// again for as long as `patience`.
    ///
    /// # Errors
    /// What could not be undone: [`CgroupError::Busy`] when a group had threads to the end,
    /// [`CgroupError::File`] for a file that couldn't be written.
    pub fn undo(
        &self,
        host: &HostRoot,
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
        let Some(partition) = self.partition.clone() else {
            return Ok(Vec::new());
        };
        let groups = PartitionGroups {
            top: partition.top,
            origin: partition.origin,
            pid,
            process: partition.process.unwrap_or(pid),
            rt: Vec::new(),
        };
        let there = groups.rest();
        let was_there = there.exists();
        remove_within(patience, || groups.remove(tree))?;
        Ok(was_there.then_some(there).into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    //! Promise: bounds come back as they were.
    use std::{fs, time::Duration};

    use crate::KernelTree;
    use tempfile::TempDir;

    use super::*;

    /// A host that has CPU 3, with this bound.
    fn host(bound: &str) -> (TempDir, HostRoot) {
        let dir = TempDir::new().unwrap();
        let host = HostRoot::at(dir.path());
        let path = bound_file(&host, 3);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bound).unwrap();
        (dir, host)
    }

    fn changes(cpus: &[u32]) -> RtHostChanges {
        let bound = |cpu: &u32| IdleBound {
            cpu: *cpu,
            old: "n/a".to_owned(),
        };
        RtHostChanges {
            cpus: cpus.to_vec(),
            idle: cpus.iter().map(bound).collect(),
            partition: None,
        }
    }

    #[test]
    fn bounds_come_back_and_a_cpu_that_is_gone_is_no_error() {
        let (_dir, host) = host("50");
        let undone = changes(&[3, 9]).undo(&host, &KernelTree, 7, Duration::ZERO);
        assert!(undone.unwrap().is_empty());
        let now = fs::read_to_string(bound_file(&host, 3)).unwrap();
        assert_eq!(now, "n/a");
    }

    #[test]
    fn a_bound_is_what_it_was_when_nobody_else_was_there() {
        let (_dir, host) = host("50\n");
        let mut changes = changes(&[3]);
        changes.look_again(&host).unwrap();
        assert_eq!(changes.idle[0].old, "50");
        fs::remove_file(bound_file(&host, 3)).unwrap();
        assert!(changes.look_again(&host).is_err());
    }
}
