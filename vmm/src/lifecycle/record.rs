// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM is about to make on the host. A record is valid as long as the process with its number is
//! the one that wrote it: same boot, same start time, one of its threads lives. Otherwise it is stale.
//! After another boot nothing is left but the record itself.

use std::path::PathBuf;

use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use vcpufreq_host::undo::{
    GuestCpus, JournalEntry, JournalScope, KernelHost, ReadHost, Unread, Untrusted, read_strictly,
};
pub use vcpufreq_host::undo::{Owner, OwnerStatus};
use vcpufreq_host::{AdoptedGroups, HostRoot, RaisedGroups};

/// The fields of [`VmmRecord`].
const FIELDS: [&str; 4] = ["owner", "real_time", "pinned", ENTRIES];
const ENTRIES: &str = "entries";
/// The files that a record may name: the bounds of wake-up latencies.
const SCOPE: JournalScope = JournalScope {
    files: &[],
    inside: &["/sys/devices/system/cpu/cpu*/power/pm_qos_resume_latency_us"],
    shown_in: &[],
    dirs: &[],
    threads: &[],
};

/// What a VMM is about to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmRecord {
    /// Whose it is.
    pub owner: Owner,
    /// The pCPUs of its real-time vCPUs.
    #[serde(default)]
    pub real_time: Vec<u32>,
    /// The pCPUs that its vCPUs are pinned to, real-time or not.
    #[serde(default)]
    pub pinned: Vec<u32>,
    /// What it changes.
    #[serde(default)]
    pub entries: Vec<JournalEntry>,
}

impl VmmRecord {
    /// A VMM that makes nothing.
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            real_time: Vec::new(),
            pinned: Vec::new(),
            entries: Vec::new(),
        }
    }

    /// The pCPUs of its vCPUs.
    pub fn cpus(&self) -> GuestCpus {
        GuestCpus {
            owner: self.owner.clone(),
            real_time: self.real_time.iter().copied().collect(),
            pinned: self.pinned.iter().copied().collect(),
        }
    }

    /// An entry in it that isn't a change which its process makes.
    pub fn foreign(&self) -> Option<&JournalEntry> {
        let mut entries = self.entries.iter();
        entries.find(|entry| !entry.is_ours(self.owner.pid, &SCOPE))
    }

    /// The groups of another program that are clamped.
    pub fn adopted(&self) -> Option<&AdoptedGroups> {
        self.entries.iter().find_map(|entry| match entry {
            JournalEntry::Cgroup(adopted) => Some(adopted),
            _ => None,
        })
    }

    /// The groups that are raised for its VM.
    pub fn raises(&self) -> RaisedGroups {
        let mut all = RaisedGroups::default();
        // The last first: what others have raised has the value from before the first of them.
        let entries = self.entries.iter().rev();
        entries.for_each(|entry| all.add(&entry.raises()));
        all
    }

    /// Takes the values now for the old ones.
    ///
    /// # Errors
    /// Which file can't be read.
    pub fn look_again(&mut self, look: &dyn ReadHost) -> anyhow::Result<()> {
        for entry in &mut self.entries {
            if let JournalEntry::File(value) = entry {
                let looked = value.look_again(look);
                looked.map_err(|why| {
                    let why = match why {
                        Unread::Missing => "it isn't there",
                        Unread::Denied => "run as root",
                        Unread::Refused => "the kernel refuses that",
                    };
                    anyhow!("{} can't be read: {why}", value.target.name())
                })?;
            }
        }
        Ok(())
    }
}

/// The identity of process `pid` of the host below `root`.
///
/// # Errors
/// When procfs doesn't show it.
pub fn owner_of(root: &HostRoot, pid: u32) -> anyhow::Result<Owner> {
    let owner = Owner::read(&KernelHost::from(root), pid);
    owner.map_err(|_| anyhow!("process {pid} can't be seen in /proc; mount it"))
}

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
pub enum NoRecord {
    /// There is no file.
    #[error("it is gone")]
    Gone,
    /// Another user may have written it.
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    /// It names what no VMM makes.
    #[error(
        "{} names {}, which no VMM makes; look at what made it, then remove it",
        record.display(), what
    )]
    Foreign {
        /// The record.
        record: PathBuf,
        /// What it names.
        what: String,
    },
    /// It has more than this version knows.
    #[error("it is another version's: {why}")]
    OtherVersion {
        /// What this version knows of it.
        known: Box<VmmRecord>,
        /// What it doesn't know.
        why: String,
    },
    /// It isn't one.
    #[error("{0}")]
    Wrong(String),
}

/// A record as far as this version knows what is in it; none of a file that is no record.
pub fn known(record: &anyhow::Result<VmmRecord>) -> Option<&VmmRecord> {
    match record {
        Ok(record) => Some(record),
        Err(why) => match why.downcast_ref()? {
            NoRecord::OtherVersion { known, .. } => Some(known),
            _ => None,
        },
    }
}

/// A record in a text, and what else is there that this version doesn't know.
pub fn parse(text: &str) -> serde_json::Result<(VmmRecord, Option<String>)> {
    let why = match read_strictly(text) {
        Ok(record) => return Ok((record, None)),
        Err(why) => why,
    };
    let mut fields: Map<_, _> = serde_json::from_str(text)?;
    fields.retain(|name, _| FIELDS.contains(&&**name));
    if let Some(Value::Array(entries)) = fields.get_mut(ENTRIES) {
        entries.retain(|entry| JournalEntry::deserialize(entry).is_ok());
    }
    let known = serde_json::from_value(fields.into());
    known.map(|known| (known, Some(why.to_string())))
}
