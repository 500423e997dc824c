// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which packages of Debian the toolchain root and the trees beside it are made of, by name, version,
//! suite and architecture: what a figure's world is.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::archive::{ARCHITECTURES, Archive, of};
use crate::tree::{choice, unpacked, wanted};

/// A package of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenPackage {
    /// Of the package.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The suite that has it, by the archive's lists.
    pub suite: String,
    /// Its architecture.
    pub architecture: String,
}

/// The packages of the tree that the lab asks for by name, as they were taken. They are noted once
/// for each use: to read the archive's lists takes seconds.
pub fn taken(dir: &Path) -> Result<Vec<TakenPackage>> {
    let complete = dir.join("complete").exists();
    let path = dir.join(if complete {
        "taken-all.json"
    } else {
        "taken.json"
    });
    if !path.exists() {
        let taken = look_up(dir, complete)?;
        fs::write(&path, serde_json::to_string_pretty(&taken)?)?;
    }
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(serde_json::from_str(&text)?)
}

/// What is installed, and with `all` what is unpacked only: that came by the same lists, so its
/// version is the one that apt would take.
fn look_up(dir: &Path, all: bool) -> Result<Vec<TakenPackage>> {
    let choice = choice(dir)?;
    let wanted = wanted(&choice);
    let archive = Archive::kept(&dir.join("apt"))?;
    let mut packages = installed(&dir.join("tree"))?;
    packages.retain(|one| {
        ARCHITECTURES.iter().any(|architecture| {
            let fits = one.architecture == *architecture || one.architecture == "all";
            fits && wanted.contains(&of(&one.name, architecture))
        })
    });
    let unpacked = match all {
        true => unpacked(&choice),
        false => Vec::new(),
    };
    for (package, version) in archive.candidates(&unpacked)? {
        let (name, architecture) = package.split_once(':').context("a package's name")?;
        packages.push(TakenPackage {
            name: name.to_owned(),
            version,
            suite: String::new(),
            architecture: architecture.to_owned(),
        });
    }
    for one in &mut packages {
        let mut listed = archive.listed.iter();
        let listed = listed.find(|other| other.name == one.name && other.version == one.version);
        one.suite = listed.map_or("unknown", |listed| &listed.suite).to_owned();
    }
    Ok(packages)
}

/// Those of these packages that a log of mmdebstrap tells of, in lines as
/// `Get:9 http://a.example/debian trixie/main arm64 fio arm64 3.39-1 [550 kB]`.
pub fn fetched(log: &str, packages: &[&str]) -> Vec<TakenPackage> {
    let lines = log.lines().filter(|line| line.starts_with("Get:"));
    let taken = lines.filter_map(|line| {
        let mut words = line.split_whitespace().skip(2);
        let suite = words.next()?.split('/').next()?;
        let (name, architecture, version) = (words.nth(1)?, words.next()?, words.next()?);
        packages.contains(&name).then(|| TakenPackage {
            name: name.to_owned(),
            version: version.to_owned(),
            suite: suite.to_owned(),
            architecture: architecture.to_owned(),
        })
    });
    taken.collect()
}

/// The version of a package of this tree.
pub fn version(tree: &Path, package: &str) -> Result<String> {
    let mut installed = installed(tree)?.into_iter();
    let found = installed.find(|one| one.name == package);
    Ok(found
        .with_context(|| format!("the toolchain root has no {package}"))?
        .version)
}

/// What dpkg has installed, without its suite.
fn installed(tree: &Path) -> Result<Vec<TakenPackage>> {
    let status = tree.join("var/lib/dpkg/status");
    let status = fs::read_to_string(&status).with_context(|| status.display().to_string())?;
    let field = |package: &str, name: &str| {
        let mut lines = package.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.map(str::to_owned)
    };
    let packages = status.split("\n\n").filter_map(|package| {
        Some(TakenPackage {
            name: field(package, "Package")?,
            version: field(package, "Version")?,
            suite: String::new(),
            architecture: field(package, "Architecture")?,
        })
    });
    Ok(packages.collect())
}

/// `1:11.1.3+ds-1~bpo13+1` is 11.1.3: without epoch, and without what Debian adds.
pub fn upstream(version: &str) -> &str {
    let version = version
        .split_once(':')
        .map_or(version, |(_, version)| version);
    version.split(['+', '-', '~']).next().unwrap_or(version)
}

#[cfg(test)]
mod tests {
    //! Promises: a version is told from what Debian adds; a package is found in a log among the lists
    //! and what it depends on.
    use super::*;

    #[test]
    fn what_was_fetched_is_told_by_the_log() {
        let log = "I: fio\nGet:3 http://a.example/debian trixie/main arm64 Packages [9615 kB]\n\
                   Get:4 http://a.example/debian trixie/main arm64 libfio arm64 1 [1 kB]\n\
                   Get:5 http://a.example/debian trixie-backports/main arm64 fio arm64 3.39-1 [550 kB]\n\
                   Get:6 http://a.example/debian trixie/main arm64 efi all 2025.02-8 [1 kB]\n";
        let taken = |name: &str, version: &str, suite: &str, architecture: &str| TakenPackage {
            name: name.to_owned(),
            version: version.to_owned(),
            suite: suite.to_owned(),
            architecture: architecture.to_owned(),
        };
        let expected = [
            taken("fio", "3.39-1", "trixie-backports", "arm64"),
            taken("efi", "2025.02-8", "trixie", "all"),
        ];
        assert_eq!(fetched(log, &["fio", "efi", "other"]), expected);
    }

    #[test]
    fn upstream_versions_are_told_from_debians() {
        for (debian, version) in [
            ("1:11.1.3+ds-1~bpo13+1", "11.1.3"),
            ("1.85.1+dfsg1-1+deb13u1", "1.85.1"),
            ("1:1.5.0-3", "1.5.0"),
            ("7.3.4-1~bpo13+1", "7.3.4"),
        ] {
            assert_eq!(upstream(debian), version);
        }
    }
}
