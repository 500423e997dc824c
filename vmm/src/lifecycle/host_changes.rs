// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a running VMM changes on its host. Record and guardian come before the first change, and go
//! after the last is undone.

use std::sync::Arc;

use anyhow::{anyhow, bail};
use vcpufreq_host::HostRoot;
use vcpufreq_host::undo::{JournalEntry, KernelHost, Vcpus};

use crate::{
    lifecycle::cleanup::{Cleaned, Cleaner},
    lifecycle::guard::undo_recorded,
    lifecycle::guardian::{Guardian, GuardianSocket},
    lifecycle::record::{VmmRecord, known},
    lifecycle::state::StateDir,
};

/// What this VMM has changed on the host, as recorded.
#[derive(Debug)]
pub struct HostChanges {
    /// None: this process undoes them by itself.
    guardian: Option<Guardian>,
}

impl HostChanges {
    /// Removes what dead VMMs left, then starts a guardian and records what this process is about
    /// to make and to use. `report` gets a line for each thing that could not be removed.
    ///
    /// # Errors
    /// Why there can't be a record or a guardian, or which guest has one of the pCPUs. Nothing is
    /// left then, or it is a line too, and the guardian stays on guard for it.
    pub fn begin(
        record: VmmRecord,
        report: impl Fn(&str),
    ) -> anyhow::Result<(Self, Arc<GuardianSocket>)> {
        put_back_of_dead(&StateDir::of_user()?, &HostRoot::default(), &report)?;
        let guardian = Guardian::start()?;
        let socket = guardian.socket();
        Ok((Self::write(record, Some(guardian), report)?, socket))
    }

    /// The same without a guardian: if this process is killed, `vcpufreq cleanup` undoes the changes, or
    /// the next VMM does.
    ///
    /// # Errors
    /// Why there can't be a record, or which guest has one of the pCPUs. Nothing is left then, or it is
    /// a line too.
    pub fn begin_unguarded(record: VmmRecord, report: impl Fn(&str)) -> anyhow::Result<Self> {
        put_back_of_dead(&StateDir::of_user()?, &HostRoot::default(), &report)?;
        Self::write(record, None, report)
    }

    fn write(
        mut record: VmmRecord,
        guardian: Option<Guardian>,
        report: impl Fn(&str),
    ) -> anyhow::Result<Self> {
        let host = HostRoot::default();
        let dir = StateDir::of_user()?;
        let begun = write_alone(&dir, &host, &mut record);
        match begun.and_then(|()| record.raise(&dir, &host)) {
            Ok(()) => Ok(Self { guardian }),
            Err(error) => {
                // Nothing but raised groups is there yet. The first failure is the one to tell.
                let mut only = record;
                only.entries.retain(JournalEntry::is_of_others);
                let left = Cleaner::new(&host).end(&dir, &only, &mut Cleaned::default());
                left.iter().for_each(|why| report(why));
                Self { guardian }.end();
                Err(error)
            }
        }
    }

    /// The guardian, if there is one.
    pub fn guardian(&self) -> Option<&Guardian> {
        self.guardian.as_ref()
    }

    /// Starts another guardian in the place of one that has ended.
    ///
    /// # Errors
    /// As [`Guardian::start`].
    pub fn guard_again(&mut self) -> anyhow::Result<()> {
        let ended = self.guardian.replace(Guardian::start()?);
        ended.into_iter().for_each(Guardian::dismiss);
        Ok(())
    }

    /// Undoes everything, or has the guardian do that. The vCPU threads have ended. What was undone
    /// before is no error.
    ///
    /// # Errors
    /// All that could not be undone, which stays on record. The guardian tries again when this process
    /// is gone; without one the next VMM does, or `vcpufreq cleanup`.
    pub fn undo(&self) -> anyhow::Result<()> {
        let left = match &self.guardian {
            Some(guardian) => guardian.socket().undo()?,
            None => undo_recorded(&StateDir::of_user()?.record_path(std::process::id())),
        };
        if left.iter().any(|line| !line.is_empty()) {
            bail!("not all is as it was: {}", left.join("; "));
        }
        Ok(())
    }

    /// Ends the guardian, if nothing is left to undo.
    pub fn end(self) {
        self.guardian.into_iter().for_each(Guardian::dismiss);
    }
}

/// Removes and puts back what dead VMMs and servers left; `report` gets a line for each thing that
/// could not be removed.
///
/// # Errors
/// When the records can't be listed, or one isn't a VMM's.
pub fn put_back_of_dead(
    dir: &StateDir,
    host: &HostRoot,
    report: impl Fn(&str),
) -> anyhow::Result<()> {
    let Cleaned { left, .. } = Cleaner::new(host).by_records(dir)?;
    left.iter().for_each(|why| report(why));
    Ok(())
}

