// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a thread of the load noted, in the host's time and pCPUs.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

/// A mark of the load's, in the host's time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Its name.
    pub name: String,
    /// When, in µs of CLOCK_MONOTONIC.
    pub us: u64,
    /// The pCPU that the load was on.
    pub cpu: u32,
}

/// A burst of the load's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// When it began, in µs of CLOCK_MONOTONIC.
    pub us: u64,
    /// How long it took, in µs.
    pub lasted_us: u64,
    /// The pCPU that it began on.
    pub cpu: u32,
}

/// What a thread of the load noted.
#[derive(Debug, Default)]
pub struct LoadLog {
    /// Its number, where it ran.
    pub tid: i32,
    /// Times that were marked.
    pub marks: Vec<Mark>,
    /// Numbers, by name: `turns` of work, and what its jobs note.
    pub figures: BTreeMap<String, u64>,
    /// Its bursts.
    pub runs: Vec<Run>,
}

impl LoadLog {
    /// Reads `tid=T turns=N NAME=NS@CPU run=NS+NS@CPU ...`; what a new thread
    /// notes comes last. `offset_ns` makes host's time of the load's, `pcpu_of`
    /// gives the pCPU of a CPU of the load's.
    pub fn read(
        words: &str,
        offset_ns: i64,
        pcpu_of: impl Fn(usize) -> Option<u32>,
    ) -> Result<Self> {
        let mut noted = Self::default();
        for word in words.split_whitespace() {
            let wrong = || format!("note '{word}' of the load program");
            let (name, value) = word.split_once('=').with_context(wrong)?;
            let place = value.split_once('@');
            let Some((time, cpu)) = place else {
                if name == "tid" {
                    noted.tid = value.parse().with_context(wrong)?;
                } else {
                    let number = value.parse().with_context(wrong)?;
                    noted.figures.insert(name.to_owned(), number);
                }
                continue;
            };
            let cpu = pcpu_of(cpu.parse().with_context(wrong)?).with_context(wrong)?;
            let (ns, lasted) = time.split_once('+').unwrap_or((time, "0"));
            let ns: i64 = ns.parse().with_context(wrong)?;
            let us = u64::try_from((ns + offset_ns) / 1000).with_context(wrong)?;
            if name == "run" {
                let lasted_us = lasted.parse::<u64>().with_context(wrong)? / 1000;
                noted.runs.push(Run { us, lasted_us, cpu });
            } else {
                let name = name.to_owned();
                noted.marks.push(Mark { name, us, cpu });
            }
        }
        Ok(noted)
    }
}

#[cfg(test)]
mod tests {
    //! Times and CPUs become the host's; what makes no sense is an error.

    use super::*;

    #[test]
    fn notes_are_the_hosts() {
        let words = "tid=4 turns=8 start=5000@1 run=6000+2000@1 met=3 tid=5";
        let notes = LoadLog::read(words, 1_000, |cpu| (cpu == 1).then_some(6)).unwrap();
        assert_eq!((notes.tid, notes.figures["met"]), (5, 3));
        let start = Mark {
            name: "start".to_owned(),
            us: 6,
            cpu: 6,
        };
        assert_eq!(notes.marks, [start]);
        let run = Run {
            us: 7,
            lasted_us: 2,
            cpu: 6,
        };
        assert_eq!(notes.runs, [run]);
        for wrong in ["start", "start=x@1", "start=1@0", "met=x"] {
            let read = LoadLog::read(wrong, 0, |cpu| (cpu == 1).then_some(6));
            assert!(read.is_err(), "{wrong}");
        }
    }
}
