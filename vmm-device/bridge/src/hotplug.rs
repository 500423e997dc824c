// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! pCPUs that go offline and come back.
//!
//! A pCPU's folder `topology` in sysfs goes with it, and another one comes with it
//! (`drivers/base/topology.c`, `CPUHP_TOPOLOGY_PREPARE`). A file that was opened there before can't
//! be read any more. So a pCPU that was away between two looks is found, too: after a suspend,
//! which sends no uevent.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use vcpufreq_host::{CPUS, HostRoot, possible_pcpus};

/// What is looked at: a file of each pCPU.
#[derive(Debug)]
pub struct Hotplug(Vec<OnlineFile>);

#[derive(Debug)]
struct OnlineFile {
    number: u32,
    path: PathBuf,
    file: Option<File>,
    /// It had just come or gone at the last look.
    again: bool,
}

impl Hotplug {
    /// Of all pCPUs that this host can have, as they are now.
    pub fn of_host(host: &HostRoot) -> Self {
        let pcpus = possible_pcpus(host).into_iter().map(|number| {
            let path = format!("{CPUS}/cpu{number}/topology/core_id");
            OnlineFile {
                number,
                path: host.path(path),
                file: None,
                again: false,
            }
        });
        let mut hotplug = Self(pcpus.collect());
        hotplug.look();
        for pcpu in &mut hotplug.0 {
            pcpu.again = false;
        }
        hotplug
    }

    /// The pCPUs that came or went since the last call, and those that the last call returned: a
    /// pCPU's folder exists before the pCPU is online and has its capacity.
    pub fn look(&mut self) -> Vec<u32> {
        let changed = self.0.iter_mut().filter_map(OnlineFile::look);
        changed.collect()
    }
}

impl OnlineFile {
    fn look(&mut self) -> Option<u32> {
        let is_there = |file: &File| file.read_at(&mut [0; 1], 0).is_ok();
        let before = std::mem::take(&mut self.again);
        if !self.file.as_ref().is_some_and(is_there) {
            let was_there = self.file.is_some();
            self.file = File::open(&self.path).ok();
            self.again = was_there || self.file.is_some();
        }
        (before || self.again).then_some(self.number)
    }
}

#[cfg(test)]
mod tests {
    //! Each pCPU that comes or goes is found, and once more at the next look. Only the kernel's own
    //! files show a pCPU that was away between two looks: the lab's scenario `hotplug`.
    use std::fs;

    use super::*;

    #[test]
    fn a_pcpu_that_comes_is_found_and_looked_at_again() {
        let dir = tempfile::tempdir().unwrap();
        let cpus = dir.path().join("sys/devices/system/cpu");
        let add = |pcpu: u32| {
            let topology = cpus.join(format!("cpu{pcpu}/topology"));
            fs::create_dir_all(&topology).unwrap();
            fs::write(topology.join("core_id"), "0\n").unwrap();
        };
        [0, 2, 3].into_iter().for_each(add);
        fs::write(cpus.join("possible"), "0-3\n").unwrap();
        let mut hotplug = Hotplug::of_host(&HostRoot::at(dir.path()));
        assert_eq!(hotplug.look(), [0_u32; 0]);
        add(1);
        assert_eq!(hotplug.look(), [1]);
        // By the first look its capacity may not have been there.
        assert_eq!(hotplug.look(), [1]);
        assert_eq!(hotplug.look(), [0_u32; 0]);
    }
}
