// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises, on a made-up archive that the real apt reads, with a stand-in for mmdebstrap: a tree for
//! the demo is completed for the tests once, and what was there before is told. One that can't be
//! completed is made anew, with a line that says why; if that fails, the demo's stays. What only tests
//! need and the archive lacks is left out, and named.

use std::cell::RefCell;
use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::arch::Arch;
use crate::boot::HostPart;
use crate::made_up::{MadeUp, has_tools};
use crate::tools::RT_APP;

/// Newer than all that have a kernel for x86-64: then none is unpacked.
const KERNEL: &str = "8.1.2+deb13";
/// Makes a tree with what apt calls in it, where dpkg does nothing.
const MMDEBSTRAP: &str = r#"#!/bin/sh
set -e
for word; do
    [ "$before" != trixie ] || tree=$word
    before=$word
done
mkdir -p "$tree/var/lib/dpkg" "$tree/var/lib/apt" "$tree/boot" "$tree/proc" "$tree/dev" "$tree/tmp"
touch "$tree/var/lib/dpkg/status" "$tree/boot/vmlinuz-8.1.2+deb13-arm64"
cp -L --parents /usr/bin/env $(ldd /usr/bin/env | grep -o '/[^ ]*') "$tree"
cp -L /usr/bin/true "$tree/usr/bin/dpkg"
"#;

/// A cache, an archive with all that a tree is made of, and what was said.
struct TreeScene {
    archive: MadeUp,
    cache: Cache,
    said: RefCell<Vec<String>>,
}

impl TreeScene {
    /// None where the tools for it aren't.
    fn new(name: &str) -> Option<Self> {
        if !has_tools() {
            return None;
        }
        if let Err(why) = namespace::require(Users::All) {
            eprintln!("SKIP: {why}");
            return None;
        }
        let mut archive = MadeUp::new(&format!("tree-{name}"));
        archive.dummies.clear();
        archive.kernel(1, KERNEL, "8.1.2-1", &["arm64"]);
        for package in [PACKAGES, TESTS, PROGRAMS].concat() {
            let (name, architecture) = package.split_once(':').unwrap();
            // Some are for both.
            let fields = "Multi-Arch: same\n".to_owned();
            let dummy = (0, name.to_owned(), "1", architecture, fields);
            archive.dummies.push(dummy);
        }
        let dir = archive.dir.join("cache");
        fs::create_dir_all(&dir).unwrap();
        let mmdebstrap = archive.dir.join("mmdebstrap");
        fs::write(&mmdebstrap, MMDEBSTRAP).unwrap();
        fs::set_permissions(&mmdebstrap, fs::Permissions::from_mode(0o755)).unwrap();
        // Each program brings documentation, which goes.
        fs::create_dir_all(archive.dir.join("tree/usr/share/doc")).unwrap();
        archive.write();
        Some(Self {
            archive,
            cache: Cache::at(&dir),
            said: RefCell::default(),
        })
    }

    fn prepare(&self, for_use: RootUse) -> Result<(PathBuf, CacheState)> {
        let sources = self.archive.sources();
        let mmdebstrap = self.archive.dir.join("mmdebstrap");
        let maker = TreeMaker {
            make: &|to| make_of(&sources, &mmdebstrap, to),
            say: &|line| self.said.borrow_mut().push(line.to_owned()),
        };
        prepare_by(&maker, &self.cache, for_use)
    }

    /// What is told of these, one after the other.
    fn found(&self, uses: &[RootUse]) -> Vec<CacheState> {
        let uses = uses.iter();
        uses.map(|&for_use| self.prepare(for_use).unwrap().1)
            .collect()
    }

    /// The archive has this package in a newer version only.
    fn moves(&mut self, name: &str) {
        let file = self.archive.dir.join(format!("{name}_1_amd64.deb"));
        fs::remove_file(file).unwrap();
        self.archive.dummies.retain(|one| one.1 != name);
        self.archive.add(1, name, "2", "amd64");
        self.archive.write();
    }

    /// What was said since the last time.
    fn said(&self) -> Vec<String> {
        self.said.take()
    }
}

#[test]
fn what_was_there_before_is_told() {
    use CacheState::{Empty, Filled, Partly};
    use RootUse::{Demo, Tests};
    for (name, uses, found) in [
        (
            "demo",
            &[Demo, Demo, Tests, Tests, Demo][..],
            &[Empty, Filled, Partly, Filled, Filled][..],
        ),
        ("tests", &[Tests, Tests], &[Empty, Filled]),
    ] {
        let Some(scene) = TreeScene::new(name) else {
            return;
        };
        assert_eq!(scene.found(uses), found, "{name}");
        assert_eq!(scene.said(), [""; 0]);
        let (dir, _) = scene.prepare(Tests).unwrap();
        assert!(dir.join("complete").exists() && !dir.join("begun").exists());
        assert!(dir.join("tree/opt/arm64/usr/share").exists());
    }
}

