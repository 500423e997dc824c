// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises, on made-up archives that the real apt reads: what is out of step, missing, gone or newer
//! than anything known, of one architecture or of what is for all, ends with a set that apt's solver takes, or with a line that names it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow, ensure};

use super::{ARCHITECTURES, Archive, Choice, RootPart, WantedPackages, X86_EMULATOR};
use crate::child_output::output;
use crate::made_up::{Dummy, KERNEL, MadeUp, SUITES, has_tools, libraries};
use crate::tree::{PackageOrder, settle};

impl MadeUp {
    fn choose(&self) -> Result<(Archive, Choice)> {
        let sources = self.write();
        let archive = Archive::fetch(&self.dir.join("apt"), &sources)?;
        let choice = Choice::of(&archive, SUITES[0], &self.wanted)?;
        archive.prefer(&choice.preferences)?;
        Ok((archive, choice))
    }

    /// What is left when apt had its word on what the tests need.
    fn choose_for_tests(&self) -> Choice {
        let (archive, mut choice) = self.choose().unwrap();
        let installed = [self.wanted.by_all.clone(), choice.kernel_packages()].concat();
        archive.solve(&installed).unwrap();
        choice.solve_tests(&archive, installed, &self.wanted);
        choice
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

/// It is built by itself, so that it can be older or newer than what depends on it.
#[test]
fn what_is_for_all_is_in_step_too() {
    if !has_tools() {
        return;
    }
    for (of_data, expected) in [("1.9", "1"), ("3", "1"), ("2", "2")] {
        let mut archive = MadeUp::new(&format!("all-{of_data}"));
        archive.library(1, "2", &ARCHITECTURES);
        archive.data(0, "1", "1");
        archive.data(1, "2", of_data);
        let (choice, taken) = archive.settled();
        let data = format!("dummy-data {expected}");
        let all = both(expected).into_iter().chain([data]);
        assert_eq!(taken, all.collect(), "{of_data}");
        let line = format!(
            "rusty: trixie-backports has 2 for amd64 and arm64, and {of_data} of what is for all; \
             taken: 1 of trixie"
        );
        assert_eq!(choice.differences[0] == line, expected == "1", "{choice:?}");
        // An older one that is whole comes before stable.
        archive.library(1, "1.5", &ARCHITECTURES);
        archive.data(1, "1.5", "1.5");
        let expected = if expected == "1" { "1.5" } else { expected };
        let (_, taken) = archive.settled();
        assert!(taken.is_superset(&both(expected)), "{taken:?}");
    }
}

#[test]
fn a_kernel_without_what_is_for_all_is_not_whole() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("kernel-all");
    archive.kernel(1, "8.1.2+deb13", "8.1.2-1", &ARCHITECTURES);
    archive.kernel(0, "6.12.9+deb13", "6.12.9-1", &ARCHITECTURES);
    archive.kernel(0, "6.12.8+deb13", "6.12.8-1", &ARCHITECTURES);
    let gone = [
        "linux-headers-8.1.2+deb13-common",
        "linux-headers-6.12.9+deb13-common",
    ];
    archive.dummies.retain(|one| !gone.contains(&&*one.1));
    let (choice, _) = archive.settled();
    assert_eq!(choice.kernel, KERNEL);
    assert_eq!(choice.old_kernel.as_deref(), Some("6.12.8+deb13"));
    // No other one, and its versions are named.
    archive.dummies.retain(|one| !one.1.contains("7.3"));
    archive
        .dummies
        .retain(|one| one.1 != "linux-headers-8.1.2+deb13-amd64");
    let said = archive.choose().unwrap_err().to_string();
    let versions = "newest for arm64: 8.1.2+deb13, for amd64: none";
    assert!(said.contains(versions), "{said}");
}

#[test]
fn the_kernels_source_is_of_its_version() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("source");
    for one in &mut archive.dummies {
        if one.1 == "linux-source-7.3" {
            one.2 = "7.3.5-1";
        }
    }
    let (choice, _) = archive.settled();
    assert_eq!(choice.kernel, KERNEL);
    let why = &choice.absent["linux-source-7.3:amd64"];
    let versions = "trixie-backports has it in 7.3.5-1 and Linux for arm64 in 7.3.4-1";
    assert!(why.ends_with(versions), "{why}");
    // One that is in step comes before it.
    archive.kernel(1, "7.2.9+deb13", "7.2.9-1", &ARCHITECTURES);
    let (choice, _) = archive.settled();
    assert_eq!(choice.kernel, "7.2.9+deb13");
    assert!(choice.absent.is_empty(), "{choice:?}");
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
        unpacked: Vec::new(),
    };
    let choice = archive.choose_for_tests();
    let line = &choice.differences[0];
    assert!(line.contains("and trixie has no libdummy for a"), "{line}");
    assert_eq!(choice.present(libraries()), [""; 0], "{choice:?}");
}

