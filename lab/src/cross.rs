// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs for the emulated hosts, and those of packages: by the toolchain root's cargo and compilers, which
//! are Debian stable's, and of one version for all architectures.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::check_cache::{Check, CheckPlace};
use crate::child_output::{self, CARGO_BAR};
use crate::kernel::ModuleSource;
use crate::progress::{Step, above};
use crate::root::Root;
use crate::set::Set;
use crate::tree::RootUse;

/// That of the short set's lints.
const LINTED_TARGET: &str = "aarch64-unknown-linux-gnu";

/// What is built.
const PROGRAMS: [&str; 6] = [
    "-p",
    "vcpufreq",
    "-p",
    "vcpufreq-tests",
    "-p",
    "vcpufreq-load",
];
/// For the demo: an agent that has no other scenario.
const DEMO: &[&str] = &[
    "--profile",
    "demo",
    "--no-default-features",
    "--features",
    "vcpufreq/bpf,vcpufreq-tests/agent",
];
const TESTS: &[&str] = &["--release", "--features", "vcpufreq-tests/bpf"];

/// What clippy and rustdoc look at: all that is compiled for arm64.
const LINTED: &[&str] = &[
    "--workspace",
    "--exclude",
    "vcpufreq-lab",
    "--features",
    "vcpufreq-tests/bpf,vcpufreq-bridge/kvm",
];
const SOURCE: ModuleSource = ModuleSource {
    name: "sources",
    folders: &[
        "Cargo.toml",
        "Cargo.lock",
        "clippy.toml",
        "rustfmt.toml",
        "abi",
        "benches",
        "dt",
        "fuzz",
        "host-bpf",
        "lab",
        "rt",
        "tests",
        "vmm",
        "vmm-device",
    ],
};

/// Builds the programs for this use, statically.
pub fn build(
    (cache, root): (&Cache, &Root),
    repo: &Path,
    arch: Arch,
    for_use: RootUse,
) -> Result<()> {
    let name = arch.debian();
    let step = Step::start(format!("programs for {name}"));
    let crates = crates(cache, root, repo)?;
    let target = target(cache, root, repo)?;
    let mut command = root.command("env");
    command
        .args(["-C", "/src"])
        .args(settings(&crates, &root.inside(&target)?))
        .args([CARGO, "build", "--locked", "--offline"])
        .args(["--target", &arch.target()])
        .args(PROGRAMS)
        .args(match for_use {
            RootUse::Demo => DEMO,
            RootUse::Tests => TESTS,
        });
    let (built, text) = child_output::cargo(&mut command, &step)?;
    if !built {
        above(|| eprint!("{text}"));
        bail!("building the programs for {name} failed; its output is above");
    }
    step.done();
    Ok(())
}

/// The folder that the programs for this use are built into.
pub fn programs(
    (cache, root): (&Cache, &Root),
    repo: &Path,
    arch: Arch,
    for_use: RootUse,
) -> Result<PathBuf> {
    let profile = match for_use {
        RootUse::Demo => "demo",
        RootUse::Tests => "release",
    };
    let target = target(cache, root, repo)?;
    Ok(target.join(arch.target()).join(profile))
}

