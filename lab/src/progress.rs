// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Long steps say what they do, how far they are, and how long they took.
//!
//! On stderr; on a terminal the line is overwritten, elsewhere each stage
//! gets a line.

use std::cell::Cell;
use std::io::{IsTerminal, Write as _, stderr};
use std::time::{Duration, Instant};

/// How often a count is told where lines aren't overwritten.
const SELDOM: Duration = Duration::from_secs(10);

/// A step that is under way.
#[derive(Debug)]
pub struct Step {
    what: String,
    started: Instant,
    live: bool,
    told: Cell<Instant>,
}

impl Step {
    /// Announces a step.
    pub fn start(what: impl Into<String>) -> Self {
        let step = Self {
            what: what.into(),
            started: Instant::now(),
            live: stderr().is_terminal(),
            told: Cell::new(Instant::now()),
        };
        step.tell("");
        step
    }

    /// Tells how far it is.
    pub fn tell(&self, stage: &str) {
        self.told.set(Instant::now());
        let line = format!(
            "{:>4} s  {}  {stage}",
            self.started.elapsed().as_secs(),
            self.what
        );
        // Progress that can't be shown is no reason to stop.
        let _ = if self.live {
            // Cut at the edge: a line that wraps can't be overwritten.
            write!(stderr(), "\r\x1b[K\x1b[?7l{line}\x1b[?7h")
        } else {
            writeln!(stderr(), "{line}")
        };
        let _ = stderr().flush();
    }

    /// Tells a count that changes often: each time on a terminal, elsewhere
    /// every 10 s.
    pub fn tell_sometimes(&self, count: &str) {
        if self.live || self.told.get().elapsed() >= SELDOM {
            self.tell(count);
        }
    }

    /// Ends the step.
    pub fn done(self) {
        self.tell("done");
    }
}

impl Drop for Step {
    /// What is printed next, an error perhaps, gets a line of its own.
    fn drop(&mut self) {
        if self.live {
            eprintln!();
        }
    }
}
