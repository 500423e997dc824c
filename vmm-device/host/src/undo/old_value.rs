// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A value as it was before a program changed it: a kernel file's or kernel thread's, or that a
//! folder wasn't there.

use std::{
    io,
    thread::sleep,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    host::{ReadHost, Unread, WriteHost},
    retry::TRY_EVERY,
    target::Target,
};

/// A value as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OldValue {
    /// What is changed.
    pub target: Target,
    /// Its value before.
    pub old: String,
    /// The value that the program gives it, if any other is somebody else's and stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only_if: Option<String>,
}

/// How a value stands to the old one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueNow {
    /// It is the old one.
    Old,
    /// It is this one.
    Changed(String),
    /// It is somebody else's.
    Anothers,
    /// What had it is gone, and needs nothing.
    Gone,
}

impl OldValue {
    /// Takes the value now for the old one.
    ///
    /// # Errors
    /// As [`Target::now`].
    pub fn look_again(&mut self, look: &dyn ReadHost) -> Result<(), Unread> {
        self.old = self.target.now(look)?;
        Ok(())
    }

    /// How the value stands now.
    ///
    /// # Errors
    /// Why that is unknown, and what to do: it can't be read, it comes back with its CPU, or its file
    /// system isn't mounted.
    pub fn now(&self, look: &dyn ReadHost) -> Result<ValueNow, String> {
        let target = &self.target;
        if let Some((kind, mount)) = unmounted(look, target) {
            return Err(format!(
                "{mount} is not mounted; mount -t {kind} {kind} {mount}, then try again"
            ));
        }
        match target.now(look) {
            Ok(now) if target.same(&now, &self.old) => Ok(ValueNow::Old),
            Ok(now) => Ok(match &self.only_if {
                Some(own) if !target.same(&now, own) => ValueNow::Anothers,
                _ => ValueNow::Changed(now),
            }),
            Err(Unread::Missing) if target.comes_back() => Err(
                "it isn't there while its CPU is offline; bring it online, then try again"
                    .to_owned(),
            ),
            Err(Unread::Missing) => Ok(ValueNow::Gone),
            Err(Unread::Denied) => Err("it can't be read; run as root".to_owned()),
            Err(Unread::Refused) => Err("the kernel refuses to read it".to_owned()),
        }
    }

    /// Brings it back, unless it is somebody else's or gone; how it stood before. A folder that is used
    /// is tried again for as long as `patience`.
    ///
    /// # Errors
    /// As [`Self::now`]; why the kernel refuses the old value.
    pub fn undo(&self, host: &dyn WriteHost, patience: Duration) -> Result<ValueNow, String> {
        let now = self.now(host.as_look())?;
        let is_done = match now {
            // A value that reads as the old one is written, too: cpufreq shows a new limit late
            // (`refresh_frequency_limits` of a work item), and heat hides one.
            ValueNow::Old => matches!(self.target, Target::Dir { .. }),
            ValueNow::Changed(_) => false,
            ValueNow::Anothers | ValueNow::Gone => true,
        };
        if is_done {
            return Ok(now);
        }
        let until = Instant::now() + patience;
        loop {
            match self.target.write(host, &self.old) {
                Err(error) if is_used(&error) && Instant::now() < until => sleep(TRY_EVERY),
                written => return written.map(|()| now).map_err(|error| error.to_string()),
            }
        }
    }
}

fn is_used(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy
}

/// The file system that a target is on, where it isn't mounted: the kernel keeps the values all
/// the same.
fn unmounted(look: &dyn ReadHost, target: &Target) -> Option<(&'static str, &'static str)> {
    const MOUNTS: [(&str, &str); 2] = [
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
    ];
    let name = target.name();
    let of = |(_, mount): &&(&str, &str)| {
        name.strip_prefix(mount)
            .is_some_and(|rest| rest.starts_with('/'))
    };
    let (kind, mount) = MOUNTS.iter().find(of)?;
    let is_empty = match look.list(mount) {
        Ok(names) => names.is_empty(),
        Err(why) => why == Unread::Missing,
    };
    is_empty.then_some((*kind, *mount))
}

#[cfg(test)]
mod tests {
    //! Promises: a value comes back as it was; what is gone or somebody else's needs nothing.
    use super::*;
    use crate::fakes::FakeHost;
    use crate::undo::{Format, KernelHost};

    fn value(path: &str, only_if: Option<&str>) -> OldValue {
        OldValue {
            target: Target::Inside {
                path: path.to_owned(),
                format: Format::Text,
                or_at: None,
            },
            old: "n/a".to_owned(),
            only_if: only_if.map(str::to_owned),
        }
    }

    #[test]
    fn a_value_comes_back_once_and_a_cpu_that_is_gone_is_no_error() {
        let fake = FakeHost::empty();
        let host = KernelHost::from(&fake.root());
        fake.write("sys/bound", "50000");
        let undone = value("/sys/bound", None).undo(&host, Duration::ZERO);
        assert_eq!(undone, Ok(ValueNow::Changed("50000".to_owned())));
        assert_eq!(fake.root().text("sys/bound").unwrap(), "n/a");
        let undone = |path| value(path, None).undo(&host, Duration::ZERO);
        assert_eq!(undone("/sys/bound"), Ok(ValueNow::Old));
        assert_eq!(undone("/sys/none"), Ok(ValueNow::Gone));
    }

    #[test]
    fn a_value_that_reads_as_the_old_one_is_written() {
        let fake = FakeHost::empty();
        let host = KernelHost::from(&fake.root());
        // The same value, and another text.
        fake.write("sys/bound", "n/a  ");
        let undone = value("/sys/bound", None).undo(&host, Duration::ZERO);
        assert_eq!(undone, Ok(ValueNow::Old));
        let written = std::fs::read_to_string(fake.root().path("sys/bound"));
        assert_eq!(written.unwrap(), "n/a");
    }

    #[test]
    fn a_value_is_what_it_was_when_nobody_else_was_there() {
        let fake = FakeHost::empty();
        let host = KernelHost::from(&fake.root());
        fake.write("sys/bound", "50\n");
        let mut value = value("/sys/bound", None);
        value.look_again(&host).unwrap();
        assert_eq!(value.old, "50");
        fake.remove("sys/bound");
        assert!(value.look_again(&host).is_err());
    }

    #[test]
    fn a_value_that_was_set_meanwhile_stays() {
        let fake = FakeHost::empty();
        let host = KernelHost::from(&fake.root());
        fake.write("sys/bound", "50");
        let undone = value("/sys/bound", Some("0")).undo(&host, Duration::ZERO);
        assert_eq!(undone, Ok(ValueNow::Anothers));
        fake.write("sys/bound", "0");
        let undone = value("/sys/bound", Some("0")).undo(&host, Duration::ZERO);
        assert!(matches!(undone, Ok(ValueNow::Changed(_))), "{undone:?}");
        assert_eq!(fake.root().text("sys/bound").unwrap(), "n/a");
    }
}
