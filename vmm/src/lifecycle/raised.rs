// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Groups that are raised for VMs below them, by the records of all VMs. The last VM restores the
//! value from before the first, even if different programs run or serve them.

use std::{io, path::Path, time::Duration};

use anyhow::Context;
use vcpufreq_host::undo::{JournalEntry, KernelHost, LockedFile, OwnerStatus};
use vcpufreq_host::{HostRoot, RaisedGroups};

use super::record::{VmmRecord, known};
use super::state::StateDir;
use crate::patience::{patience_of, patiently};

/// Others hold the lock while they read and write files. Nothing that waits for another process' end
/// has it.
const PATIENCE: u64 = 10;
const TRY_EVERY: Duration = Duration::from_millis(20);

impl VmmRecord {
    /// The groups that its VM clamps, or those around them.
    fn clamped(&self) -> impl Iterator<Item = &Path> {
        self.entries.iter().flat_map(|entry| match entry {
            JournalEntry::Groups(groups) => vec![&*groups.group],
            JournalEntry::Cgroup(adopted) => adopted.of_vcpus().collect(),
            _ => Vec::new(),
        })
    }

    /// Raises what caps its groups, and notes what others have raised for theirs. It is in `dir`
    /// already, and is written there again.
    ///
    /// # Errors
    /// As [`StateDir::lock`], [`StateDir::list`],
    /// [`AdoptedGroups::capped`](vcpufreq_host::AdoptedGroups::capped), [`StateDir::write`]
    /// and [`RaisedGroups::raise`]. From the write on, the record has what is to be put back.
    pub fn raise(&mut self, dir: &StateDir, host: &HostRoot) -> anyhow::Result<()> {
        if self.clamped().next().is_none() {
            return Ok(());
        }
        let _lock = dir.lock()?;
        // What a dead program has raised is still so while it has a record.
        let mut raised = RaisedGroups::default();
        for other in dir.raised_by_others(host, self, OwnerStatus::Stale)? {
            raised.join(&other, self.clamped());
        }
        if let Some(adopted) = self.adopted() {
            let capped = adopted.capped();
            raised.add(&capped.context("the cgroups that the vCPUs have can't be clamped")?);
        }
        self.entries
            .retain(|entry| !matches!(entry, JournalEntry::Raised(_)));
        if raised.paths().next().is_some() {
            self.entries.push(JournalEntry::Raised(raised.clone()));
        }
        dir.write(self)?;
        let done = raised.raise();
        done.context("what caps the vCPUs' cgroups can't be raised")
    }
}

impl StateDir {
    /// Held by a program that raises groups or puts them back. A record of that program keeps the
    /// directory there.
    ///
    /// # Errors
    /// When another program doesn't let go of it, or a signal asks this one to end.
    pub fn lock(&self) -> anyhow::Result<LockedFile> {
        let (path, journal) = (self.path().display(), self.journal());
        let what = format!("for another vcpufreq, which keeps {path} locked");
        let held = patiently(patience_of(PATIENCE), &what, |part| {
            match journal.lock(Duration::ZERO) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    part.is_ready(&[], TRY_EVERY).map(|_| None)
                }
                held => held.map(Some).with_context(|| format!("can't lock {path}")),
            }
        });
        held?.with_context(|| format!("another vcpufreq keeps {path} locked; see which one hangs"))
    }

    /// What other records than `mine` have raised: those of programs that run, and those that stand
    /// so too.
    ///
    /// # Errors
    /// When the records can't be listed.
    pub fn raised_by_others(
        &self,
        host: &HostRoot,
        mine: &VmmRecord,
        too: OwnerStatus,
    ) -> anyhow::Result<Vec<RaisedGroups>> {
        let look = KernelHost::from(host);
        let all = self.list()?;
        // Those of another version as far as this one knows what they have.
        let others = all.iter().filter_map(|(_, record)| known(record));
        let others = others.filter(|other| {
            let status = other.owner.status(&look);
            let counts = matches!(status, OwnerStatus::InUse | OwnerStatus::Unseen);
            other.owner.pid != mine.owner.pid && (counts || status == too)
        });
        Ok(others.map(|other| other.raises()).collect())
    }
}

#[cfg(test)]
mod tests {
    //! Two VMs share a slice: it is raised until the last one ends.
    use vcpufreq_host::fakes::FakeHost;
    use vcpufreq_host::{AdoptedGroups, GroupRecord, Tid};

    use super::*;
    use crate::lifecycle::cleanup::{Cleaned, Cleaner};
    use crate::lifecycle::record::owner_of;
    use crate::lifecycle::state::ROOT_DIR;

    const SLICE: &str = "sys/fs/cgroup/machine.slice";

    struct Scene {
        host: FakeHost,
        dir: StateDir,
    }

    impl Scene {
        fn new() -> Self {
            let host = FakeHost::empty();
            host.write("proc/sys/kernel/random/boot_id", "boot");
            let mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
            host.write("proc/self/mountinfo", mounts);
            host.write("run/empty", "");
            let dir = StateDir::at(host.root().path(ROOT_DIR));
            let scene = Self { host, dir };
            scene.group(SLICE, "", "12.00");
            scene
        }

