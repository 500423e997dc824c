// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a command prints on stdout: its result, or changes as they are made.

use std::io::{self, Write};

use anyhow::Context;
use serde_json::{Value, json};

/// Prints a result.
///
/// # Errors
/// When stdout takes no more.
pub fn print(text: impl AsRef<[u8]>) -> anyhow::Result<()> {
    let mut output = io::stdout();
    output
        .write_all(text.as_ref())
        .and_then(|()| output.flush())
        .context("can't write to stdout; check where it goes")
}

/// Prints a line on stderr, which nothing has to take: a command goes on without.
pub(super) fn warn(line: &str) {
    let _ = writeln!(io::stderr(), "vcpufreq: {line}");
}

/// Draws reports, each with its name, as a page.
pub type DrawReports = fn(&[(String, Value)]) -> String;

/// Text that a guest or another machine may have written: nothing of it acts on a terminal but the
/// ends of its lines.
pub(super) fn plain(text: &str) -> String {
    let acts = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.replace("\r\n", "\n").replace(acts, "?")
}

/// Prints changes as they are made, or collects them for JSON. A closed stdout doesn't stop what has
/// begun.
pub(super) struct ChangeOutput {
    json: bool,
    made: Vec<Value>,
}

impl ChangeOutput {
    pub(super) fn new(json: bool) -> Self {
        let made = Vec::new();
        Self { json, made }
    }

    pub(super) fn add(&mut self, name: &str, old: &str, new: &str) {
        if self.json {
            self.made
                .push(json!({ "name": name, "old": old, "new": new }));
        } else {
            let _ = writeln!(io::stdout(), "{name}: {old} → {new}");
        }
    }

    /// Ends the output; the exit code.
    pub(super) fn end(self, refused: &[(String, String)], mut report: Value) -> anyhow::Result<u8> {
        for (name, why) in refused {
            eprintln!("vcpufreq: {name}: {why}");
        }
        if self.json {
            report["changes"] = self.made.into();
            let pairs = refused.iter();
            report["refused"] = pairs
                .map(|(name, why)| json!({ "name": name, "why": why }))
                .collect();
            print(format!("{report:#}\n"))?;
        }
        Ok(u8::from(!refused.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    //! Promise: text of others does nothing to a terminal.
    use super::*;

    #[test]
    fn the_text_of_others_does_nothing_to_a_terminal() {
        assert_eq!(plain("5 µs\t6\r\n7\n"), "5 µs\t6\n7\n");
        assert_eq!(plain("\u{1b}[2J\r\u{9b}x\u{7f}"), "?[2J??x?");
    }
}
