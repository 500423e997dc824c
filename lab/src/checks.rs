// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests that need no emulated host: the crates' own, and those of the
//! tools on the sources.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::artifacts::Artifacts;
use crate::child_output::{self, CARGO_BAR, output};
use crate::cross;
use crate::kernel_source;
use crate::progress::{Step, above};
use crate::supply;
use crate::verdict::{Tried, Verdict, tell};

/// All features but those of the BPF loader, which need a compiler and libraries
/// that a plain machine hasn't; it is compiled for the emulated host.
const FEATURES: [&str; 3] = [
    "--no-default-features",
    "--features",
    "vcpufreq-device/kvm-ioctls",
];

/// Formatting, lints, dependencies.
pub fn sources(artifacts: &Artifacts, repo: &Path) -> Result<Vec<Tried>> {
    let mut format = cargo();
    format.args(["fmt", "--all", "--check"]).current_dir(repo);
    let (held, text) = output(&mut format)?;
    let mut tried = vec![Tried::new("rustfmt", held, || text)];
    tried.extend(lints(repo)?);
    let for_arm = cross::lints(&artifacts.cache, &artifacts.root, repo)?;
    for (check, name) in for_arm.into_iter().zip(["clippy", "rustdoc"]) {
        let name = format!("{name} for arm64, with BPF");
        tried.push(check.tried(name, artifacts.tools(), repo));
    }
    tried.extend(supply::dependencies(&artifacts.cache, repo)?);
    tried.iter().for_each(tell);
    Ok(tried)
}

/// The device as a VMM may link it. Within the workspace other crates switch on its features.
const DEVICE: [&str; 3] = ["-p", "vcpufreq-device", "--no-default-features"];

/// clippy and rustdoc on what is compiled for this machine; a warning is an error.
fn lints(repo: &Path) -> Result<Vec<Tried>> {
    let all = [&["--workspace"], &FEATURES[..]].concat();
    let host = [&DEVICE[..], &["--features", "host"]].concat();
    let runs: [(&str, &str, &[&str], &[&str]); 4] = [
        ("clippy", "cargo clippy", &all, &["--all-targets"]),
        ("clippy", "the device without features", &DEVICE, &[]),
        ("clippy", "the device with feature host", &host, &[]),
        ("doc", "cargo doc", &all, &["--no-deps"]),
    ];
    let tried = runs.into_iter().map(|(command, name, packages, words)| {
        let step = Step::start(name);
        let mut lint = cargo();
        lint.args([command, "--locked"])
            .args(packages)
            .args(words)
            .env("RUSTDOCFLAGS", "-D warnings")
            .envs(CARGO_BAR)
            .current_dir(repo);
        if command == "clippy" {
            lint.args(["--", "-D", "warnings"]);
        }
        let (held, text) = child_output::cargo(&mut lint, &step)?;
        step.done();
        Ok(Tried::new(name, held, || text))
    });
    tried.collect()
}

fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The crates' own tests. A test that prints `SKIP: reason` is a skipped one.
pub fn crates(artifacts: &Artifacts, repo: &Path) -> Result<Vec<Tried>> {
    let step = Step::start("tests of the crates");
    let mut test = cargo();
    test.args(["test", "--workspace", "--locked", "--no-fail-fast"])
        .args(FEATURES)
        .args(["--", "--show-output"])
        .current_dir(repo)
        // The device tree's tests compile and check it with these.
        .env("VCPUFREQ_LAB_ROOT", artifacts.root.dir())
        .env(
            "VCPUFREQ_BINDINGS",
            kernel_source::bindings(&artifacts.cache, &artifacts.root)?,
        )
        .envs(CARGO_BAR);
    let (held, text) = child_output::cargo(&mut test, &step)?;
    step.done();
    let mut tried = parse(&text);
    let failed = tried
        .iter()
        .any(|one| matches!(one.verdict, Verdict::Failed(_)));
    if !held && !failed {
        tried.push(Tried::new("cargo test", false, || text.clone()));
    } else if failed {
        above(|| println!("{text}"));
    }
    println!("         {} tests of the crates", tried.len());
    Ok(tried)
}

/// Reads what the test harness printed: `test NAME ... ok`, and the output
/// of each test under `---- NAME stdout ----`.
fn parse(text: &str) -> Vec<Tried> {
    let mut tried: Vec<Tried> = Vec::new();
    let mut shown = String::new();
    for line in text.lines() {
        if let Some((name, result)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        {
            let verdict = match result {
                "ok" => Verdict::Passed,
                "ignored" => Verdict::Skipped("ignored".to_owned()),
                other => Verdict::Failed(other.to_owned()),
            };
            tried.push(Tried {
                name: name.to_owned(),
                verdict,
            });
        } else if let Some(name) = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            name.clone_into(&mut shown);
        } else if let Some(why) = line.strip_prefix("SKIP: ") {
            // Names can be the same in two crates: the last one is meant.
            let named = tried.iter_mut().rev().find(|one| one.name == shown);
            if let Some(one) = named.filter(|one| one.verdict == Verdict::Passed) {
                one.verdict = Verdict::Skipped(why.to_owned());
            }
        }
    }
    tried
}

#[cfg(test)]
mod tests {
    //! Promise: what a test run printed is counted as what it was.
    use super::*;

    #[test]
    fn outcomes_are_told_apart() {
        let text = "test a::one ... ok\ntest a::two ... FAILED\ntest three ... ok\n\
                    successes:\n---- three stdout ----\nSKIP: no KVM\n";
        let verdicts: Vec<Verdict> = parse(text).into_iter().map(|one| one.verdict).collect();
        let expected = [
            Verdict::Passed,
            Verdict::Failed("FAILED".into()),
            Verdict::Skipped("no KVM".into()),
        ];
        assert_eq!(verdicts, expected);
    }
}