#[test]
fn what_only_tests_need_and_cannot_be_installed_is_named() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("tests");
    for (name, architecture, depends) in [
        ("good", "amd64", "libdummy"),
        ("broken", "amd64", "nothing"),
        ("app", "arm64", "libdummy"),
        ("broken-app", "arm64", "nothing"),
    ] {
        let fields = format!("Depends: {depends}\n");
        let dummy = (0, name.to_owned(), "1", architecture, fields);
        archive.dummies.push(dummy);
    }
    archive.wanted.by_tests = ["good:amd64", "broken:amd64", "gone:amd64"]
        .map(Into::into)
        .into();
    archive.wanted.unpacked = ["app:arm64", "broken-app:arm64"].map(Into::into).into();
    let choice = archive.choose_for_tests();
    let absent: Vec<&str> = choice.absent.keys().map(String::as_str).collect();
    assert_eq!(absent, ["broken-app:arm64", "broken:amd64", "gone:amd64"]);
    let line = "broken:amd64: apt can't install what was chosen: broken : Depends: nothing but it is \
                not installable; tests that need it are skipped";
    assert!(
        choice.differences.iter().any(|one| one == line),
        "{choice:?}"
    );
    assert!(
        choice
            .differences
            .iter()
            .all(|one| one.lines().count() == 1)
    );
}

/// The emulator of the guest for x86-64 is as good as that guest; a kernel that can't be installed is
/// no kernel.
#[test]
fn what_a_part_of_the_root_is_made_of_costs_that_part() {
    if !has_tools() {
        return;
    }
    let mut archive = MadeUp::new("parts");
    archive.wanted.by_tests = vec![X86_EMULATOR.to_owned()];
    let rt = archive.dummies.iter_mut();
    for one in rt.filter(|one| one.1.starts_with("linux-image") && one.1.ends_with("-rt-arm64")) {
        one.4 += "Depends: nothing\n";
    }
    let choice = archive.choose_for_tests();
    let why = &choice.lacks[&RootPart::X86Guest];
    assert!(
        why.starts_with("qemu-system-x86:amd64: trixie and"),
        "{why}"
    );
    assert_eq!(choice.x86_packages(), [""; 0]);
    let why = &choice.lacks[&RootPart::RtKernel];
    assert!(why.contains("-rt-arm64:arm64 : Depends: nothing"), "{why}");
    assert_eq!(choice.rt_packages(), [""; 0]);
    assert_eq!(choice.kernel, KERNEL);
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
    // One whose modules for amd64 are missing is the guest's alone, which has no PREEMPT_RT.
    let gone = |one: &Dummy| one.1.starts_with("linux-modules") || one.1.contains("8.1.2");
    archive.dummies.retain(|one| !gone(one));
    let (choice, _) = archive.settled();
    let lacking: Vec<_> = choice.lacks.keys().collect();
    assert_eq!(lacking, [&RootPart::X86Host, &RootPart::X86Rt]);
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

/// As when the disk is full: the same again would take minutes.
#[test]
fn what_is_not_gone_is_tried_once() {
    if !has_tools() {
        return;
    }
    let archive = MadeUp::new("fails");
    let sources = archive.write();
    let order = PackageOrder {
        sources: &sources,
        wanted: &archive.wanted,
        installed: &|choice| [libraries(), kernels(choice)].concat(),
    };
    let mut tries = 0;
    let settled = settle(&archive.dir.join("apt"), &order, |_, _| {
        tries += 1;
        Err(anyhow!("the disk is full"))
    });
    let said = format!("{:#}", settled.unwrap_err());
    assert_eq!((tries, &*said), (1, "the disk is full"));
}

fn download(apt: &Archive, to: &Path) -> Result<()> {
    let mut download = apt.apt("apt-get");
    download.arg("download").args(libraries()).current_dir(to);
    let (held, text) = output(&mut download)?;
    let error = text.lines().find(|line| line.starts_with("E: "));
    ensure!(held, anyhow!("{}", error.unwrap_or("no error")));
    Ok(())
}
