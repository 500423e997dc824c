// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a command prints on stdout: its result, or changes as they are made.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

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

/// Draws reports, each with its name, as a page.
pub type DrawReports = fn(&[(String, Value)]) -> String;

/// Writes a file as a whole: who reads it meanwhile finds the old or the new one.
///
/// # Errors
/// When it can't be written.
pub(super) fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.with_context(|| format!("can't write {}; check the path", path.display()))
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
