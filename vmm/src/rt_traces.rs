// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM changes on the host for real-time vCPUs while its guest runs, as it is recorded, and
//! how it is undone: by the VMM, or by whoever cleans up after it.

use std::{
    fs, io,
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::bail;
use serde::{Deserialize, Serialize};
use vcpufreq_device::host::{CgroupError, CgroupTree, PartitionGroups};

use crate::{
    facts::HostTree,
    state::{Record, Standing, StateDir},
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

/// Whether no other running VMM has one of this record's real-time pCPUs.
///
/// # Errors
/// When one has, or the records can't be listed.
pub fn check_free(dir: &StateDir, host: &HostTree, mine: &Record) -> anyhow::Result<()> {
    let Some(rt) = &mine.rt else {
        return Ok(());
    };
    for (_, other) in dir.list()? {
        let Ok(Record {
            owner,
            rt: Some(other),
            ..
        }) = other
        else {
            continue;
        };
        let shared = rt.cpus.iter().find(|cpu| other.cpus.contains(cpu));
        let runs = owner.pid != mine.owner.pid && owner.standing(host) == Standing::InUse;
        if let Some(cpu) = shared.filter(|_| runs) {
            bail!(
                "CPU {cpu} runs a real-time vCPU of the guest of process {} already; pin to another CPU",
                owner.pid
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Promises: bounds come back as they were, and a pCPU has one real-time guest.
    use vcpufreq_device::host::KernelTree;

    use super::*;
    use crate::{fake_host::FakeHost, state::Owner};

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
    fn a_cpu_of_a_running_guest_is_refused() {
        let host = FakeHost::empty();
        host.write("proc/sys/kernel/random/boot_id", "boot");
        let stat = |pid: u32| format!("{pid} (vcpufreq) S {}4000", "1 ".repeat(18));
        let record = |pid: u32, cpus: &[u32]| {
            host.write(&format!("proc/{pid}/stat"), stat(pid));
            Record {
                owner: Owner::of(&host.root(), pid).unwrap(),
                groups: None,
                rt: Some(traces(cpus)),
            }
        };
        let dir = StateDir::at(host.root().path("run"));
        dir.write(&record(7, &[2, 3])).unwrap();
        let free = |pid, cpus: &[u32]| check_free(&dir, &host.root(), &record(pid, cpus));
        assert!(free(7, &[3]).is_ok(), "its own");
        assert!(free(8, &[1]).is_ok());
        let line = free(8, &[3]).unwrap_err().to_string();
        assert!(
            line.contains("CPU 3") && line.contains("process 7"),
            "{line}"
        );
        host.remove("proc/7");
        assert!(free(8, &[3]).is_ok(), "it has ended");
    }
}
