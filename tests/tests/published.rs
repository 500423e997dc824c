// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The crates as a registry would have them: packaged, and unpacked away from this workspace, they
//! compile, and the library's example runs on real KVM.

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

fn cargo(words: &[&str], folder: &Path) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    let output = command.args(words).current_dir(folder).output();
    let output = output.expect("cargo");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {words:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
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
    cargo(&words, &workspace);
    let unpacked = |name: &str| unpacked(dir.path(), name);
    // What its makefile needs is there: clang and libbpf, which compile it, are in the lab.
    let mut make = Command::new("make");
    let made = make
        .args(["--dry-run", "-C"])
        .arg(unpacked("vcpufreq-host-bpf").join("bpf"));
    let made = made.output().expect("make");
    assert!(made.status.success(), "{made:?}");
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
    let printed = cargo(&test, &unpacked("vcpufreq-device"));
    print!("{printed}");
    assert!(printed.contains("1 passed"), "{printed}");
}
