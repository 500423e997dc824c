// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A line of a trace, as the kernel prints it:
//! `  vcpu0-99  [000] d.h2.  12.345678: cpu_frequency: state=1800000 cpu_id=0`
//! or `trace-cmd report`, which may leave the flags out.

use anyhow::{Context, Result};

/// An event.
#[derive(Debug, Clone, Copy)]
pub struct TraceLine<'a> {
    text: &'a str,
    /// Name and number of the thread on whose time it came: `vcpu0-99`.
    pub thread: &'a str,
    /// The pCPU.
    pub cpu: u32,
    /// In µs of the trace's clock.
    pub time_us: u64,
    /// The event's name, or the system call's.
    pub event: &'a str,
    /// What it has.
    pub tail: &'a str,
}

/// The events of a trace. Other lines are about the trace itself.
pub fn events(text: &str) -> impl Iterator<Item = TraceLine<'_>> {
    text.lines().filter_map(TraceLine::read)
}

/// The first bytes of a line, which have its CPU in any kernel's form: a guest's text may have brackets
/// without end.
const CPU_WITHIN: usize = 128;

impl<'a> TraceLine<'a> {
    /// None of a line that is no event's.
    pub fn read(text: &'a str) -> Option<Self> {
        // A thread's name, of 15 bytes at most, can hold brackets too.
        let brackets = text.match_indices('[');
        let mut brackets = brackets.take_while(|(at, _)| *at < CPU_WITHIN);
        brackets.find_map(|(at, _)| Self::with_cpu_at(text, at))
    }

    fn with_cpu_at(text: &'a str, at: usize) -> Option<Self> {
        let (cpu, rest) = text.get(at + 1..)?.split_once("] ")?;
        let rest = rest.trim_start();
        let (first, behind) = rest.split_once(' ')?;
        let rest = if first.ends_with(':') { rest } else { behind };
        let (stamp, rest) = rest.trim_start().split_once(": ")?;
        let (seconds, part) = stamp.split_once('.')?;
        // trace-cmd can print ns.
        let (micros, nanos) = part.split_at_checked(6).unwrap_or((part, ""));
        let rest = rest.trim_start();
        let name = rest.find([':', '('])?;
        // A name that has an event's form comes first, with any numbers.
        let us = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?;
        nanos
            .bytes()
            .all(|byte| byte.is_ascii_digit())
            .then_some(())?;
        Some(Self {
            text,
            thread: text[..at].trim(),
            cpu: cpu.parse().ok()?,
            time_us: us.checked_add(micros.parse().ok()?)?,
            event: &rest[..name],
            tail: rest[name + 1..].trim_start(),
        })
    }

    /// The thread's number.
    pub fn tid(&self) -> Option<i32> {
        self.thread.rsplit_once('-')?.1.parse().ok()
    }

    /// The number in `NAME=NUMBER`.
    pub fn number(&self, name: &str) -> Result<u32> {
        let mut words = self.tail.split_whitespace();
        let value = words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        self.known(value)?.parse().with_context(|| self.wrong())
    }

    /// The number in `NAME 0xNUMBER`.
    pub fn hex(&self, name: &str) -> Result<u64> {
        let digits = self.behind(name)?.strip_prefix("0x");
        u64::from_str_radix(self.known(digits)?, 16).with_context(|| self.wrong())
    }

    /// The word in `NAME WORD`.
    pub fn behind(&self, name: &str) -> Result<&'a str> {
        let mut words = self.tail.split_whitespace();
        self.known(words.find(|word| *word == name).and_then(|_| words.next()))
    }

    /// What an event of this kind always has.
    pub fn known<T>(&self, found: Option<T>) -> Result<T> {
        found.with_context(|| self.wrong())
    }

    fn wrong(&self) -> String {
        format!("trace line '{}'", self.text)
    }
}

#[cfg(test)]
mod tests {
    //! Promise: a trace's lines are read as the kernel prints them, whatever threads are called.
    use super::*;

    #[test]
    fn an_event() {
        let text = "           vcpu0-99      [003] d.h2.    12.345678: cpu_frequency: state=1800000 cpu_id=3";
        let line = TraceLine::read(text).unwrap();
        assert_eq!((line.thread, line.tid()), ("vcpu0-99", Some(99)));
        assert_eq!((line.cpu, line.time_us), (3, 12_345_678));
        assert_eq!(line.event, "cpu_frequency");
        assert_eq!(line.number("state").unwrap(), 1_800_000);
        let error = line.number("nothing").unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }

    #[test]
    fn names_with_brackets_and_colons() {
        let text =
            " a [1] b: c-7 [002] ..... 1.000002: kvm_mmio: mmio read len 4 gpa 0xa001000 val 0x10";
        let line = TraceLine::read(text).unwrap();
        assert_eq!((line.thread, line.cpu), ("a [1] b: c-7", 2));
        assert_eq!((line.event, line.hex("val").unwrap()), ("kvm_mmio", 16));
    }

    #[test]
    fn a_line_of_trace_cmd() {
        for stamp in ["12.345678", "12.345678901"] {
            let text = format!(
                "          <idle>-0     [002]  {stamp}: cpu_frequency:        state=1800000 cpu_id=2"
            );
            let line = TraceLine::read(&text).unwrap();
            assert_eq!((line.thread, line.cpu), ("<idle>-0", 2));
            assert_eq!((line.time_us, line.event), (12_345_678, "cpu_frequency"));
            assert_eq!(line.tail, "state=1800000 cpu_id=2");
        }
    }

    #[test]
    fn a_system_call() {
        let text =
            " init-1 [000] ..... 1.000002: sys_sched_setattr(pid: 63, uattr: ffff, flags: 0)";
        let line = TraceLine::read(text).unwrap();
        assert_eq!(line.event, "sys_sched_setattr");
        assert!(line.tail.starts_with("pid: 63,"));
    }

    #[test]
    fn other_lines_are_none() {
        let text = "# tracer: nop\n#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION\n\
                    CPU:2 [LOST 5 EVENTS]\n\n init-1 [000] ..... 1.000002: kvm_entry: PC: 0x8\n";
        let names: Vec<_> = events(text).map(|line| line.event).collect();
        assert_eq!(names, ["kvm_entry"]);
    }
}
