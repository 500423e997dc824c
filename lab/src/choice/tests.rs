// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises, on made-up archives that the real apt reads: what is out of step, missing, gone or newer
//! than anything known ends with a set that apt's solver takes, or with a line that names it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, anyhow, ensure};
use sha2::{Digest, Sha256};

use super::{ARCHITECTURES, Archive, Choice, RootPart, WantedPackages};
use crate::child_output::{output, quietly};
use crate::tree::{PackageOrder, settle};

const SUITES: [&str; 2] = ["trixie", "trixie-backports"];
const KERNEL: &str = "7.3.4+deb13";

/// A dummy package: suite, name, version, architecture, fields beside these.
type Dummy = (usize, String, &'static str, &'static str, String);

/// An archive in a folder that is removed with it.
struct MadeUp {
    dir: PathBuf,
    dummies: Vec<Dummy>,
    wanted: WantedPackages,
}

impl MadeUp {
    /// One with a whole kernel, and a library of version 1 in stable.
    fn new(name: &str) -> Self {
        let name = format!("vcpufreq-archive-{name}-{}", std::process::id());
        let mut archive = Self {
            dir: std::env::temp_dir().join(name),
            dummies: Vec::new(),
            wanted: WantedPackages {
                by_all: libraries(),
                by_tests: Vec::new(),
            },
        };
        archive.kernel(1, KERNEL, "7.3.4-1", &ARCHITECTURES);
        archive.library(0, "1", &ARCHITECTURES);
        archive
    }

    fn add(&mut self, suite: usize, name: &str, version: &'static str, architecture: &'static str) {
        let dummy = (suite, name.to_owned(), version, architecture, String::new());
        self.dummies.push(dummy);
    }

    /// A library as Rust's: of both architectures at once only in one version.
    fn library(&mut self, suite: usize, version: &'static str, architectures: &[&'static str]) {
        for architecture in architectures {
            let other = match *architecture {
                "amd64" => "arm64",
                _ => "amd64",
            };
            let fields = format!(
                "Source: rusty\nMulti-Arch: same\n\
                 Breaks: libdummy:{other} (<< {version}), libdummy:{other} (>> {version})\n"
            );
            let dummy = (suite, "libdummy".to_owned(), version, *architecture, fields);
            self.dummies.push(dummy);
        }
    }

    /// The packages of a kernel for these architectures; headers' programs are amd64's always.
    fn kernel(
        &mut self,
        suite: usize,
        release: &str,
        version: &'static str,
        architectures: &[&'static str],
    ) {
        self.add(suite, &format!("linux-kbuild-{release}"), version, "amd64");
        for (name, architecture) in [
            ("linux-image-{}-arm64", "arm64"),
            ("linux-headers-{}-arm64", "arm64"),
            ("linux-image-{}-rt-arm64", "arm64"),
            ("linux-headers-{}-rt-arm64", "arm64"),
            ("linux-binary-{}-amd64", "amd64"),
            ("linux-headers-{}-amd64", "amd64"),
            ("linux-modules-{}-amd64", "amd64"),
        ] {
            if architectures.contains(&architecture) {
                self.add(suite, &name.replace("{}", release), version, architecture);
            }
        }
    }

    /// Writes packages and lists; lines of a sources.list for them.
    fn write(&self) -> Vec<String> {
        let _ = fs::remove_dir_all(self.dir.join("dists"));
        let mut lines = Vec::new();
        for (number, suite) in SUITES.iter().enumerate() {
            let mut sums = String::new();
            for architecture in ARCHITECTURES {
                let folder = format!("main/binary-{architecture}");
                let place = self.dir.join("dists").join(suite).join(&folder);
                fs::create_dir_all(&place).unwrap();
                let of_list = self.dummies.iter();
                let of_list = of_list.filter(|one| one.0 == number && one.3 == architecture);
                let list: String = of_list.map(|one| self.package(one)).collect();
                fs::write(place.join("Packages"), &list).unwrap();
                let sum = hex(list.as_bytes());
                writeln!(sums, " {sum} {} {folder}/Packages", list.len()).unwrap();
            }
            let release = format!(
                "Origin: made up\nSuite: {suite}\nCodename: {suite}\nComponents: main\n\
                 Architectures: amd64 arm64\nSHA256:\n{sums}"
            );
            let place = self.dir.join("dists").join(suite).join("Release");
            fs::write(place, release).unwrap();
            let place = self.dir.display();
            lines.push(format!("deb [trusted=yes] copy:{place} {suite} main"));
        }
        lines
    }

    /// Makes a package, and its paragraph of the list.
    fn package(&self, (_, name, version, architecture, fields): &Dummy) -> String {
        let control = format!(
            "Package: {name}\nVersion: {version}\nArchitecture: {architecture}\n\
             Maintainer: a <a@a.invalid>\nDescription: dummy\n{fields}"
        );
        let file = format!("{name}_{version}_{architecture}.deb");
        let place = self.dir.join(&file);
        if !place.exists() {
            let tree = self.dir.join("tree");
            fs::create_dir_all(tree.join("DEBIAN")).unwrap();
            fs::write(tree.join("DEBIAN/control"), &control).unwrap();
            let mut build = Command::new("dpkg-deb");
            build.args(["--build", "--root-owner-group", "-Znone"]);
            quietly(build.arg(&tree).arg(&place), "dpkg-deb").unwrap();
        }
        let bytes = fs::read(&place).unwrap();
        let sum = hex(&bytes);
        format!(
            "{control}Filename: {file}\nSize: {}\nSHA256: {sum}\n\n",
            bytes.len()
        )
    }

    fn choose(&self) -> Result<(Archive, Choice)> {
        let sources = self.write();
        let archive = Archive::fetch(&self.dir.join("apt"), &sources)?;
        let choice = Choice::of(&archive, SUITES[0], &self.wanted)?;
        archive.prefer(&choice.preferences)?;
        Ok((archive, choice))
    }

    /// What is chosen, and apt's word on it: the versions of the library that it would install.
    fn settled(&self) -> (Choice, BTreeSet<String>) {
        let (archive, choice) = self.choose().unwrap();
        let wanted: Vec<String> = self.wanted.all().map(str::to_owned).collect();
        archive
            .solve(&[wanted.clone(), kernels(&choice)].concat())
            .unwrap();
        (choice, simulated(&archive, &wanted))
    }
}

