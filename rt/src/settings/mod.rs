// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings. Each is a unit with a name, a reason, its changes on this host, and a check that
//! they are effective on its CPUs.

mod boot;
mod cpuset;
mod frequency;
mod governor;
mod hardware;
mod idle;
mod interrupts;
mod irqbalance;
mod memory;
mod policies;
mod rcu;
mod sched;
mod threads;
mod watchdogs;
mod workqueues;

/// The host's CPUs in sysfs.
pub(crate) const CPU: &str = "/sys/devices/system/cpu";

pub(crate) use cpuset::{occupied, partition_group};

use vcpufreq_device::host::CpuList;

use crate::{
    change::{Change, THERE, Target},
    finding::{Absent, Effect, Finding},
    host::{Look, Unread},
    partition::{self, Partition},
    process,
    profile::{Profile, Scope, Settings},
    value::Format,
};

/// The facts that a unit decides by.
pub(crate) struct Context<'a> {
    pub look: &'a dyn Look,
    pub partition: &'a Partition,
    pub profile: &'a Profile,
    pub rt: CpuList,
    pub online: CpuList,
}

impl<'a> Context<'a> {
    pub(crate) fn new(look: &'a dyn Look, partition: &'a Partition, profile: &'a Profile) -> Self {
        let everyone = partition.rt().or(&partition.housekeeping);
        Self {
            look,
            partition,
            profile,
            rt: partition.rt(),
            online: partition::list(look, partition::ONLINE).unwrap_or(everyone),
        }
    }

    fn settings(&self) -> &Settings {
        &self.profile.settings
    }

    fn housekeeping(&self) -> &CpuList {
        &self.partition.housekeeping
    }

    fn cpus_of(&self, scope: Scope) -> &CpuList {
        match scope {
            Scope::Rt => &self.rt,
            Scope::All => &self.online,
        }
    }
}

/// A setting's code.
pub(crate) struct Unit {
    pub name: &'static str,
    pub reason: &'static str,
    /// The changes that it needs; none when the profile doesn't ask for it.
    pub plan: fn(&Context, &mut Sheet),
    /// Whether it does its work on the CPUs that it is for. For a switch that the kernel has once
    /// for all CPUs, its value is the effect: [`by_value`].
    pub effect: fn(&Context) -> Effect,
}

const UNITS: &[&[Unit]] = &[
    sched::UNITS,
    rcu::UNITS,
    memory::UNITS,
    watchdogs::UNITS,
    workqueues::UNITS,
    interrupts::UNITS,
    governor::UNITS,
    frequency::UNITS,
    idle::UNITS,
    threads::UNITS,
    cpuset::UNITS,
];

/// All units, in the order in which they are made.
pub(crate) fn units() -> impl Iterator<Item = &'static Unit> {
    UNITS.iter().flat_map(|units| units.iter())
}

/// The findings about the host that only a reboot or people can change, and the words that its
/// command line lacks.
pub(crate) fn by_boot(cx: &Context, sheet: &mut Sheet) -> Option<String> {
    sheet.setting = "host";
    hardware::look(cx, sheet);
    sheet.setting = "cmdline";
    boot::missing(cx, sheet)
}

/// The effect of a switch that holds for all CPUs.
fn by_value(_: &Context) -> Effect {
    Effect::Effective
}

/// Collects the changes of the units.
pub(crate) struct Sheet<'a> {
    look: &'a dyn Look,
    /// The unit whose changes these are.
    pub setting: &'static str,
    pub changes: Vec<Change>,
    pub absent: Vec<Absent>,
    pub unseen: Vec<Absent>,
    pub findings: Vec<Finding>,
}

impl<'a> Sheet<'a> {
    pub(crate) fn new(look: &'a dyn Look) -> Self {
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
    fn sysctl(&mut self, name: &str, want: Option<impl ToString>) {
        self.switch(&format!("/proc/sys/{name}"), want);
    }

    /// A file's value, if the profile names one.
    fn switch(&mut self, path: &str, want: Option<impl ToString>) {
        if let Some(want) = want {
            self.file(path, Format::Text, want);
        }
    }

    /// A file's value.
    fn file(&mut self, path: impl Into<String>, format: Format, want: impl ToString) {
        self.shown(path.into(), None, format, want.to_string());
    }

    /// A file whose value another one shows.
    fn shown(&mut self, path: String, shown_in: Option<String>, format: Format, want: String) {
        let target = Target::File {
            path,
            format,
            shown_in,
        };
        self.add(target, Some(want));
    }

    /// A file's value that another change loses.
    fn keep(&mut self, path: String) {
        let target = Target::File {
            path,
            format: Format::Text,
            shown_in: None,
        };
        self.add(target, None);
    }

    /// Whether the setting has this file already.
    fn has(&self, path: &str) -> bool {
        let mut changes = self.changes.iter();
        changes.any(|change| change.target.name() == path)
    }

    fn dir(&mut self, path: String) {
        self.add(Target::Dir { path }, Some(THERE.to_owned()));
    }

    /// A file of a folder that is made before it.
    fn inside(&mut self, path: String, format: Format, want: impl ToString) {
        self.made_later(path, None, format, want);
    }

    /// A file that another change makes appear, there or at another place.
    fn made_later(
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

    fn add(&mut self, target: Target, want: Option<String>) {
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
    fn cannot(&mut self, path: String, why: Unread) {
        match why {
            Unread::Missing => self.absent(path, "this kernel or machine doesn't have it"),
            Unread::Denied => self.unseen(path, "not readable for this user; run as root"),
            Unread::Refused => self.unseen(path, "the kernel refuses to read it"),
        }
    }

    fn absent(&mut self, path: impl Into<String>, why: impl Into<String>) {
        self.absent.push(Absent {
            setting: self.setting,
            path: path.into(),
            why: why.into(),
        });
    }

    fn unseen(&mut self, path: impl Into<String>, why: impl Into<String>) {
        self.unseen.push(Absent {
            setting: self.setting,
            path: path.into(),
            why: why.into(),
        });
    }

    fn finding(&mut self, finding: Finding) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// One finding for all processes that have a name and aren't `what` has it: any user can make
    /// many.
    fn impostors(&mut self, name: &str, what: &str, pids: &[u32]) {
        let (Some(first), more) = (pids.first(), pids.len().saturating_sub(1)) else {
            return;
        };
        let user = process::users(self.look, *first).ok();
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
