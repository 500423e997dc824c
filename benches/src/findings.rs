// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a command found, and where it goes: stdout and files.

use std::path::Path;

use anyhow::Context;
use serde_json::Value;

use crate::undo;

/// What a command found.
#[derive(Debug)]
pub struct Findings {
    /// For programs.
    pub json: Value,
    /// For people.
    pub text: String,
    /// 0, or 1 when something isn't as it should be.
    pub exit_code: u8,
}

/// The exit code on a host that lacks something.
pub const LACKS: u8 = 2;

/// Names what a host lacks, a line each.
pub fn lacks(missing: &[String]) -> Option<Findings> {
    for line in missing {
        eprintln!("vcpufreq: {line}");
    }
    None
}

/// Writes files. A signal waits until all are whole: none is there before, or half of one.
///
/// # Errors
/// When one can't be written.
pub fn write<'a>(files: impl IntoIterator<Item = (&'a Path, String)>) -> anyhow::Result<()> {
    let _undisturbed = undo::undisturbed();
    for (path, text) in files {
        std::fs::write(path, text)
            .with_context(|| format!("can't write {}; name another file", path.display()))?;
    }
    Ok(())
}

pub fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("can't write to stdout; check where it goes")
}