impl Drop for MadeUp {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(bytes) {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

fn libraries() -> Vec<String> {
    ["libdummy:amd64", "libdummy:arm64"]
        .map(str::to_owned)
        .into()
}

fn kernels(choice: &Choice) -> Vec<String> {
    [choice.kernel_packages(), choice.rt_packages()].concat()
}

/// `NAME VERSION` of the lines `Inst NAME (VERSION ...)`.
fn simulated(archive: &Archive, packages: &[String]) -> BTreeSet<String> {
    let mut simulate = archive.apt("apt-get");
    simulate.args(["--simulate", "install"]).args(packages);
    let (held, text) = output(&mut simulate).unwrap();
    assert!(held, "{text}");
    let lines = text.lines().filter_map(|line| {
        let mut words = line.strip_prefix("Inst ")?.split(' ');
        let (name, version) = (words.next()?, words.next()?);
        Some(format!("{name} {}", version.trim_start_matches('(')))
    });
    lines.collect()
}

fn both(version: &str) -> BTreeSet<String> {
    ["libdummy", "libdummy:arm64"]
        .map(|name| format!("{name} {version}"))
        .into()
}

fn has_tools() -> bool {
    let found = ["apt-get", "dpkg-deb"].iter().all(|tool| {
        let found = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&found).any(|folder: PathBuf| folder.join(tool).exists())
    });
    if !found {
        eprintln!("SKIP: no apt here");
    }
    found
}

#[test]
fn what_is_in_step_is_taken_from_backports() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("in-step");
    archive.library(1, "2", &ARCHITECTURES);
    let (choice, taken) = archive.settled();
    assert_eq!(taken, both("2"));
    assert_eq!(
        (&*choice.kernel, choice.differences.len()),
        (KERNEL, 1),
        "{choice:?}"
    );
    assert!(choice.lacks.contains_key(&RootPart::OldKernel));
}

#[test]
fn what_is_out_of_step_is_taken_from_stable() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("out-of-step");
    archive.library(1, "3", &["amd64"]);
    archive.library(1, "2", &["arm64"]);
    let (choice, taken) = archive.settled();
    assert_eq!(taken, both("1"));
    let line = "rusty: trixie-backports has 3 for amd64 and 2 for arm64; taken: 1 of trixie";
    assert_eq!(choice.differences[0], line);
    // It is the choice that makes the difference.
    let (archive, _) = archive.choose().unwrap();
    let all = "Package: *\nPin: release n=trixie-backports\nPin-Priority: 600\n";
    archive.prefer(all).unwrap();
    let said = archive.solve(&libraries()).unwrap_err().to_string();
    assert!(said.contains("Breaks: libdummy"), "{said}");
    assert_eq!(said.lines().count(), 1);
}

#[test]
fn an_older_version_that_both_have_comes_before_stable() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("older");
    archive.library(1, "3", &["amd64"]);
    archive.library(1, "2", &ARCHITECTURES);
    let (choice, taken) = archive.settled();
    assert_eq!(taken, both("2"));
    assert!(
        choice.differences[0].ends_with("taken: 2, which both have"),
        "{choice:?}"
    );
}

#[test]
fn what_one_architecture_lacks_is_named() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("missing");
    archive.library(1, "2", &["amd64"]);
    let (choice, taken) = archive.settled();
    assert_eq!(taken, both("1"));
    assert!(
        choice.differences[0].contains("2 for amd64 and none for arm64"),
        "{choice:?}"
    );
    archive
        .dummies
        .retain(|one| (one.0, &*one.1) != (0, "libdummy"));
    let said = archive.choose().unwrap_err().to_string();
    assert!(said.contains("and trixie has no libdummy for a"), "{said}");
    assert_eq!(said.lines().count(), 1);
    // The tests alone go without.
    archive.wanted = WantedPackages {
        by_all: Vec::new(),
        by_tests: libraries(),
    };
    let (_, choice) = archive.choose().unwrap();
    let line = &choice.differences[0];
    assert!(line.contains("and trixie has no libdummy for a"), "{line}");
}

