// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The changes of a host, those that only people can make, and facts that could not be read.

use serde::Serialize;

use vcpufreq_host::undo::{Owner, ReadHost};

use crate::{
    change::Change,
    finding::{Absent, Finding},
    partition::Partition,
    profile::Profile,
    settings::{self, Sheet, Unit, UnitContext},
};

/// A setting with its changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedSetting {
    /// Its name: the profile's key.
    pub name: &'static str,
    /// Why a real-time guest needs it.
    pub reason: &'static str,
    /// File by file, in the order in which they are made.
    pub changes: Vec<Change>,
}

/// A plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RtPlan {
    /// The partition that it is for.
    pub partition: Partition,
    /// Settings, in the order in which they are made.
    pub settings: Vec<PlannedSetting>,
    /// What this host doesn't have.
    pub absent: Vec<Absent>,
    /// What this user can't see.
    pub unseen: Vec<Absent>,
    /// The words missing on the kernel's command line, as they have to stand there.
    pub cmdline: Option<String>,
    /// What people have to do or to know.
    pub findings: Vec<Finding>,
    /// The process that the changes are for, and end with; `None` for those that stay.
    #[serde(skip)]
    pub owner: Option<Owner>,
}

impl RtPlan {
    /// All changes, in order, each with its setting's name.
    pub fn changes(&self) -> impl Iterator<Item = (&'static str, &Change)> {
        self.settings.iter().flat_map(|setting| {
            let changes = setting.changes.iter();
            changes.map(move |change| (setting.name, change))
        })
    }
}

/// The plan for a partition. Nothing is changed.
#[must_use]
pub fn plan(look: &dyn ReadHost, partition: &Partition, profile: &Profile) -> RtPlan {
    let cx = UnitContext::new(look, partition, profile);
    let mut sheet = Sheet::new(look);
    let mut settings = Vec::new();
    for Unit {
        name, reason, plan, ..
    } in settings::units()
    {
        sheet.setting = name;
        plan(&cx, &mut sheet);
        let changes = std::mem::take(&mut sheet.changes);
        if !changes.is_empty() {
            settings.push(PlannedSetting {
                name,
                reason,
                changes,
            });
        }
    }
    // What only a reboot or people can change is for real-time guests' sake.
    let cmdline = match cx.rt.is_empty() {
        true => None,
        false => settings::by_boot(&cx, &mut sheet),
    };
    RtPlan {
        partition: partition.clone(),
        settings,
        absent: sheet.absent,
        unseen: sheet.unseen,
        cmdline,
        findings: sheet.findings,
        owner: None,
    }
}
