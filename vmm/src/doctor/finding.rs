// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One thing about a host, and the report that several make.

use serde::Serialize;
use vcpufreq_host::CpuList;

/// More than a finding's text has characters.
const LONGEST: usize = 1000;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Not here, which limits no guest that doesn't need it.
    #[serde(rename = "n/a")]
    Absent,
    /// Nothing to change.
    Good,
    /// Guests run, with a limit.
    Limit,
    /// No guest can run.
    Blocker,
}

/// One thing about the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// What it is about.
    pub subject: &'static str,
    /// How much it matters.
    pub level: Level,
    /// The CPUs that it is about; none where it is about the host.
    #[serde(skip_serializing_if = "CpuList::is_empty")]
    pub cpus: CpuList,
    /// What is so.
    pub what: String,
    /// What follows from that.
    pub why: String,
    /// What to change, unless it is good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

impl DoctorFinding {
    fn new(
        level: Level,
        subject: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
    ) -> Self {
        Self {
            subject,
            level,
            cpus: CpuList::default(),
            what: what.into(),
            why: why.into(),
            change: None,
        }
    }

    /// Nothing to change.
    pub fn good(subject: &'static str, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Level::Good, subject, what, why)
    }

    /// Not here.
    pub fn absent(subject: &'static str, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Level::Absent, subject, what, why)
    }

    /// Guests run, with a limit.
    pub fn limit(subject: &'static str, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Level::Limit, subject, what, why)
    }

    /// No guest can run.
    pub fn blocker(subject: &'static str, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Level::Blocker, subject, what, why)
    }

    /// About these CPUs.
    #[must_use]
    pub fn on_cpus(self, cpus: CpuList) -> Self {
        Self { cpus, ..self }
    }

    /// With what to change.
    #[must_use]
    pub fn change(self, change: impl Into<String>) -> Self {
        Self {
            change: Some(change.into()),
            ..self
        }
    }

    /// With nothing in its texts that acts on a terminal or fills the screen: parts of them are from
    /// another's file.
    pub(super) fn printable(self) -> Self {
        let plain = |text: String| -> String {
            let chars = text.chars().take(LONGEST);
            chars
                .map(|char| if char.is_control() { '?' } else { char })
                .collect()
        };
        Self {
            what: plain(self.what),
            why: plain(self.why),
            change: self.change.map(plain),
            ..self
        }
    }
}

/// One finding for all CPUs of which the same is so, in the place of the first.
pub(super) fn grouped(findings: Vec<DoctorFinding>) -> Vec<DoctorFinding> {
    let mut groups: Vec<DoctorFinding> = Vec::new();
    for finding in findings {
        let is_same = |other: &&mut DoctorFinding| {
            let same_cpus = finding.clone().on_cpus(other.cpus.clone());
            !finding.cpus.is_empty() && same_cpus == **other
        };
        match groups.iter_mut().find(is_same) {
            Some(group) => group.cpus = group.cpus.or(&finding.cpus),
            None => groups.push(finding),
        }
    }
    groups
}

/// The exit code that findings amount to.
pub fn exit_code(findings: &[DoctorFinding]) -> u8 {
    match findings.iter().map(|finding| finding.level).max() {
        Some(Level::Blocker) => 2,
        Some(Level::Limit) => 1,
        Some(Level::Absent | Level::Good) | None => 0,
    }
}

/// The report for people: a line per finding, with the change below it.
pub fn text(findings: &[DoctorFinding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let mark = match finding.level {
            Level::Absent => "n/a    ",
            Level::Good => "ok     ",
            Level::Limit => "limit  ",
            Level::Blocker => "BLOCKER",
        };
        let DoctorFinding {
            subject,
            cpus,
            what,
            why,
            ..
        } = finding;
        let cpus = match cpus.is_empty() {
            true => String::new(),
            false => format!("CPUs {cpus}: "),
        };
        text += &format!("{mark}  {subject:<14}  {cpus}{what}; {why}\n");
        if let Some(change) = &finding.change {
            text += &format!("{:25}change: {change}\n", "");
        }
    }
    text
}
