// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a thread of the load logs on its way; on the line it is JSON.

use std::collections::BTreeMap;

use nix::sched::sched_getcpu;
use serde::{Deserialize, Serialize};

use crate::work::{CHUNK, now_ns, spin};

/// A moment of the thread's own clock, and the CPU that it was on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// Its name.
    pub name: String,
    /// CLOCK_MONOTONIC in ns, where the thread ran.
    pub ns: u64,
    /// The CPU.
    pub cpu: usize,
    /// It is another process' moment, which that has told; the CPU is where this one heard of it.
    #[serde(default)]
    pub told: bool,
}

/// A frame, or another piece of work that is due by a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameSpan {
    /// When its period began: CLOCK_MONOTONIC in ns, where the thread ran.
    pub begin_ns: u64,
    /// How long it then took until the work was done, in ns.
    pub ns: u64,
}

/// The log, and the work that was done.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadLog {
    /// The thread's number, where it ran.
    pub tid: i32,
    /// Turns of work.
    pub turns: u64,
    /// Moments that were marked.
    pub marks: Vec<Stamp>,
    /// Numbers, by name.
    pub figures: BTreeMap<String, u64>,
    /// Frames, in order.
    pub frames: Vec<FrameSpan>,
}

impl LoadLog {
    /// Logs the time under a name.
    pub fn mark(&mut self, name: &str) {
        self.push(name, now_ns(), false);
    }

    /// Logs a time of the same clock that another process has told.
    pub fn mark_told(&mut self, name: &str, ns: u64) {
        self.push(name, ns, true);
    }

    fn push(&mut self, name: &str, ns: u64, told: bool) {
        self.marks.push(Stamp {
            name: name.to_owned(),
            ns,
            cpu: sched_getcpu().unwrap_or(0),
            told,
        });
    }

    /// Logs a number under a name.
    pub fn figure(&mut self, name: &str, value: u64) {
        self.figures.insert(name.to_owned(), value);
    }

    /// Goes on as the log of another thread, whose number and turns count.
    pub fn go_on_as(&mut self, other: Self) {
        (self.tid, self.turns) = (other.tid, other.turns);
        self.marks.extend(other.marks);
        self.figures.extend(other.figures);
        self.frames.extend(other.frames);
    }

    /// Logs a frame, by the begin of its period and its end, in ns.
    pub fn frame(&mut self, begin_ns: u64, end_ns: u64) {
        self.frames.push(FrameSpan {
            begin_ns,
            ns: end_ns.saturating_sub(begin_ns),
        });
    }

    /// Busy until then; marks, as `on`, each CPU that it finds itself moved to.
    pub fn busy_until(&mut self, end_ns: u64) {
        let mut cpu = sched_getcpu();
        while now_ns() < end_ns {
            spin(CHUNK);
            self.turns += CHUNK;
            let now_on = sched_getcpu();
            if now_on != cpu {
                cpu = now_on;
                self.mark("on");
            }
        }
    }
}
