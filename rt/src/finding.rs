// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Findings about a host: each setting's effect, and facts that no setting changes.

use serde::Serialize;

/// A setting, or a part of one, that this host doesn't have or doesn't show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Absent {
    /// The setting's name.
    pub setting: &'static str,
    /// The file.
    pub path: String,
    /// What follows from that.
    pub why: String,
}

/// What people have to change or to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind", content = "text")]
pub enum Finding {
    /// By a reboot with another command line.
    Reboot(String),
    /// In the firmware's set-up.
    Firmware(String),
    /// By hand, now.
    Hand(String),
    /// Nothing to change, but good to know.
    Note(String),
    /// A process that has the name of one that a setting is about, and is left alone.
    Impostor(String),
}

/// Whether a setting does its work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "effect", content = "why")]
pub enum Effect {
    /// It does.
    Effective,
    /// It doesn't, and why.
    Not(String),
    /// It can't be seen, and why.
    Unseen(String),
}
