// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The crates that a registry gets: `cargo publish --dry-run` of all of them at once. It packages each
//! one, and compiles the package with the registry's crates and the packages before it. Then
//! the crates that a VMM links, perhaps with older dependencies, are compiled with the oldest libc and
//! thiserror that the workspace allows.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cache::{Cache, key, remove_tree};
use crate::child_output::{machine_cargo, output};
use crate::kernel::ModuleSource;
use crate::progress::Step;
use crate::verdict::{TestResult, Verdict};

const NAME: &str = "cargo publish --dry-run";
/// What the packages are made of.
const SOURCE: ModuleSource = ModuleSource {
    name: "published",
    folders: &[
        "Cargo.toml",
        "Cargo.lock",
        "LICENSES",
        "abi",
        "dt",
        "host-bpf",
        "vmm-device",
    ],
};
/// Crates none of whose dependencies needs a newer libc or thiserror: `bridge` has vm-memory, `host`'s
/// feature `undo` has nix.
const OLDEST: [(&str, &str); 3] = [
    ("vcpufreq-device", "vmm-device/device"),
    ("vcpufreq-host", "vmm-device/host"),
    ("vcpufreq-dt", "dt"),
];
/// How cargo begins the cause when no registry answers.
const NO_REGISTRY: &str = "failed to download from";

/// For each run of the tests. It isn't repeated on the same input. Without a registry it is skipped.
pub fn tried(cache: &Cache, repo: &Path) -> Result<TestResult> {
    let (_, version) = output(machine_cargo().arg("--version"))?;
    let mut input = SOURCE.content(repo)?;
    input.push(version.into_bytes());
    let key = key(input.iter().map(Vec::as_slice));
    let mut kept = true;
    let passed = cache.entry("passed-publish-oldest", &key, |to| {
        kept = false;
        // One of its own, so that it compiles nothing of the workspace's anew.
        let target = to.join("target");
        publish(repo, &target)?;
        oldest(repo, &to.join("oldest"), &target)?;
        remove_tree(&target)
    });
    let verdict = match passed {
        Ok(_) if kept => Verdict::Kept,
        Ok(_) => Verdict::Passed,
        Err(error) => failure(&format!("{error:#}")),
    };
    Ok(TestResult {
        name: NAME.to_owned(),
        verdict,
    })
}

/// For a release: a registry has to answer, and an address that is a placeholder is named.
pub fn release(cache: &Cache, repo: &Path) -> Result<Vec<TestResult>> {
    let mut dry_run = tried(cache, repo)?;
    if let Verdict::Skipped(why) = dry_run.verdict {
        dry_run.verdict = Verdict::Failed(why);
    }
    let mut all = vec![dry_run];
    let crates = published(repo)?;
    let is_placeholder = |one: &Value| one["repository"].to_string().contains(".invalid/");
    if crates.iter().any(is_placeholder) {
        let why = "a placeholder: write it into Cargo.toml before cargo publish";
        all.push(TestResult::skipped("the repository's address", why));
    }
    Ok(all)
}

/// What failed, or why nothing could be tried.
fn failure(text: &str) -> Verdict {
    if text.contains(NO_REGISTRY) {
        return Verdict::Skipped("no registry answers: is the network up?".to_owned());
    }
    Verdict::Failed(text.to_owned())
}

/// Cargo's facts of each crate that is published.
fn published(repo: &Path) -> Result<Vec<Value>> {
    let mut metadata = machine_cargo();
    metadata.args(["metadata", "--no-deps", "--offline", "--format-version=1"]);
    let output = metadata.current_dir(repo).output().context("cargo")?;
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    // With `publish = false` it is a list without a registry.
    let published = packages.iter().filter(|one| one["publish"].is_null());
    Ok(published.cloned().collect())
}

fn publish(repo: &Path, target: &Path) -> Result<()> {
    let step = Step::start(format!("{NAME} (about a minute)"));
    let mut command = dry_run();
    for one in published(repo)? {
        command.args(["-p", one["name"].as_str().context("no name")?]);
    }
    command.arg("--target-dir").arg(target).current_dir(repo);
    let (held, text) = output(&mut command)?;
    step.done();
    ensure!(held, "{text}");
    Ok(())
}

/// Compiles [`OLDEST`] as dependencies of a crate in this folder, which wants the oldest versions.
fn oldest(repo: &Path, folder: &Path, target: &Path) -> Result<()> {
    let step = Step::start("the oldest libc and thiserror");
    let workspace = fs::read_to_string(repo.join("Cargo.toml"))?;
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/lib.rs"), "")?;
    fs::write(
        folder.join("Cargo.toml"),
        oldest_manifest(&workspace, repo)?,
    )?;
    let mut command = machine_cargo();
    command.args(["check", "--quiet", "--target-dir"]);
    command.arg(target).current_dir(folder);
    let (held, text) = output(&mut command)?;
    step.done();
    ensure!(held, "with the oldest libc and thiserror: {text}");
    Ok(())
}

/// A crate that takes exactly the versions that this workspace's manifest has as the oldest.
fn oldest_manifest(workspace: &str, repo: &Path) -> Result<String> {
    let workspace = toml::Value::from(workspace.parse::<toml::Table>()?);
    let mut text = "[package]\nname = \"oldest\"\nedition = \"2024\"\n\n[workspace]\n\n\
                    [dependencies]\n"
        .to_owned();
    for name in ["libc", "thiserror"] {
        let version = ["workspace", "dependencies", name]
            .iter()
            .try_fold(&workspace, |at, key| at.get(key));
        let version = version
            .and_then(toml::Value::as_str)
            .with_context(|| format!("Cargo.toml has no version of {name}"))?;
        writeln!(text, "{name} = \"={version}\"")?;
    }
    for (name, folder) in OLDEST {
        let path = toml::Value::from(repo.join(folder).display().to_string());
        writeln!(text, "{name} = {{ path = {path} }}")?;
    }
    Ok(text)
}

/// From cargo 1.89 on this takes crates that need each other. Debian 13's is 1.85, which can do the
/// same as an unstable feature: a newer one ignores its name.
fn dry_run() -> Command {
    let mut command = machine_cargo();
    command.args(["-Zpackage-workspace", "publish", "--dry-run"]);
    // It tries what there is, committed or not.
    command.args(["--locked", "--allow-dirty", "--quiet"]);
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}

#[cfg(test)]
mod tests {
    //! Promises: a registry that doesn't answer is a reason to skip, and nothing else is; the oldest
    //! versions are the manifest's.
    use super::*;

    #[test]
    fn a_package_that_is_refused_is_no_absent_registry() {
        let absent = "error: download of config.json failed\n\nCaused by:\n  \
                      failed to download from `https://registry.example/config.json`\n";
        assert!(matches!(failure(absent), Verdict::Skipped(_)));
        let refused = "error: failed to verify package tarball\n";
        assert!(matches!(failure(refused), Verdict::Failed(_)));
    }

    #[test]
    fn the_oldest_are_what_the_manifest_says() {
        let workspace = "[workspace.dependencies]\nlibc = \"0.2.155\"\nthiserror = \"2.0.0\"\n";
        let manifest = oldest_manifest(workspace, Path::new("/a")).unwrap();
        assert!(
            manifest.contains("libc = \"=0.2.155\"\nthiserror = \"=2.0.0\"\n"),
            "{manifest}"
        );
        assert!(manifest.contains("vcpufreq-dt = { path = \"/a/dt\" }"));
        assert!(oldest_manifest("[workspace.dependencies]\n", Path::new("/a")).is_err());
    }
}
