// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The crates as a registry would have them. Each has what docs.rs and a reader need: an address, a
//! README with an example that is a test of the crate, and targets for its documentation. Its package
//! has the licences, and the files that its sources and tests are compiled from. Unpacked away from
//! this workspace, the library runs its example on real KVM. Whether the packages compile, the lab
//! tries by `cargo publish --dry-run`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

#[path = "layout/metadata.rs"]
mod metadata;

use metadata::{name, packages};

/// What cargo prints on stdout.
fn cargo(words: &[&str], folder: &Path) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(words).current_dir(folder);
    if words[0].starts_with("-Z") {
        command.env("RUSTC_BOOTSTRAP", "1");
    }
    let output = command.output().expect("cargo");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let errors = text(&output.stderr);
    assert!(output.status.success(), "cargo {words:?}: {errors}");
    text(&output.stdout)
}

/// Where the package of a crate is unpacked, in the folder that it was made in.
fn unpacked(folder: &Path, name: &str) -> PathBuf {
    let name = format!("{name}-{}", env!("CARGO_PKG_VERSION"));
    let archive = folder.join(format!("package/{name}.crate"));
    let mut tar = Command::new("tar");
    let unpacked = tar.arg("-xzf").arg(archive).arg("-C").arg(folder).status();
    assert!(unpacked.expect("tar").success());
    folder.join(name)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Cargo's facts of each crate that is published.
fn published() -> Vec<Value> {
    let all = packages().into_iter();
    // With `publish = false` it is a list without a registry.
    all.filter(|one| one["publish"].is_null()).collect()
}

fn text<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

/// The files below a folder of a package that its sources name to the compiler, and that aren't in it.
fn missing_files(folder: &Path) -> Vec<String> {
    let mut missing = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            missing.extend(missing_files(&path));
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            let named = ["include_str!(\"", "#[path = \""]
                .into_iter()
                .flat_map(|before| text.split(before).skip(1));
            let named = named.filter_map(|rest| rest.split('"').next());
            let absent = named.filter(|name| !folder.join(name).exists());
            missing.extend(absent.map(|name| format!("{}: {name}", path.display())));
        }
    }
    missing
}

#[test]
fn each_published_crate_has_what_docs_and_readers_need() {
    let published = published();
    assert!(published.len() >= 3, "{published:?}");
    let changelog = fs::read_to_string(root().join("CHANGELOG.md")).expect("the changelog");
    for package in &published {
        let name = name(package).expect("a name");
        for key in ["description", "license", "repository", "readme"] {
            assert!(!text(package, key).is_empty(), "{name} has no {key}");
        }
        let promised = changelog.contains(&format!("`{name}`"));
        assert!(promised, "the changelog doesn't state what {name} promises");
        for key in ["keywords", "categories"] {
            let count = package[key].as_array().map_or(0, Vec::len);
            assert!((1..=5).contains(&count), "{name}: {count} {key}");
        }
        let targets = &package["metadata"]["docs"]["rs"]["targets"];
        assert!(targets.is_array(), "{name}: docs.rs has no targets");
        let folder = Path::new(text(package, "manifest_path")).with_file_name("");
        let readme = fs::read_to_string(folder.join(text(package, "readme"))).expect("README");
        assert!(readme.contains("\n```rust\n"), "{name}: no example");
        let library = fs::read_to_string(folder.join("src/lib.rs")).expect("lib.rs");
        let tested = library.contains("#[cfg(doctest)]\n#[doc = include_str!(\"../README.md\")]");
        assert!(tested, "{name}: nothing tests the README's example");
    }
}

#[test]
#[ignore = "compiles the library anew: make test-long"]
fn the_packages_are_whole_and_the_library_runs_its_example() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path().to_str().expect("UTF-8");
    // Of crates that need each other, a cargo before 1.89 needs the feature's name.
    let package = [
        "-Zpackage-workspace",
        "package",
        "--offline",
        "--allow-dirty",
        "--no-verify",
        "--target-dir",
        at,
    ];
    let published = published();
    let names = published.iter().filter_map(name);
    let crates = names.clone().flat_map(|name| ["-p", name]);
    let words: Vec<&str> = package.into_iter().chain(crates).collect();
    cargo(&words, &root());
    let unpacked = |name: &str| unpacked(dir.path(), name);
    // What its makefile needs is there: clang and libbpf, which compile it, are in the lab.
    let mut make = Command::new("make");
    let made = make
        .args(["--dry-run", "-C"])
        .arg(unpacked("vcpufreq-host-bpf").join("bpf"));
    let made = made.output().expect("make");
    assert!(made.status.success(), "{made:?}");
    for package in names.clone().map(unpacked) {
        let licence = package.join("LICENSES/Apache-2.0.txt");
        assert!(licence.exists(), "{}", licence.display());
        let missing = ["src", "tests"].map(|part| missing_files(&package.join(part)));
        assert_eq!(missing.concat(), [""; 0]);
    }
    // The registry may not have them yet.
    let patch = |name| format!("--config=patch.crates-io.{name}.path={:?}", unpacked(name));
    let patches: Vec<String> = names.map(patch).collect();
    let mut test = vec!["test", "--offline", "--features=kvm", "--test=attach"];
    test.extend(patches.iter().map(String::as_str));
    test.extend(["--", "--nocapture"]);
    let printed = cargo(&test, &unpacked("vcpufreq-bridge"));
    print!("{printed}");
    let guest = "test a_guest_of_another_vmm_reads_and_asks_by_each_path ... ok";
    assert!(printed.contains(guest), "{printed}");
}
