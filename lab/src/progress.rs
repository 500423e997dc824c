// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Long steps say what they do, how far they are, and how long they took.
//!
//! On stderr; on a terminal the line is overwritten, elsewhere each stage
//! gets a line.

use std::io::{IsTerminal, Write as _, stderr};
use std::time::Instant;

/// A step that is under way.
#[derive(Debug)]
pub struct Step {
    what: String,
    started: Instant,
    live: bool,
}

impl Step {
    /// Announces a step.
    pub fn start(what: impl Into<String>) -> Self {
        let step = Self {
            what: what.into(),
            started: Instant::now(),
            live: stderr().is_terminal(),
        };
        step.tell("");
        step
    }

    /// Tells how far it is.
    pub fn tell(&self, stage: &str) {
        let line = format!(
            "{:>4} s  {}  {stage}",
            self.started.elapsed().as_secs(),
            self.what
        );
        // Progress that can't be shown is no reason to stop.
        let _ = if self.live {
            write!(stderr(), "\r\x1b[K{line}")
        } else {
            writeln!(stderr(), "{line}")
        };
        let _ = stderr().flush();
    }

    /// Ends the step.
    pub fn done(self) {
        self.tell("done");
        if self.live {
            eprintln!();
        }
    }
}
