// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds running guests that have vCPUs on given CPUs, by the records of their VMMs: `PID.json`
//! beside our own record. A VMM writes its record and then looks for ours; apply writes ours and
//! then looks for VMMs' records. If both start at once, at least one sees the other.
//!
//! A VMM that runs real-time vCPUs also changes files of their CPUs, and restores them at its end:
//! changes that another program makes meanwhile would be lost. Guests of other programs, and of
//! users whose records are elsewhere, are not found.

use serde::Deserialize;
use thiserror::Error;

use super::{
    host::ReadHost,
    journal::Journal,
    own_dir::Untrusted,
    owner::{Owner, OwnerStatus},
};
use crate::CpuList;

/// Where the records of root's VMMs are, `PID.json`.
pub const VMM_DIR: &str = "/run/vcpufreq";

/// A guest that is in the way, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct InTheWay(String);

/// Whose vCPUs count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vcpus {
    /// Real-time ones.
    RealTime,
    /// All that are pinned.
    Pinned,
}

/// The CPUs of a guest's vCPUs, and whose they are.
#[derive(Clone, Debug)]
pub struct GuestCpus {
    /// The VMM's process.
    pub owner: Owner,
    /// Those of real-time vCPUs.
    pub real_time: CpuList,
    /// Those that a vCPU is pinned to, real-time or not.
    pub pinned: CpuList,
}

impl GuestCpus {
    /// Whether it has no such vCPU on these CPUs, or doesn't run and has left nothing there.
    ///
    /// # Errors
    /// The guest that has one.
    pub fn check_off(
        &self,
        look: &dyn ReadHost,
        cpus: &CpuList,
        whose: Vcpus,
    ) -> Result<(), InTheWay> {
        let (rt, pinned) = (self.real_time.and(cpus), self.pinned.and(cpus));
        let contended = match whose {
            Vcpus::RealTime => rt.clone(),
            Vcpus::Pinned => rt.or(&pinned),
        };
        if contended.is_empty() {
            return Ok(());
        }
        let pid = self.owner.pid;
        Err(InTheWay(match self.owner.status(look) {
            OwnerStatus::InUse if rt.is_empty() => format!(
                "a vCPU of the guest of process {pid} is pinned to CPU {pinned}; end that guest first"
            ),
            OwnerStatus::InUse => format!(
                "CPU {rt} runs a real-time vCPU of the guest of process {pid} already; end that guest first"
            ),
            // Others than real-time ones change nothing there.
            OwnerStatus::Stale if rt.is_empty() => return Ok(()),
            OwnerStatus::Stale => format!(
                "the guest of process {pid} was killed, and what it changed of CPU {rt} is not brought back yet; run vcpufreq cleanup first"
            ),
            OwnerStatus::Unseen => format!(
                "{VMM_DIR}/{pid}.json is of a guest on CPU {contended}, and process {pid} is in another PID namespace; end that guest, or run vcpufreq cleanup there if it has ended"
            ),
            OwnerStatus::OtherBoot => return Ok(()),
        }))
    }
}

/// The CPUs in a VMM's record; the rest of it is the VMM's own matter.
#[derive(Deserialize)]
struct VmmRtCpus {
    owner: Owner,
    #[serde(default)]
    real_time: Vec<u32>,
    #[serde(default)]
    pinned: Vec<u32>,
}

/// Whether these CPUs have no such vCPU of a guest of ours.
///
/// # Errors
/// The first guest that has one there.
pub fn check_free(look: &dyn ReadHost, cpus: &CpuList, whose: Vcpus) -> Result<(), InTheWay> {
    let journal = Journal::at(look.root().path(VMM_DIR));
    let names = match journal.names() {
        Ok(names) => names,
        // Only root can change anything, which sees them.
        Err(why) if why.is_denied() => Vec::new(),
        Err(why) => return Err(untrusted(&why)),
    };
    for name in names {
        let number = name.strip_suffix(".json").and_then(|n| n.parse().ok());
        if let Some(pid) = number {
            check_one(look, &journal, (pid, &name), cpus, whose)?;
        }
    }
    Ok(())
}

fn untrusted(why: &Untrusted) -> InTheWay {
    InTheWay(why.to_string())
}

fn check_one(
    look: &dyn ReadHost,
    journal: &Journal,
    (pid, name): (u32, &str),
    cpus: &CpuList,
    whose: Vcpus,
) -> Result<(), InTheWay> {
    let text = match journal.read(name) {
        Ok(Some(text)) => text,
        Ok(None) => return Ok(()),
        Err(why) => return Err(untrusted(&why)),
    };
    let Ok(VmmRtCpus {
        owner,
        real_time,
        pinned,
    }) = serde_json::from_str(&text)
    else {
        // Without a process it is no guest's.
        return match look.read(&format!("/proc/{pid}/stat")) {
            Ok(_) => Err(InTheWay(format!(
                "{VMM_DIR}/{pid}.json can't be read as a guest's record, and process {pid} runs; end it first, or remove the file if it is not a guest's"
            ))),
            Err(_) => Ok(()),
        };
    };
    let guest = GuestCpus {
        owner,
        real_time: real_time.into_iter().collect(),
        pinned: pinned.into_iter().collect(),
    };
    guest.check_off(look, cpus, whose)
}