#[test]
fn a_tree_that_has_lost_a_package_is_made_anew() {
    let Some(mut scene) = TreeScene::new("lost") else {
        return;
    };
    let (dir, _) = scene.prepare(RootUse::Demo).unwrap();
    let before = lists_key(&dir);
    scene.moves("sparse");
    let (dir, found) = scene.prepare(RootUse::Tests).unwrap();
    assert_ne!(
        lists_key(&dir),
        before,
        "what was built with the first is taken"
    );
    assert_eq!(found, CacheState::Partly);
    let said = scene.said();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].starts_with("the toolchain root is made anew ("));
    assert!(said[0].contains("sparse_1_amd64.deb"), "{said:?}");
    assert_eq!(said[0].lines().count(), 1, "{said:?}");
    let archive = Archive::kept(&dir.join("apt")).unwrap();
    let taken = archive.candidates(&["sparse:amd64".to_owned()]).unwrap();
    assert_eq!(taken[0].1, "2");
    assert!(dir.join("complete").exists() && !dir.with_extension("before").exists());
}

#[test]
fn a_package_that_only_tests_need_may_be_gone() {
    let Some(mut scene) = TreeScene::new("gone") else {
        return;
    };
    let gone = ["sparse", "rt-app", "linux-source-8.1"];
    let is_gone = |one: &str| gone.contains(&one);
    scene.archive.dummies.retain(|one| !is_gone(&one.1));
    scene.archive.write();
    let (dir, _) = scene.prepare(RootUse::Tests).unwrap();
    assert!(dir.join("complete").exists());
    let choice = choice(&dir).unwrap();
    let absent: Vec<&str> = choice.absent.keys().map(String::as_str).collect();
    assert_eq!(
        absent,
        ["linux-source-8.1:amd64", "rt-app:arm64", "sparse:amd64"]
    );
    let why = "sparse:amd64: trixie and trixie-backports lack it";
    assert_eq!(choice.absent["sparse:amd64"], why);
    let line = format!("{why}; tests that need it are skipped");
    assert!(choice.differences.contains(&line), "{choice:?}");
    for package in [wanted(&choice), unpacked(&choice)].concat() {
        assert!(!choice.absent.contains_key(&package), "{package}");
    }
    // It was there for the demo, and is gone before the tests first run.
    let Some(mut scene) = TreeScene::new("gone-later") else {
        return;
    };
    scene.prepare(RootUse::Demo).unwrap();
    let file = scene.archive.dir.join("sparse_1_amd64.deb");
    fs::remove_file(file).unwrap();
    scene.archive.dummies.retain(|one| one.1 != "sparse");
    scene.archive.write();
    let (dir, found) = scene.prepare(RootUse::Tests).unwrap();
    assert_eq!(found, CacheState::Partly);
    assert!(dir.join("complete").exists());
}

#[test]
fn a_tree_that_was_left_half_is_made_anew() {
    let Some(scene) = TreeScene::new("half") else {
        return;
    };
    let (dir, _) = scene.prepare(RootUse::Demo).unwrap();
    fs::write(dir.join("begun"), "").unwrap();
    assert_eq!(scene.found(&[RootUse::Tests]), [CacheState::Partly]);
    let line = "the toolchain root is made anew (an earlier run was interrupted)";
    assert_eq!(scene.said(), [line]);
    assert!(dir.join("complete").exists());
}

#[test]
fn the_demos_tree_stays_if_none_can_be_made() {
    let Some(scene) = TreeScene::new("stays") else {
        return;
    };
    let (dir, _) = scene.prepare(RootUse::Demo).unwrap();
    // A file that neither of them has.
    fs::write(dir.join("mine"), "").unwrap();
    fs::rename(
        scene.archive.dir.join("dists"),
        scene.archive.dir.join("gone"),
    )
    .unwrap();
    let file = scene.archive.dir.join("sparse_1_amd64.deb");
    fs::remove_file(file).unwrap();
    let error = scene.prepare(RootUse::Tests).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("cannot fetch the package lists"), "{error}");
    assert_eq!(scene.found(&[RootUse::Demo]), [CacheState::Filled]);
    assert!(dir.join("mine").exists());
}

/// A name that no list has would never be missing.
#[test]
fn what_hosts_need_is_in_the_lists() {
    let parts = [HostPart::Qemu, HostPart::Systemd, HostPart::Tools];
    let needs = parts.iter().flat_map(|part| part.needs(Arch::Arm64));
    for package in needs.chain([&RT_APP]) {
        assert!(PROGRAMS.contains(package), "{package}");
    }
}

#[test]
fn what_is_gone_is_told_from_other_failures() {
    let fetch = "E: Failed to fetch http://a.example/b.deb";
    for (end, wanted) in [
        ("404  Not Found [IP: 192.0.2.1 80]", true),
        ("Hash Sum mismatch", true),
        (
            "File has unexpected size (2 != 1). Mirror sync in progress?",
            true,
        ),
        ("Could not connect to a.example", false),
    ] {
        let error = anyhow!("{fetch}  {end}").context("cannot make the toolchain root");
        assert_eq!(is_gone(&error), wanted, "{end}");
    }
}