        fn group(&self, group: &str, threads: &str, min: &str) {
            for (file, text) in [
                ("cgroup.threads", threads),
                ("cpu.uclamp.min", min),
                ("cpu.uclamp.max", "max"),
            ] {
                self.host.write(&format!("{group}/{file}"), text);
            }
        }

        /// The record of process `pid`, which runs.
        fn record(&self, pid: u32) -> VmmRecord {
            let stat = format!("{pid} (vcpufreq) S {}4000", "1 ".repeat(18));
            self.host.write(&format!("proc/{pid}/stat"), stat);
            VmmRecord::new(owner_of(&self.host.root(), pid).unwrap())
        }

        /// Server `pid` serves a VM of the slice, whose vCPU is a thread of that number too.
        fn start_server(&self, pid: u32) -> VmmRecord {
            let group = format!("machine.slice/{pid}");
            self.group(
                &format!("sys/fs/cgroup/{group}"),
                &format!("{pid}\n"),
                "0.00",
            );
            let procfs = format!("proc/{pid}/task/{pid}/cgroup");
            self.host.write(&procfs, format!("0::/{group}\n"));
            let threads = [Tid::new(pid.try_into().unwrap())];
            let adopted = AdoptedGroups::find(&self.host.root(), pid, &threads);
            self.begin(VmmRecord {
                entries: adopted
                    .unwrap()
                    .map(JournalEntry::Cgroup)
                    .into_iter()
                    .collect(),
                ..self.record(pid)
            })
        }

        fn begin(&self, mut record: VmmRecord) -> VmmRecord {
            self.dir.write(&record).unwrap();
            record.raise(&self.dir, &self.host.root()).unwrap();
            record
        }

        /// What the slice has after the end of a program.
        fn end(&self, record: &VmmRecord) -> String {
            let host = self.host.root();
            let cleaner = Cleaner {
                may_be_group: |_| true,
                ..Cleaner::new(&host)
            };
            let left = cleaner.end(&self.dir, record, &mut Cleaned::default());
            assert_eq!(left, Vec::<String>::new());
            self.min()
        }

        fn min(&self) -> String {
            let min = self.host.root().text(format!("{SLICE}/cpu.uclamp.min"));
            min.unwrap()
        }
    }

    #[test]
    fn a_vm_without_groups_waits_for_no_lock() {
        let scene = Scene::new();
        let mut record = scene.record(7);
        scene.dir.write(&record).unwrap();
        let _held = scene.dir.lock().unwrap();
        record.raise(&scene.dir, &scene.host.root()).unwrap();
        assert_eq!(scene.end(&record), "12.00");
        assert!(!scene.host.root().path(ROOT_DIR).exists());
    }

    #[test]
    fn what_another_version_has_raised_stays_raised() {
        let scene = Scene::new();
        let first = scene.start_server(7);
        let second = scene.start_server(8);
        let path = scene.dir.record_path(8);
        let text = std::fs::read_to_string(&path).unwrap();
        let more = text.replacen('{', "{\"more\":1,", 1);
        std::fs::write(&path, more).unwrap();
        assert_eq!(scene.end(&first), "max");
        std::fs::write(&path, text).unwrap();
        assert_eq!(scene.end(&second), "12.00");
    }

    #[test]
    fn the_last_of_three_servers_puts_a_slice_back() {
        let scene = Scene::new();
        let first = scene.start_server(7);
        assert_eq!(scene.min(), "max");
        let second = scene.start_server(8);
        assert_eq!(scene.end(&first), "max");
        let third = scene.start_server(9);
        assert_eq!(scene.end(&second), "max");
        assert_eq!(scene.end(&third), "12.00");
        assert!(!scene.host.root().path(ROOT_DIR).exists());
    }

    #[test]
    fn a_server_that_was_killed_leaves_it_to_the_next() {
        let scene = Scene::new();
        let killed = scene.start_server(7);
        scene.host.remove("proc/7");
        let next = scene.start_server(8);
        assert_eq!(scene.end(&killed), "max");
        assert_eq!(scene.end(&next), "12.00");
    }

    /// `vcpufreq run` has groups of its own in the slice, or has raised the slice itself.
    #[test]
    fn a_run_beside_a_server_shares_the_slice() {
        let scene = Scene::new();
        let run = |pid, origin: &str, raised_min| {
            let groups = JournalEntry::Groups(GroupRecord {
                group: scene.host.root().path(format!("{SLICE}/vcpufreq.{pid}")),
                origin: scene.host.root().path(origin),
                enabled_cpu: false,
                raised_min,
            });
            scene.begin(VmmRecord {
                entries: vec![groups],
                ..scene.record(pid)
            })
        };
        let server = scene.start_server(7);
        let beside = run(8, "sys/fs/cgroup", false);
        assert_eq!(scene.end(&server), "max");
        assert_eq!(scene.end(&beside), "12.00");

        scene.group(SLICE, "", "0.00");
        let first = run(8, SLICE, true);
        scene.group(SLICE, "", "max");
        let server = scene.start_server(7);
        assert_eq!(scene.end(&first), "max");
        assert_eq!(scene.end(&server), "0");
    }
}
