// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sheet that units write their changes and findings on.

use vcpufreq_host::undo::{Format, ReadHost, THERE, Target, Unread, users};

use crate::{
    change::Change,
    finding::{Absent, Finding},
};

/// Collects the changes of the units.
pub(crate) struct Sheet<'a> {
    pub look: &'a dyn ReadHost,
    /// The unit whose changes these are.
    pub setting: &'static str,
    pub changes: Vec<Change>,
    pub absent: Vec<Absent>,
    pub unseen: Vec<Absent>,
    pub findings: Vec<Finding>,
}

impl<'a> Sheet<'a> {
    pub(crate) fn new(look: &'a dyn ReadHost) -> Self {
        Self {
            look,
            setting: "",
            changes: Vec::new(),
            absent: Vec::new(),
            unseen: Vec::new(),
            findings: Vec::new(),
        }
    }

    /// The value of a file of `/proc/sys`, if the profile names one.
    pub(super) fn sysctl(&mut self, name: &str, want: Option<impl ToString>) {
        self.switch(&format!("/proc/sys/{name}"), want);
    }

    /// A file's value, if the profile names one.
    pub(super) fn switch(&mut self, path: &str, want: Option<impl ToString>) {
        if let Some(want) = want {
            self.file(path, Format::Text, want);
        }
    }

    /// A file's value.
    pub(super) fn file(&mut self, path: impl Into<String>, format: Format, want: impl ToString) {
        self.shown(path.into(), None, format, want.to_string());
    }

    /// A file whose value another one shows.
    pub(super) fn shown(
        &mut self,
        path: String,
        shown_in: Option<String>,
        format: Format,
        want: String,
    ) {
        let target = Target::File {
            path,
            format,
            shown_in,
        };
        self.add(target, Some(want));
    }

    /// A file's value that another change loses.
    pub(super) fn keep(&mut self, path: String) {
        let target = Target::File {
            path,
            format: Format::Text,
            shown_in: None,
        };
        self.add(target, None);
    }

    /// Whether the setting has this file already.
    pub(super) fn has(&self, path: &str) -> bool {
        let mut changes = self.changes.iter();
        changes.any(|change| change.target.name() == path)
    }

    pub(super) fn dir(&mut self, path: String) {
        self.add(Target::Dir { path }, Some(THERE.to_owned()));
    }

    /// A file of a folder that is made before it.
    pub(super) fn inside(&mut self, path: String, format: Format, want: impl ToString) {
        self.made_later(path, None, format, want);
    }

    /// A file that another change makes appear, there or at another place.
    pub(super) fn made_later(
        &mut self,
        path: String,
        or_at: Option<String>,
        format: Format,
        want: impl ToString,
    ) {
        let target = Target::Inside {
            path,
            format,
            or_at,
        };
        let now = target.now(self.look).ok();
        self.changes.push(Change {
            target,
            now,
            want: Some(want.to_string()),
        });
    }

    pub(super) fn add(&mut self, target: Target, want: Option<String>) {
        match target.now(self.look) {
            Ok(now) => self.changes.push(Change {
                target,
                now: Some(now),
                want,
            }),
            Err(why) => self.cannot(target.name(), why),
        }
    }

    /// A file that can't be read.
    pub(super) fn cannot(&mut self, path: String, why: Unread) {
        match why {
            Unread::Missing => self.absent(path, "this kernel or machine doesn't have it"),
            Unread::Denied => self.unseen(path, "not readable for this user; run as root"),
            Unread::Refused => self.unseen(path, "the kernel refuses to read it"),
        }
    }

    pub(super) fn absent(&mut self, path: impl Into<String>, why: impl Into<String>) {
        self.absent.push(Absent {
            setting: self.setting,
            path: path.into(),
            why: why.into(),
        });
    }

    pub(super) fn unseen(&mut self, path: impl Into<String>, why: impl Into<String>) {
        self.unseen.push(Absent {
            setting: self.setting,
            path: path.into(),
            why: why.into(),
        });
    }

    pub(super) fn finding(&mut self, finding: Finding) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// One finding for all processes that have a name and aren't `what` has it: any user can make
    /// many.
    pub(super) fn impostors(&mut self, name: &str, what: &str, pids: &[u32]) {
        let (Some(first), more) = (pids.first(), pids.len().saturating_sub(1)) else {
            return;
        };
        let user = users(self.look, *first).ok();
        let user = user.and_then(|users| users.first().copied());
        let user = user.map_or_else(String::new, |user| format!(" of user {user}"));
        let more = match more {
            0 => String::new(),
            more => format!(", as are {more} more"),
        };
        self.finding(Finding::Impostor(format!(
            "process {first}{user} is called {name} and is not {what}{more}; it is left alone"
        )));
    }
}
