// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host tuning for real-time guests.
//!
//! ```text
//! facts (ReadHost) + Partition + Profile ─▶ plan ─▶ Plan: changes, each with reason and effect
//!                                                │
//!              record of the old values ◀── apply ├─▶ check: set? effective on these CPUs?
//!                        └────────────▶ restore
//! ```
//! [`plan()`] only reads. [`apply()`] writes the old values to disk, then makes the changes that
//! the plan lists and no others. [`restore()`] brings the old values back, also after a crash.
//! Changes that need a reboot or the firmware are in the plan as text for people.
//!
//! [`cli`] is the command line `vcpufreq rt`. The rest knows no VM and no virtual cpufreq device; it
//! runs no thread and no daemon.

#![deny(clippy::missing_errors_doc)]

mod apply;
mod change;
mod check;
pub mod cli;
mod finding;
mod in_force;
mod measure;
mod partition;
mod plan;
mod policy_frequencies;
mod profile;
mod published;
mod record;
mod restore;
mod settings;
mod targets;

pub use apply::{Applied, ApplyError, apply};
pub use change::Change;
pub use check::{Checked, check, is_ready};
pub use finding::{Absent, Effect, Finding};
pub use in_force::{InForce, InForceError};
pub use partition::{Partition, PartitionError, PartitionGuest};
pub use plan::{PlannedSetting, RtPlan, plan};
pub use policy_frequencies::{Frequency, PolicyFrequencies};
pub use profile::{
    CpusetPartition, IdleStates, MoveTo, Profile, ProfileError, SHIPPED, Scope, Settings,
};
pub use published::PublishedMaximum;
pub use record::{Entry, PATH, Record, RecordError};
pub use restore::{RestoreError, Restored, restore, restore_of};
pub use settings::{FrequencyCap, frequency_caps};
pub use vcpufreq_host::CpuList;
