// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One thing about a host, and the report that several make.

use serde::Serialize;

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

    /// With what to change.
    #[must_use]
    pub fn change(self, change: impl Into<String>) -> Self {
        Self {
            change: Some(change.into()),
            ..self
        }
    }
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
            subject, what, why, ..
        } = finding;
        text += &format!("{mark}  {subject:<14}  {what}; {why}\n");
        if let Some(change) = &finding.change {
            text += &format!("{:25}change: {change}\n", "");
        }
    }
    text
}
