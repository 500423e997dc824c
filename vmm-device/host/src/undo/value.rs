// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a kernel file's text is read as a value, and when two texts are the same value.

use serde::{Deserialize, Serialize};

use crate::{CpuList, SchedAttr};

/// The form of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// A word or number: the text is the value.
    Text,
    /// A CPU mask: `f`, `0f` and `00000000,0000000f` are the same.
    Mask,
    /// A CPU list.
    List,
    /// Alternatives with the chosen one in brackets: `always [madvise] never`.
    Choice,
    /// The controllers of a cgroup's children: of the text, whether `cpuset` is there, as
    /// `+cpuset` or `-cpuset`, which is also what is written.
    CpusetController,
    /// The same for `cpu`.
    CpuController,
}

impl Format {
    /// The value in a file's text, in the form in which it is written back.
    #[must_use]
    pub fn value(self, text: &str) -> String {
        let text = text.trim();
        match self {
            Self::Text | Self::List | Self::Mask => text.to_owned(),
            Self::Choice => chosen(text).unwrap_or(text).to_owned(),
            Self::CpusetController => controller(text, "cpuset"),
            Self::CpuController => controller(text, "cpu"),
        }
    }

    /// Whether two values mean the same to the kernel.
    #[must_use]
    pub fn same(self, a: &str, b: &str) -> bool {
        match self {
            Self::Mask => {
                a == b || CpuList::from_mask(a).is_some_and(|a| Some(a) == CpuList::from_mask(b))
            }
            Self::List => a == b || a.parse::<CpuList>().is_ok_and(|a| Ok(a) == b.parse()),
            Self::Text | Self::Choice | Self::CpusetController | Self::CpuController => a == b,
        }
    }
}

fn controller(text: &str, controller: &str) -> String {
    let on = text.split_whitespace().any(|name| name == controller);
    format!("{}{controller}", if on { '+' } else { '-' })
}

/// `madvise` of `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0)
}

/// SCHED_OTHER of sched(7).
const OTHER: u32 = 0;

/// Policy and priority of sched(7) from `fifo:4`, `rr:4` or `other:0`.
#[must_use]
pub fn scheduling(text: &str) -> Option<(u32, u32)> {
    let (policy, priority) = text.split_once(':')?;
    let priority: u32 = priority.parse().ok()?;
    match (policy, priority) {
        ("fifo", 1..=99) => Some((SchedAttr::FIFO, priority)),
        ("rr", 1..=99) => Some((SchedAttr::RR, priority)),
        ("other", 0) => Some((OTHER, 0)),
        _ => None,
    }
}

/// The same text from the numbers of proc_pid_stat(5), fields 41 and 40.
#[must_use]
pub(crate) fn scheduling_text(policy: u32, priority: u32) -> Option<String> {
    match policy {
        SchedAttr::FIFO => Some(format!("fifo:{priority}")),
        SchedAttr::RR => Some(format!("rr:{priority}")),
        OTHER => Some("other:0".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what the kernel calls the same is the same here, and a value that was read can be
    //! written back.
    use super::*;

    #[test]
    fn values_of_texts() {
        for (format, text, value) in [
            (Format::Text, "1\n", "1"),
            (Format::Choice, "always [madvise] never\n", "madvise"),
            (Format::Choice, "none", "none"),
            (Format::CpusetController, "cpu io", "-cpuset"),
            (Format::CpusetController, "cpu cpuset io", "+cpuset"),
            (Format::CpuController, "cpuset io", "-cpu"),
        ] {
            assert_eq!(format.value(text), value);
        }
    }

    #[test]
    fn sameness() {
        for (format, a, b, same) in [
            (Format::Mask, "0f", "f", true),
            (Format::Mask, "00000000,0000000f", "f", true),
            (Format::Mask, "7", "f", false),
            (Format::List, "0-2", "0,1,2", true),
            (Format::List, "0-2", "0-3", false),
            (Format::Text, "0", "00", false),
        ] {
            assert_eq!(format.same(a, b), same, "{a} {b}");
        }
    }

    #[test]
    fn schedulings() {
        for text in ["fifo:4", "rr:1", "other:0"] {
            let (policy, priority) = scheduling(text).unwrap();
            assert_eq!(scheduling_text(policy, priority).unwrap(), text);
        }
        for text in ["fifo:0", "fifo:100", "other:3", "deadline:1", "fifo"] {
            assert_eq!(scheduling(text), None);
        }
    }
}
