// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtual machines of other programs that outlive their server: `PID.vm` beside the records, with
//! the VMM's number, tells the next server which of the VMM's files are memory and doorbells. It is
//! written before the VMM gets them, and removed when the VMM has ended.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vcpufreq_host::HostRoot;
use vcpufreq_host::undo::{Journal, KernelHost, Untrusted, read_strictly, unfinished};

use super::record::{Owner, OwnerStatus};
use super::state::StateDir;

const SUFFIX: &str = ".vm";

/// What identifies a virtual machine's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptVm {
    /// The VMM.
    pub vmm: Owner,
    /// The server that has served it last.
    pub server: Option<Owner>,
    /// That server's socket; none if it was `vcpufreq qemu`.
    pub socket: Option<PathBuf>,
    /// Device and inode of its memory.
    pub memory: (u64, u64),
    /// The `eventfd-id` of each vCPU's doorbell.
    pub bells: Vec<u64>,
    /// The pages are in the guest's RAM, which has no doorbells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_ram: Option<PagesInRam>,
}

/// The pages of a guest that has them in its RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PagesInRam {
    /// Where they are in its file, bytes.
    pub offset: u64,
    /// How many vCPUs they are of.
    pub vcpus: u16,
}

/// The virtual machines whose VMMs run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RunningVms {
    /// Those whose files are known.
    pub kept: Vec<KeptVm>,
    /// VMMs whose records this version can't read, and why.
    pub unknown: Vec<(u32, String)>,
}

impl StateDir {
    /// Writes it.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_vm(&self, vm: &KeptVm) -> anyhow::Result<()> {
        let text = serde_json::to_string(vm)?;
        self.write_file(&format!("{}{SUFFIX}", vm.vmm.pid), &text)
    }

    /// Removes that of VMM `pid`, if there is one.
    ///
    /// # Errors
    /// As [`Journal::remove`].
    pub fn remove_vm(&self, pid: u32) -> std::io::Result<()> {
        let name = format!("{pid}{SUFFIX}");
        let journal = self.journal();
        journal.remove([&*unfinished(&name), &name])?;
        journal.leave();
        Ok(())
    }

    /// All of them whose VMM runs.
    ///
    /// # Errors
    /// As [`Journal::names`] and [`Journal::read`]: then none counts.
    pub fn kept(&self, host: &HostRoot) -> Result<RunningVms, Untrusted> {
        let mut running = RunningVms::default();
        let journal = self.journal();
        for (name, pid) in numbered(journal)? {
            // One that isn't finished is of a VMM that has no memory yet.
            let Some(text) = journal.read(&name)?.filter(|_| name.ends_with(SUFFIX)) else {
                continue;
            };
            match read_strictly::<KeptVm>(&text) {
                Ok(vm) => running.kept.push(vm),
                Err(why) if host.path(format!("proc/{pid}")).exists() => {
                    let path = self.path().join(&name);
                    let why = format!("{} can't be read ({why})", path.display());
                    running.unknown.push((pid, why));
                }
                Err(_) => {}
            }
        }
        let runs = |vm: &KeptVm| vm.vmm.status(&KernelHost::from(host)) == OwnerStatus::InUse;
        running.kept.retain(runs);
        Ok(running)
    }

    /// Removes those whose VMM has ended; their paths.
    ///
    /// # Errors
    /// As [`Journal::names`], [`Journal::read`] and [`Journal::remove`]. What was
    /// removed before is gone.
    pub fn remove_ended_vms(&self, host: &HostRoot) -> std::io::Result<Vec<PathBuf>> {
        let journal = self.journal();
        let mut removed = Vec::new();
        for (name, pid) in numbered(journal)? {
            let text = journal.read(&name)?.unwrap_or_default();
            let status = match serde_json::from_str::<KeptVm>(&text) {
                Ok(vm) => vm.vmm.status(&KernelHost::from(host)),
                // It was never finished: the VMM has no memory.
                Err(_) if host.path(format!("proc/{pid}")).exists() => OwnerStatus::InUse,
                Err(_) => OwnerStatus::Stale,
            };
            if matches!(status, OwnerStatus::Stale | OwnerStatus::OtherBoot) {
                journal.remove([&*name])?;
                removed.push(self.path().join(&name));
            }
        }
        journal.leave();
        Ok(removed)
    }
}

fn numbered(journal: &Journal) -> Result<Vec<(String, u32)>, Untrusted> {
    let number = |name: String| {
        let stem = Path::new(name.strip_suffix(".new").unwrap_or(&name));
        let pid = stem.to_str()?.strip_suffix(SUFFIX)?.parse().ok()?;
        Some((name, pid))
    };
    Ok(journal.names()?.into_iter().filter_map(number).collect())
}

#[cfg(test)]
mod tests {
    //! What is kept is there as long as its VMM.
    use vcpufreq_host::fakes::FakeHost;

    use super::*;
    use crate::lifecycle::record::owner_of;
    use crate::lifecycle::state::ROOT_DIR;

    #[test]
    fn a_vm_is_kept_until_its_vmm_ends() {
        let host = FakeHost::empty();
        host.write("proc/sys/kernel/random/boot_id", "boot");
        host.write("proc/7/stat", format!("7 (qemu) S {}4000", "1 ".repeat(18)));
        host.write("run/empty", "");
        let dir = StateDir::at(host.root().path(ROOT_DIR));
        let vm = KeptVm {
            in_ram: None,
            vmm: owner_of(&host.root(), 7).unwrap(),
            server: Some(owner_of(&host.root(), 7).unwrap()),
            socket: Some("/run/a".into()),
            memory: (1, 2),
            bells: vec![8, 9],
        };
        dir.write_vm(&vm).unwrap();
        assert_eq!(dir.kept(&host.root()).unwrap().kept, [vm]);
        assert!(dir.list().unwrap().is_empty(), "it is no record of changes");
        assert!(dir.remove_ended_vms(&host.root()).unwrap().is_empty());
        // The number is another process' now.
        host.write("proc/7/stat", format!("7 (sh) S {}5000", "1 ".repeat(18)));
        assert_eq!(dir.kept(&host.root()).unwrap(), RunningVms::default());
        assert_eq!(dir.remove_ended_vms(&host.root()).unwrap().len(), 1);
        assert!(!host.root().path(ROOT_DIR).exists());
    }

    #[test]
    fn a_record_of_another_version_is_reported_and_stays_as_long_as_its_vmm() {
        let host = FakeHost::empty();
        host.write("proc/sys/kernel/random/boot_id", "boot");
        host.write("proc/7/stat", format!("7 (qemu) S {}4000", "1 ".repeat(18)));
        host.write("run/empty", "");
        let dir = StateDir::at(host.root().path(ROOT_DIR));
        dir.write_file("7.vm", "{\"vmm\": 7, \"more\": 1}").unwrap();
        dir.write_file("8.vm", "{}").unwrap();
        let running = dir.kept(&host.root()).unwrap();
        let [(7, why)] = &running.unknown[..] else {
            panic!("{running:?}");
        };
        assert!(why.contains("7.vm can't be read"), "{why}");
        let removed = dir.remove_ended_vms(&host.root()).unwrap();
        assert_eq!(removed, [host.root().path("run/vcpufreq/8.vm")]);
    }
}
