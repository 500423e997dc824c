// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An event of the group `lab` on a function of the kernel's.

use std::fs::File;
use std::io::Write as _;

use anyhow::{Context, Result};

use super::TRACING;

/// Such an event, which has to go after the instances that have it on.
pub struct Probe(&'static str);

impl Probe {
    /// Where it is, `p` or `r` for the function's return; its name in the group; the function and
    /// what to record.
    pub fn set(at: char, name: &'static str, what: &str) -> Result<Self> {
        let probe = Self(name);
        // A probe is left that was not removed.
        let _ = probe.remove();
        write(&format!("{at}:lab/{name} {what}"))?;
        Ok(probe)
    }

    fn remove(&self) -> Result<()> {
        write(&format!("-:lab/{}", self.0))
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("{error:#}");
        }
    }
}

/// Adds or removes one; to write over the file would remove all.
fn write(line: &str) -> Result<()> {
    let path = format!("{TRACING}/kprobe_events");
    let mut file = File::options()
        .append(true)
        .open(&path)
        .with_context(|| path.clone())?;
    file.write_all(line.as_bytes())
        .with_context(|| format!("{path}: {line}"))
}
