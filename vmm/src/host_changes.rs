// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a running VMM has on the host, from its record and guardian, which come
//! before anything else, to their end, which comes after everything else.

use std::{process, thread::sleep, time::Duration};

use anyhow::Context;
use vcpufreq_device::host::{self, CgroupError, GroupRecord, KernelTree};

use crate::{
    cleanup::{Cleaned, Cleaner},
    facts::HostTree,
    guardian::Guardian,
    rt_traces::{self, RtTraces},
    state::{self, Record, StateDir, owner_of},
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
    pub rt: Option<RtTraces>,
    /// The pCPUs that its vCPUs are pinned to.
    pub pinned: Vec<u32>,
}

/// The traces of this VMM on the host.
#[derive(Debug)]
pub struct Footprint {
    dir: StateDir,
    groups: Option<GroupRecord>,
    rt: Option<RtTraces>,
    guardian: Guardian,
}

impl Footprint {
    /// Removes what dead VMMs left, then puts a guardian on guard and records
    /// what this process is about to make; `report` gets what could not be
    /// removed.
    ///
    /// # Errors
    /// When there can't be a record or a guardian, or a pCPU is another guest's; nothing is left
    /// then.
    pub fn begin(wanted: Wanted, report: impl Fn(&str)) -> anyhow::Result<Self> {
        let host = HostTree::default();
        let dir = StateDir::of_user()?;
        let Cleaned { left, .. } = Cleaner::new(&host).by_records(&dir)?;
        left.iter().for_each(|why| report(why));
        let pid = process::id();
        let mut record = Record {
            owner: owner_of(&host, pid)?,
            groups: wanted.groups.clone().map(Into::into),
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

    /// Removes everything, the guardian last. The vCPU threads have ended.
    ///
    /// # Errors
    /// What could not be removed. The guardian stays and tries again when this
    /// process is gone.
    pub fn erase(self) -> anyhow::Result<()> {
        if let Some(groups) = &self.groups {
            remove_groups(groups).context("can't remove this VM's cgroup")?;
        }
        if let Some(rt) = &self.rt {
            let host = HostTree::default();
            rt.undo(&host, &KernelTree, process::id(), TRY_EVERY * TRIES)
                .context("can't undo what was changed for real-time vCPUs")?;
        }
        let path = self.dir.record_path(process::id());
        state::remove(&path).with_context(|| format!("can't remove {}", path.display()))?;
        self.guardian.dismiss();
        Ok(())
    }
}

/// Writes the record, if nobody else's vCPUs are in the way. After that nobody changes these pCPUs'
/// bounds but this process: what a guest that has ended since set there is not what was before.
fn write_alone(dir: &StateDir, host: &HostTree, record: &mut Record) -> anyhow::Result<()> {
    dir.write(record)?;
    // After the record: of two that start at once, one sees the other.
    rt_traces::check_free(dir, host, record)?;
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
