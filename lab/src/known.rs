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
    /// Their compilers, whose warnings are errors in the checks.
    pub clang: Vec<String>,
}

impl KnownVersions {
    /// The table of this checkout.
    pub fn read(repo: &Path) -> Result<Self> {
        let path = repo.join("lab/known.toml");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        toml::from_str(&text).with_context(|| path.display().to_string())
    }

    /// Whether the lab has run a kernel of this release (`7.3.4+deb13-arm64`), or of this version. With
    /// another one, warnings and findings in what is built for it decide nothing.
    pub fn has_kernel(&self, release: &str) -> bool {
        self.linux.iter().any(|one| one == upstream(release))
    }

    /// Whether the root's compiler of BPF programs is one of the table.
    pub fn has_clang(&self, root: &Root) -> Result<bool> {
        Ok(self.clang.contains(&root.version("clang")?))
    }

    /// Names each version of the root that the lab has not run with.
    pub fn greet(&self, root: &Root) -> Result<()> {
        let kernels = [Some(root.kernel()), root.old_kernel()];
        let kernels = kernels.into_iter().flatten();
        let kernels = kernels.map(|one| ("Linux", upstream(one).to_owned(), &self.linux));
        for (what, version, known) in kernels.chain([
            ("QEMU", root.version("qemu-system-arm")?, &self.qemu),
            ("libbpf", root.version("libbpf-dev")?, &self.libbpf),
            ("clang", root.version("clang")?, &self.clang),
        ]) {
            if let Some(line) = unknown(what, &version, known) {
                above(|| eprintln!("{line}"));
            }
        }
        Ok(())
    }
}

/// A kernel's version without what Debian adds.
fn upstream(release: &str) -> &str {
    release.split('+').next().unwrap_or_default()
}

fn unknown(what: &str, version: &str, known: &[String]) -> Option<String> {
    let is_known = known.iter().any(|one| one == version);
    (!is_known).then(|| {
        format!("{what} {version} is none that the lab has run (lab/known.toml); it is tried")
    })
}

#[cfg(test)]
mod tests {
    //! Promise: a version that isn't in the table is named, and a kernel's release tells it.
    use super::*;

    #[test]
    fn another_version_is_named() {
        let known = ["7.3.4".to_owned()];
        assert_eq!(unknown("Linux", "7.3.4", &known), None);
        let line = unknown("Linux", "8.1", &known).unwrap();
        assert!(line.starts_with("Linux 8.1 is none"), "{line}");
    }

    #[test]
    fn a_release_is_of_a_version() {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let known = KnownVersions::read(&repo).unwrap();
        assert!(known.has_kernel(&format!("{}+deb13-rt-arm64", known.linux[0])));
        assert!(!known.has_kernel("99.1+deb13-arm64"));
    }
}
