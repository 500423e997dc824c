// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a thread notes on its way, as words: `tid=T turns=N NAME=NS@CPU
//! run=NS+NS@CPU ...`. A mark is the time of the thread's own clock and the
//! CPU that it is on; a run is when a burst began, how long it took, and the
//! CPU that it began on.

use std::fmt::Write as _;

use nix::sched::sched_getcpu;

use crate::work::{CHUNK, now_ns, spin};

/// Bursts that are noted: what is beyond would take long to tell over a console.
const RUNS_MAX: usize = 300;

/// The notes, and the work that was done.
#[derive(Debug, Default)]
pub struct LoadLog {
    text: String,
    runs: usize,
    /// Turns of work.
    pub turns: u64,
}

impl LoadLog {
    /// LoadLog the time under a name.
    pub fn mark(&mut self, name: &str) {
        let cpu = sched_getcpu().unwrap_or(0);
        self.add(&format!("{name}={}@{cpu}", now_ns()));
    }

    /// LoadLog a number under a name.
    pub fn figure(&mut self, name: &str, value: u64) {
        self.add(&format!("{name}={value}"));
    }

    /// LoadLog a burst.
    pub fn run(&mut self, from_ns: u64, to_ns: u64, cpu: usize) {
        self.runs += 1;
        if self.runs <= RUNS_MAX {
            let lasted = to_ns.saturating_sub(from_ns);
            self.add(&format!("run={from_ns}+{lasted}@{cpu}"));
        }
    }

    /// Takes another thread's words over; the last `tid` counts.
    pub fn add(&mut self, words: &str) {
        // Writing to a String can't fail.
        let _ = write!(self.text, " {words}");
    }

    /// Busy until then; marks, as `on`, each CPU that it finds itself moved to.
    pub fn busy_until(&mut self, end_ns: u64) {
        let mut cpu = sched_getcpu();
        let (from_ns, from_cpu) = (now_ns(), cpu.unwrap_or(0));
        while now_ns() < end_ns {
            spin(CHUNK);
            self.turns += CHUNK;
            let now_on = sched_getcpu();
            if now_on != cpu {
                cpu = now_on;
                self.mark("on");
            }
        }
        self.run(from_ns, now_ns(), from_cpu);
    }

    /// All of it, with the thread's number first.
    pub fn words(&self, tid: i32) -> String {
        format!("tid={tid} turns={}{}", self.turns, self.text)
    }
}
