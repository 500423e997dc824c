// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM is about to make on the host. A record is valid as long as the process with its number is
//! the one that wrote it: same boot, same start time, one of its threads lives. Otherwise it is stale.
//! After another boot nothing is left but the record itself.

use std::path::{Component, Path, PathBuf};

use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use vcpufreq_host::undo::{GuestCpus, InPartition, KernelHost, RtHostChanges, Untrusted};
pub use vcpufreq_host::undo::{Owner, OwnerStatus};
use vcpufreq_host::{
    AdoptedGroups, GROUP_PREFIX, GroupRecord, HostRoot, RaisedGroups, SavedThread,
};

use super::record_names::name_of;

/// The fields of [`VmmRecord`].
const FIELDS: [&str; 7] = [
    "owner", "groups", "rt", "pinned", "threads", "adopted", "raised",
];

/// What a VMM is about to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmRecord {
    /// Whose it is.
    pub owner: Owner,
    /// Its cgroups, if it makes any.
    pub groups: Option<GroupRecord>,
    /// What it changes for real-time vCPUs, if it has any.
    #[serde(default)]
    pub rt: Option<RtHostChanges>,
    /// The pCPUs that its vCPUs are pinned to, real-time or not.
    #[serde(default)]
    pub pinned: Vec<u32>,
    /// The threads of another program's VM that it clamps.
    #[serde(default)]
    pub threads: Vec<SavedThread>,
    /// The cgroups of that VM that it clamps.
    #[serde(default)]
    pub adopted: Option<AdoptedGroups>,
    /// Groups above those of its VM that are raised, and what they had before the first VM.
    #[serde(default)]
    pub raised: RaisedGroups,
}

impl VmmRecord {
    /// A VMM that makes nothing.
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            groups: None,
            rt: None,
            pinned: Vec::new(),
            threads: Vec::new(),
            adopted: None,
            raised: RaisedGroups::default(),
        }
    }

    /// The pCPUs of its vCPUs.
    pub fn cpus(&self) -> GuestCpus {
        let rt = self.rt.iter().flat_map(|rt| &rt.cpus);
        GuestCpus {
            owner: self.owner.clone(),
            real_time: rt.copied().collect(),
            pinned: self.pinned.iter().copied().collect(),
        }
    }

    /// A path in it that isn't one of the groups that process makes, comes from, or is put into.
    pub fn foreign(&self) -> Option<&Path> {
        let own = format!("{}{}", GROUP_PREFIX, self.owner.pid);
        let is_plain = |path: &Path| {
            let mut parts = path.components();
            path.is_absolute()
                && parts.all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        };
        let is_own = |path: &Path| name_of(path) == own;
        let is_partition = |path: &Path| name_of(path).starts_with("vcpufreq-rt.");
        let groups = self.groups.as_ref();
        let own = groups
            .map(|groups| &*groups.group)
            .filter(|path| !is_own(path));
        let top = self.partition().map(|partition| &*partition.top);
        let top = top.filter(|path| !is_partition(path));
        let mut paths = self.paths();
        own.or(top).or_else(|| paths.find(|path| !is_plain(path)))
    }

    fn partition(&self) -> Option<&InPartition> {
        self.rt.as_ref()?.partition.as_ref()
    }

    /// The cgroups that it names.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let groups = self.groups.iter().flat_map(|g| [&*g.group, &*g.origin]);
        let partition = self.partition().into_iter();
        let adopted = self.adopted.iter().flat_map(AdoptedGroups::of_vcpus);
        groups
            .chain(partition.flat_map(|p| [&*p.top, &*p.origin]))
            .chain(adopted)
            .chain(self.raised.paths())
    }
}

/// The identity of process `pid` of the host below `root`.
///
/// # Errors
/// When procfs doesn't show it.
pub fn owner_of(root: &HostRoot, pid: u32) -> anyhow::Result<Owner> {
    let owner = Owner::of(&KernelHost::from(root), pid);
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
        record.display(), what.display()
    )]
    Foreign {
        /// The record.
        record: PathBuf,
        /// What it names.
        what: PathBuf,
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
    let why = match serde_json::from_str(text) {
        Ok(record) => return Ok((record, None)),
        Err(why) => why,
    };
    let mut fields: serde_json::Map<_, _> = serde_json::from_str(text)?;
    fields.retain(|name, _| FIELDS.contains(&&**name));
    let known = serde_json::from_value(fields.into());
    known.map(|known| (known, Some(why.to_string())))
}
