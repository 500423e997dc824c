// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads of a VMM that run no vCPU. They stay off the pCPUs of real-time vCPUs: in a partition by
//! its cpuset, which new threads are born into; else by the pCPUs that each is allowed. A thread that a
//! vCPU's has started is where that is, until it is looked at.

use std::fs;

use anyhow::{Context, bail};
use vcpufreq_host::{
    CpuList, HostRoot, HostThread, PartitionGroups, SavedThread, Tid, affinity_of,
};

/// These threads of one VMM.
pub struct OtherThreads {
    host: HostRoot,
    pid: u32,
    vcpus: Vec<Tid>,
    /// The real-time vCPUs'.
    cpus: CpuList,
    partition: Option<PartitionGroups>,
}

impl OtherThreads {
    /// Those of process `pid` beside `vcpus`, to be kept off `cpus`.
    pub fn new(
        host: &HostRoot,
        (pid, vcpus): (u32, &[Option<Tid>]),
        cpus: CpuList,
        partition: Option<&PartitionGroups>,
    ) -> Self {
        Self {
            host: host.clone(),
            pid,
            vcpus: vcpus.iter().flatten().copied().collect(),
            cpus,
            partition: partition.cloned(),
        }
    }

    /// Those that [`Self::keep_off`] is going to change, as they are.
    ///
    /// # Errors
    /// When one may run on these pCPUs only: its manager wants it there.
    pub fn look(&self) -> anyhow::Result<Vec<SavedThread>> {
        if self.partition.is_some() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for tid in self.all()? {
            // One that has ended meanwhile is none.
            let Ok(allowed) = affinity_of(tid) else {
                continue;
            };
            if allowed.and(&self.cpus).is_empty() {
                continue;
            }
            if allowed.without(&self.cpus).is_empty() {
                bail!(
                    "its thread {tid}, which runs no vCPU, may run on real-time CPU {allowed} only; \
                     correct taskset, or its domain's <emulatorpin> and <iothreadpin>"
                );
            }
            found.extend(SavedThread::look(&self.host, self.pid, tid, true).ok());
        }
        Ok(found)
    }

    /// Takes them off these pCPUs. One that has ended meanwhile needs nothing.
    pub fn keep_off(&self) {
        if self.cpus.is_empty() {
            return;
        }
        if let Some(groups) = &self.partition {
            return groups.keep_others_out(&self.vcpus);
        }
        for tid in self.all().unwrap_or_default() {
            // It runs where it is allowed, or has ended: another look is in a second.
            let _ = self.move_off(tid);
        }
    }

    fn move_off(&self, tid: Tid) -> std::io::Result<()> {
        let thread = HostThread::of_process(&self.host, self.pid, tid)?;
        let allowed = affinity_of(thread.tid()?)?;
        if allowed.and(&self.cpus).is_empty() {
            return Ok(());
        }
        let mut rest = allowed.without(&self.cpus);
        if rest.is_empty() {
            // A vCPU's thread has started it.
            let main = i32::try_from(self.pid).ok().and_then(Tid::new);
            let main = main.ok_or(std::io::ErrorKind::InvalidInput)?;
            rest = affinity_of(main)?.without(&self.cpus);
        }
        vcpufreq_host::pin(thread.tid()?, rest.as_slice())
    }

    fn all(&self) -> anyhow::Result<Vec<Tid>> {
        let tasks = fs::read_dir(self.host.path(format!("proc/{}/task", self.pid)));
        let tasks = tasks.context("its threads can't be listed")?.flatten();
        let tids =
            tasks.filter_map(|task| task.file_name().to_str()?.parse().ok().and_then(Tid::new));
        Ok(tids.filter(|tid| !self.vcpus.contains(tid)).collect())
    }
}

#[cfg(test)]
mod tests {
    //! Promise: a VMM's other threads leave the CPUs of real-time vCPUs, and come back.
    use std::process::{Child, Command};

    use super::*;

    /// A process in the place of a VMM, which ends with it.
    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            // It is a child that was not waited for.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn threads_without_a_vcpu_leave_its_cpu_and_come_back() {
        let vmm = Sleeper(Command::new("sleep").arg("600").spawn().unwrap());
        let (root, pid) = (HostRoot::default(), vmm.0.id());
        let tid = Tid::new(i32::try_from(pid).unwrap()).unwrap();
        let before = affinity_of(tid).unwrap();
        let (Some(cpu), true) = (before.iter().next(), before.len() > 1) else {
            println!("SKIP: this process may run on one CPU only");
            return;
        };
        let cpu: CpuList = [cpu].into_iter().collect();
        let others = OtherThreads::new(&root, (pid, &[]), cpu.clone(), None);
        let borrowed = others.look().unwrap();
        assert_eq!(borrowed.len(), 1);
        others.keep_off();
        assert_eq!(affinity_of(tid).unwrap(), before.without(&cpu));
        assert!(others.look().unwrap().is_empty());
        borrowed[0].put_back(&root).unwrap();
        assert_eq!(affinity_of(tid).unwrap(), before);
        // As a manager has it that wants it there.
        vcpufreq_host::pin(tid, cpu.as_slice()).unwrap();
        let line = others.look().unwrap_err().to_string();
        assert!(line.contains("<emulatorpin>"), "{line}");
        assert_eq!(line.lines().count(), 1);
    }

    #[test]
    fn a_vcpus_thread_is_left_alone() {
        let vmm = Sleeper(Command::new("sleep").arg("600").spawn().unwrap());
        let pid = vmm.0.id();
        let tid = Tid::new(i32::try_from(pid).unwrap());
        let before = affinity_of(tid.unwrap()).unwrap();
        let others = OtherThreads::new(&HostRoot::default(), (pid, &[tid]), before.clone(), None);
        assert!(others.look().unwrap().is_empty());
        others.keep_off();
        assert_eq!(affinity_of(tid.unwrap()).unwrap(), before);
    }
}
