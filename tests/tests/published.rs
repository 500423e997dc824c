// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The crates as a registry would have them: each has what a registry requires, and the files that its
//! sources and tests are compiled from. Packaged, and unpacked away from this workspace, they compile,
//! and the library's example runs on real KVM.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// All that a registry would have, the program first.
const CRATES: [&str; 7] = [
    "vcpufreq",
    "vcpufreq-bench",
    "vcpufreq-device",
    "vcpufreq-dt",
    "vcpufreq-host-bpf",
    "vcpufreq-load",
    "vcpufreq-rt",
];

/// What cargo prints on stdout and on stderr.
fn cargo(words: &[&str], folder: &Path) -> (String, String) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    let output = command.args(words).current_dir(folder).output();
    let output = output.expect("cargo");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let errors = text(&output.stderr);
    assert!(output.status.success(), "cargo {words:?}: {errors}");
    (text(&output.stdout), errors)
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

/// What cargo warns of is not there, and a registry requires it. An address of the project is optional.
fn lacks(warnings: &str) -> Vec<&str> {
    let lines = warnings.lines();
    let lists = lines.filter_map(|line| line.split_once("manifest has no "));
    let words = lists.flat_map(|(_, list)| list.split([' ', ',']));
    let required = words.filter(|word| ["description", "license"].contains(word));
    required.collect()
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

/// Compiles the unpacked program. No registry has the other crates: they are the unpacked ones too.
fn check(folder: &Path) {
    let target = folder.join("target");
    let target = target.to_str().expect("UTF-8");
    let options = ["--offline", "--no-default-features", "--target-dir", target];
    let [program, others @ ..] = CRATES.map(|name| unpacked(folder, name));
    let patches = CRATES.iter().skip(1).zip(&others);
    let patches: Vec<_> = patches
        .map(|(name, at)| format!("patch.crates-io.{name}.path={at:?}"))
        .collect();
    let patches = patches
        .iter()
        .flat_map(|patch| ["--config", patch.as_str()]);
    let words: Vec<&str> = ["check"]
        .into_iter()
        .chain(options)
        .chain(patches)
        .collect();
    cargo(&words, &program);
    for at in [program].iter().chain(&others) {
        assert!(at.join("LICENSES/Apache-2.0.txt").exists(), "{at:?}");
    }
}

#[test]
#[ignore = "compiles every crate anew: make test-long"]
fn the_packaged_crates_compile_and_the_library_runs_its_example() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path().to_str().expect("UTF-8");
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let package = [
        "package",
        "--offline",
        "--allow-dirty",
        "--no-verify",
        "--target-dir",
        at,
    ];
    let crates = CRATES.iter().flat_map(|name| ["-p", name]);
    let words: Vec<&str> = package.into_iter().chain(crates).collect();
    let (_, warnings) = cargo(&words, &workspace);
    assert_eq!(lacks(&warnings), [""; 0], "{warnings}");
    let unpacked = |name: &str| unpacked(dir.path(), name);
    // What its makefile needs is there: clang and libbpf, which compile it, are in the lab.
    let mut make = Command::new("make");
    let made = make
        .args(["--dry-run", "-C"])
        .arg(unpacked("vcpufreq-host-bpf").join("bpf"));
    let made = made.output().expect("make");
    assert!(made.status.success(), "{made:?}");
    let missing = CRATES.map(|name| {
        let package = unpacked(name);
        ["src", "tests"].map(|part| missing_files(&package.join(part)))
    });
    let missing = missing.into_iter().flatten().flatten();
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
    check(dir.path());
    let test = [
        "test",
        "--offline",
        "--features=kvm-ioctls",
        "--test=attach",
        "--test=abi",
        "--",
        "--nocapture",
    ];
    let (printed, _) = cargo(&test, &unpacked("vcpufreq-device"));
    print!("{printed}");
    assert!(printed.contains("1 passed"), "{printed}");
}
