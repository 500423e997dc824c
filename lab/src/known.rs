// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The versions that the lab has run with, from `lab/known.toml`. Another one is named, and tried all
//! the same.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::progress::above;
use crate::root::Root;

/// Upstream versions of each.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownVersions {
    /// Compilers whose warnings are errors.
    pub rustc: Vec<String>,
    /// Kernels of hosts and guests.
    pub linux: Vec<String>,
    /// Emulators, and VMMs of guests.
    pub qemu: Vec<String>,
    /// That which the BPF programs are compiled with.
    pub libbpf: Vec<String>,
}

impl KnownVersions {
    /// The table of this checkout.
    pub fn read(repo: &Path) -> Result<Self> {
        let path = repo.join("lab/known.toml");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        toml::from_str(&text).with_context(|| path.display().to_string())
    }

    /// Names each version of the root that the lab has not run with.
    pub fn greet(&self, root: &Root) -> Result<()> {
        let kernel = root
            .kernel()
            .split('+')
            .next()
            .unwrap_or_default()
            .to_owned();
        for (what, version, known) in [
            ("Linux", kernel, &self.linux),
            ("QEMU", root.version("qemu-system-arm")?, &self.qemu),
            ("libbpf", root.version("libbpf-dev")?, &self.libbpf),
        ] {
            if let Some(line) = unknown(what, &version, known) {
                above(|| eprintln!("{line}"));
            }
        }
        Ok(())
    }
}

fn unknown(what: &str, version: &str, known: &[String]) -> Option<String> {
    let is_known = known.iter().any(|one| one == version);
    (!is_known).then(|| {
        format!("{what} {version} is none that the lab has run (lab/known.toml); it is tried")
    })
}

#[cfg(test)]
mod tests {
    //! Promise: a version that isn't in the table is named.
    use super::*;

    #[test]
    fn another_version_is_named() {
        let known = ["7.3.4".to_owned()];
        assert_eq!(unknown("Linux", "7.3.4", &known), None);
        let line = unknown("Linux", "8.1", &known).unwrap();
        assert!(line.starts_with("Linux 8.1 is none"), "{line}");
    }
}