/// Nobody wants the library by its name.
#[test]
fn a_dependency_of_both_that_one_lacks_is_taken_from_stable() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("dependency");
    archive.library(1, "2", &["amd64"]);
    for (name, architecture) in [("tool", "amd64"), ("app", "arm64")] {
        let fields = "Depends: libdummy\n".to_owned();
        let dummy = (0, name.to_owned(), "1", architecture, fields);
        archive.dummies.push(dummy);
    }
    archive.wanted.by_all = ["tool:amd64", "app:arm64"].map(str::to_owned).into();
    let (_, taken) = archive.settled();
    assert!(taken.is_superset(&both("1")), "{taken:?}");
    // What stable has for one architecture alone is taken from backports.
    let of_one = |one: &Dummy| (one.0, &*one.1, one.3) == (0, "libdummy", "arm64");
    archive.dummies.retain(|one| !of_one(one) && one.1 != "app");
    archive.wanted.by_all = vec!["tool:amd64".to_owned()];
    let (_, taken) = archive.settled();
    assert!(taken.contains("libdummy 2"), "{taken:?}");
}

#[test]
fn a_kernel_that_lags_costs_what_needs_it() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("kernel");
    archive.dummies.retain(|one| !one.1.starts_with("linux"));
    let said = archive.choose().unwrap_err().to_string();
    assert!(
        said.contains("has no kernel for arm64 that is whole"),
        "{said}"
    );
    // Newer than anything known, and not yet built for amd64.
    archive.kernel(1, "8.1.2+deb13", "8.1.2-1", &["arm64"]);
    let (choice, _) = archive.settled();
    assert_eq!(choice.kernel, "8.1.2+deb13");
    let why = &choice.lacks[&RootPart::X86Guest];
    assert!(
        why.contains("8.1.2+deb13 for arm64, for amd64 none"),
        "{why}"
    );
    // One that both have, and stable's own.
    archive.kernel(1, KERNEL, "7.3.4-1", &ARCHITECTURES);
    archive.kernel(0, "6.12.9+deb13", "6.12.9-1", &ARCHITECTURES);
    let (choice, _) = archive.settled();
    assert_eq!(choice.kernel, KERNEL);
    assert_eq!(choice.old_kernel.as_deref(), Some("6.12.9+deb13"));
    assert_eq!(choice.lacks.len(), 0);
    assert!(choice.differences[0].contains("7.3.4+deb13 for amd64 and 8.1.2+deb13 for arm64"));
    // One whose modules for amd64 are missing is the guest's alone.
    let gone = |one: &Dummy| one.1.starts_with("linux-modules") || one.1.contains("8.1.2");
    archive.dummies.retain(|one| !gone(one));
    let (choice, _) = archive.settled();
    let lacking: Vec<_> = choice.lacks.keys().collect();
    assert_eq!(lacking, [&RootPart::X86Host]);
}

#[test]
fn what_is_gone_between_list_and_fetch_is_looked_for_anew() {
    if !has_tools() {
        return;
    }
    for moves in [true, false] {
        let mut archive = MadeUp::new(&format!("gone-{moves}"));
        archive.library(1, "2", &ARCHITECTURES);
        let sources = archive.write();
        let wanted = archive.wanted.clone();
        let order = PackageOrder {
            sources: &sources,
            wanted: &wanted,
            installed: &|choice| [libraries(), kernels(choice)].concat(),
        };
        let gone = archive.dir.join("libdummy_2_arm64.deb");
        fs::remove_file(&gone).unwrap();
        let mut tries = 0;
        let dir = archive.dir.join("apt");
        let settled = settle(&dir, &order, |apt, _| {
            tries += 1;
            if tries == 1 && moves {
                archive.dummies.retain(|one| one.2 != "2");
                archive.library(1, "3", &ARCHITECTURES);
                archive.write();
            }
            download(apt, &dir)
        });
        assert_eq!(tries, 2);
        match settled {
            Ok(_) => assert!(moves && dir.join("libdummy_3_arm64.deb").exists()),
            Err(error) => {
                let said = format!("{error:#}");
                assert!(!moves && said.contains("libdummy_2_arm64.deb"), "{said}");
            }
        }
    }
}

fn download(apt: &Archive, to: &Path) -> Result<()> {
    let mut download = apt.apt("apt-get");
    download.arg("download").args(libraries()).current_dir(to);
    let (held, text) = output(&mut download)?;
    let error = text.lines().find(|line| line.starts_with("E: "));
    ensure!(held, anyhow!("{}", error.unwrap_or("no error")));
    Ok(())
}
