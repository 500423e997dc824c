// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs for arm64, and those of packages: by the cargo that runs this and the toolchain
//! root's compilers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::cache::{Cache, key};
use crate::check_cache::{Check, CheckPlace};
use crate::child_output::{self, CARGO_BAR};
use crate::kernel::ModuleSource;
use crate::progress::{Step, above};
use crate::root::Root;

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// What is built, with its features.
const PROGRAMS: &[&str] = &[
    "-p",
    "vcpufreq",
    "-p",
    "vcpufreq-tests",
    "-p",
    "vcpufreq-load",
    "--features",
    "vcpufreq-tests/bpf",
];

/// What clippy looks at: all that is compiled for arm64, and its tests.
const LINTED: &[&str] = &[
    "--workspace",
    "--exclude",
    "vcpufreq-lab",
    "--all-targets",
    "--features",
    "vcpufreq-tests/bpf,vcpufreq-device/kvm-ioctls",
];
const SOURCE: ModuleSource = ModuleSource {
    name: "clippy-arm64",
    folders: &[
        "Cargo.toml",
        "Cargo.lock",
        "clippy.toml",
        "abi",
        "benches",
        "dt",
        "fuzz",
        "host-bpf",
        "rt",
        "tests",
        "vmm",
        "vmm-device",
    ],
};

/// Builds the programs, statically; gives the folder that they are in.
pub fn build(cache: &Cache, root: &Root, repo: &Path) -> Result<PathBuf> {
    let step = Step::start("programs for arm64");
    fetch_crates(repo)?;
    let target = target(cache, root, repo)?;
    let mut command = root.command("env");
    command
        .args(["-C", "/src"])
        .args(settings(&root.inside(&target)?))
        .args([CARGO, "build", "--release", "--locked", "--offline"])
        .args(["--target", TARGET])
        .args(PROGRAMS);
    let (built, text) = child_output::cargo(&mut command, &step)?;
    if !built {
        above(|| eprint!("{text}"));
        bail!("building the programs for arm64 failed; its output is above");
    }
    step.done();
    Ok(target.join(TARGET).join("release"))
}

/// clippy on all that is compiled for arm64, and rustdoc on what this machine can't compile, with the
/// features that the programs are built with. They are the root's own, of the version of its
/// compiler. Release, as the programs are: so libbpf isn't compiled once more.
pub fn lints(cache: &Cache, root: &Root, repo: &Path) -> Result<[Check; 2]> {
    let target = root.inside(&target(cache, root, repo)?)?;
    let common = ["--release", "--locked", "--offline", "--target", TARGET];
    let check = |name: &str, words: &[&str], warnings: &[&str]| Check {
        name: name.to_owned(),
        source: SOURCE,
        command: [words, &common, warnings]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect(),
        place: CheckPlace::Checkout(
            [
                settings(&target),
                vec![
                    "RUSTDOC=/usr/bin/rustdoc".to_owned(),
                    "RUSTDOCFLAGS=-D warnings".to_owned(),
                ],
            ]
            .concat(),
        ),
    };
    let clippy = [&["/usr/bin/cargo-clippy", "clippy"], LINTED].concat();
    let doc = [CARGO, "doc", "--no-deps", "-p", "vcpufreq-host-bpf"];
    let doc = [&doc[..], &["--features", "load"]].concat();
    Ok([
        check(SOURCE.name, &clippy, &["--", "-D", "warnings"]),
        check("doc-arm64", &doc, &[]),
    ])
}

/// This machine's cargo, as it is seen in the root.
const CARGO: &str = "/opt/cargo/bin/cargo";

/// Cargo tells what is fresh by time stamps, so each checkout has a target
/// folder of its own.
fn target(cache: &Cache, root: &Root, repo: &Path) -> Result<PathBuf> {
    let name = key([repo.as_os_str().as_encoded_bytes(), root.id().as_bytes()]);
    cache.folder("target", &name)
}

/// Environment of cargo in the root, for static programs in this target folder.
pub fn settings(target: &str) -> Vec<String> {
    let mut settings = vec![
        format!("CARGO={CARGO}"),
        "CARGO_HOME=/opt/cargo-home".to_owned(),
        "RUSTC=/usr/bin/rustc".to_owned(),
        format!("CARGO_TARGET_DIR={target}"),
        // libbpf brings a <linux/types.h> of its own, older than the <asm/ptrace.h> here.
        "LIBBPF_SYS_EXTRA_CFLAGS=-D__u128=__uint128_t".to_owned(),
    ];
    for machine in ["aarch64", "x86_64"] {
        let target = format!("{machine}_unknown_linux_gnu");
        let cargo = format!("CARGO_TARGET_{}", target.to_ascii_uppercase());
        settings.extend([
            format!("{cargo}_LINKER={machine}-linux-gnu-gcc"),
            // The C libraries that libbpf is linked with; Debian's libelf uses zstd.
            format!("LIBBPF_SYS_LIBRARY_PATH_{target}=/usr/lib/{machine}-linux-gnu"),
            format!("{cargo}_RUSTFLAGS=-C target-feature=+crt-static -C link-arg=-l:libzstd.a"),
        ]);
    }
    settings.extend(CARGO_BAR.map(|(name, value)| format!("{name}={value}")));
    settings
}

/// Crates come through this machine's cargo: the root has no network.
pub fn fetch_crates(repo: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let fetch = |network: &[&str]| {
        Command::new(&cargo)
            .args(["fetch", "--locked", "--quiet"])
            .args(network)
            .current_dir(repo)
            .output()
            .context("cannot run cargo")
    };
    if fetch(&["--offline"])?.status.success() {
        return Ok(());
    }
    let output = fetch(&[])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "cannot fetch the crates: the first run needs the network, later ones don't ({})",
        said.lines().next().unwrap_or_default()
    );
    Ok(())
}