/// clippy, rustdoc and rustfmt on all sources, with the features that the programs are built with: by
/// the root's tools, which are of its compiler's version. The short set's are for arm64, and in
/// release, as the programs are: so libbpf isn't compiled once more. The long set's are for this
/// machine, and of the lab too. With `strict` a warning is an error.
pub fn lints(
    (cache, root): (&Cache, &Root),
    repo: &Path,
    strict: bool,
    set: Set,
) -> Result<Vec<(String, Check)>> {
    let crates = crates(cache, root, repo)?;
    let target = root.inside(&target(cache, root, repo)?)?;
    let mut place = settings(&crates, &target);
    if strict {
        place.push("RUSTDOCFLAGS=-D warnings".to_owned());
    }
    let check = |name: &str, words: &[&str]| {
        let denied: &[&str] = match words[1] {
            "clippy" if strict => &["--", "-D", "warnings"],
            _ => &[],
        };
        Check {
            name: name.replace(' ', "-"),
            source: SOURCE,
            needs: match words[1] {
                "clippy" => vec!["rust-clippy:amd64".to_owned()],
                "fmt" => vec!["rustfmt:amd64".to_owned()],
                _ => Vec::new(),
            },
            command: [words, denied]
                .concat()
                .into_iter()
                .map(str::to_owned)
                .collect(),
            place: CheckPlace::Checkout(place.clone()),
        }
    };
    let locked = ["--locked", "--offline"];
    let arm = ["--release", "--target", LINTED_TARGET];
    // Named, so that the flags for static programs are not those of macros, which cargo loads.
    let here = ["--target", "x86_64-unknown-linux-gnu"];
    let clippy = ["/usr/bin/cargo-clippy", "clippy", locked[0], locked[1]];
    let doc = [CARGO, "doc", locked[0], locked[1], "--no-deps"];
    let all = [&["--workspace"][..], &here, &HOST_FEATURES].concat();
    let library = [
        "-p",
        "vcpufreq-device",
        "-p",
        "vcpufreq-host",
        "-p",
        "vcpufreq-bridge",
    ];
    let library = [&arm[..], &library].concat();
    // What a demo alone builds: an item that only other scenarios have is missing there.
    let demo = [
        "-p",
        "vcpufreq-tests",
        "--no-default-features",
        "--features",
        "vcpufreq-tests/agent",
    ];
    let demo = [&arm[..], &demo].concat();
    let with = |command: &[&'static str], words: &[&'static str]| [command, words].concat();
    let runs = match set {
        Set::Long => vec![
            (
                "clippy for x86-64",
                with(&clippy, &with(&all, &["--all-targets"])),
            ),
            ("rustdoc for x86-64", with(&doc, &all)),
        ],
        _ => vec![
            (
                "clippy",
                with(&clippy, &[&arm[..], LINTED, &["--all-targets"]].concat()),
            ),
            (
                "clippy of the library without features",
                with(&clippy, &library),
            ),
            ("clippy of the demo alone", with(&clippy, &demo)),
            ("rustdoc", with(&doc, &with(&arm, LINTED))),
            (
                "rustfmt",
                vec!["/usr/bin/cargo-fmt", "fmt", "--all", "--check"],
            ),
        ],
    };
    Ok(runs
        .into_iter()
        .map(|(name, words)| (name.to_owned(), check(name, &words)))
        .collect())
}

/// All features but those of the BPF loader, which need a compiler and libraries that a plain machine
/// hasn't; it is compiled for the emulated host.
pub const HOST_FEATURES: [&str; 3] = [
    "--no-default-features",
    "--features",
    "vcpufreq-bridge/kvm,vcpufreq-tests/scenarios",
];

/// The root's cargo.
pub const CARGO: &str = "/usr/bin/cargo";

/// Cargo tells what is fresh by time stamps, so each checkout has a target
/// folder of its own.
fn target(cache: &Cache, root: &Root, repo: &Path) -> Result<PathBuf> {
    let name = key([repo.as_os_str().as_encoded_bytes(), root.id().as_bytes()]);
    cache.folder("target", &name)
}

/// Environment of cargo in the root, for static programs in this target folder, of these crates.
pub fn settings(crates: &str, target: &str) -> Vec<String> {
    let mut settings = vec![
        format!("CARGO={CARGO}"),
        format!("CARGO_HOME={crates}"),
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

/// The sources of all crates, as the root sees them: a folder that is a home of cargo's. They come
/// through this machine's cargo, because the root has no network. `cargo vendor` makes files that
/// each version of cargo reads, which it does not promise of its own home.
pub fn crates(cache: &Cache, root: &Root, repo: &Path) -> Result<String> {
    let lock = fs::read(repo.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let dir = cache.entry("crates", &key([&lock[..]]), |to| {
        let step = Step::start("crates");
        let mut vendor = child_output::machine_cargo();
        vendor
            .args(["vendor", "--locked", "--quiet", "--versioned-dirs"])
            .arg(to.join("vendor"))
            .current_dir(repo);
        let (held, text) = child_output::output(&mut vendor)?;
        ensure!(
            held,
            "cannot fetch the crates: the first run needs the network, later ones don't ({})",
            text.lines().next().unwrap_or_default()
        );
        let name = to.file_name().and_then(|name| name.to_str());
        let name = name.and_then(|name| name.strip_suffix(".partial"));
        let name = name.context("a name in the cache")?;
        let config = format!(
            "[source.crates-io]\nreplace-with = \"vendored\"\n\
             [source.vendored]\ndirectory = \"/cache/{name}/vendor\"\n"
        );
        step.done();
        Ok(fs::write(to.join("config.toml"), config)?)
    })?;
    root.inside(&dir)
}