/// Writes the record, if no other guest has vCPUs in the way. From then on this process alone changes
/// these pCPUs' bounds, so the bounds are read again: a guest may have ended and put its back since.
fn write_alone(dir: &StateDir, host: &HostRoot, record: &mut VmmRecord) -> anyhow::Result<()> {
    dir.write(record)?;
    // After the record: of two that start at once, one sees the other.
    check_free(dir, host, record)?;
    if record.real_time.is_empty() {
        return Ok(());
    }
    record.look_again(&KernelHost::from(host))?;
    dir.write(record)
}

/// Checks that no pCPU of a real-time vCPU has a pinned vCPU of another guest, whichever of the two
/// guests came first. vCPUs that aren't pinned don't count.
///
/// # Errors
/// Which guest has one there; or the records can't be listed.
fn check_free(dir: &StateDir, host: &HostRoot, mine: &VmmRecord) -> anyhow::Result<()> {
    let mine = mine.cpus();
    let look = KernelHost::from(host);
    for (_, other) in dir.list()? {
        // Of another version's the CPUs count all the same. What is no record was reported.
        let Some(other) = known(&other).map(VmmRecord::cpus) else {
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
    use vcpufreq_host::fakes::FakeHost;

    use super::*;
    use crate::lifecycle::record::owner_of;
    use crate::lifecycle::state::ROOT_DIR;

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
        fn guest(&self, pid: u32, rt: &[u32], pinned: &[u32]) -> VmmRecord {
            let stat = format!("{pid} (vcpufreq) S {}4000", "1 ".repeat(18));
            self.host.write(&format!("proc/{pid}/stat"), stat);
            VmmRecord {
                real_time: rt.to_vec(),
                pinned: [rt, pinned].concat(),
                ..VmmRecord::new(owner_of(&self.host.root(), pid).unwrap())
            }
        }

        /// What another one would hear.
        fn refusal(&self, rt: &[u32], pinned: &[u32]) -> Option<String> {
            let mine = self.guest(8, rt, pinned);
            let refusal = check_free(&self.dir, &self.host.root(), &mine).err();
            refusal.map(|error| error.to_string())
        }
    }

    #[test]
    fn a_real_time_vcpus_cpu_is_nobody_elses() {
        let scene = Scene::new();
        scene.dir.write(&scene.guest(7, &[3], &[0, 1])).unwrap();
        scene.dir.write(&scene.guest(8, &[3], &[0])).unwrap();
        assert_eq!(scene.refusal(&[2], &[0, 1]), None, "beside it, and its own");
        assert_eq!(scene.refusal(&[], &[]), None, "not pinned");
        for (rt, pinned) in [(&[3][..], &[][..]), (&[], &[3]), (&[], &[0, 1, 2, 3])] {
            let line = scene.refusal(rt, pinned).unwrap();
            assert!(
                line.contains("CPU 3") && line.contains("process 7 already"),
                "{line}"
            );
            assert_eq!(line.lines().count(), 1);
        }
        let line = scene.refusal(&[1], &[]).unwrap();
        assert!(line.contains("process 7 is pinned to CPU 1"), "{line}");
    }

    #[test]
    fn what_a_killed_guest_left_comes_first() {
        let scene = Scene::new();
        scene.dir.write(&scene.guest(7, &[3], &[0])).unwrap();
        scene.host.remove("proc/7");
        let line = scene.refusal(&[3], &[]).unwrap();
        assert!(line.contains("vcpufreq cleanup"), "{line}");
        assert_eq!(scene.refusal(&[0], &[]), None, "nothing was changed there");
    }

    #[test]
    fn apply_and_restore_read_what_is_recorded() {
        use vcpufreq_host::undo::check_free;
        let scene = Scene::new();
        scene.dir.write(&scene.guest(7, &[3], &[0])).unwrap();
        let look = KernelHost::from(&scene.host.root());
        let of = |cpu: u32, whose| check_free(&look, &[cpu].into_iter().collect(), whose);
        for (cpu, whose, what) in [
            (
                3,
                Vcpus::RealTime,
                "a real-time vCPU of the guest of process 7",
            ),
            (0, Vcpus::Pinned, "of the guest of process 7 is pinned"),
        ] {
            let line = of(cpu, whose).unwrap_err().to_string();
            assert!(line.contains(what), "{line}");
        }
        assert_eq!(of(0, Vcpus::RealTime), Ok(()));
        assert_eq!(of(1, Vcpus::Pinned), Ok(()));
    }

    #[test]
    fn a_guest_of_another_version_has_its_cpus() {
        let scene = Scene::new();
        scene.dir.write(&scene.guest(7, &[3], &[])).unwrap();
        let path = scene.dir.record_path(7);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replacen('{', "{\"more\":1,", 1)).unwrap();
        let line = scene.refusal(&[3], &[]).unwrap();
        assert!(line.contains("guest of process 7"), "{line}");
    }
}
