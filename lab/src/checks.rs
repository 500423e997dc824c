// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests that need no emulated host: the crates' own, and those of the
//! tools on the sources.

use std::path::Path;

use anyhow::Result;

use crate::artifacts::Artifacts;
use crate::browser;
use crate::check_cache::{PassedCheck, not_held};
use crate::child_output::{self, CARGO_BAR, machine_cargo, output};
use crate::cross::{self, HOST_FEATURES};
use crate::kernel_source;
use crate::known::KnownVersions;
use crate::monitoring;
use crate::progress::{Step, above};
use crate::publish;
use crate::set::Set;
use crate::supply;
use crate::unfetched::Unfetched;
use crate::verdict::{TestResult, Verdict, tell};

/// A set's checks of formatting, lints and dependencies, which seldom change. The long set has the lints
/// for x86-64 and those of the machine's own compiler, which look at the same sources as the short set's,
/// and what is for Prometheus and Grafana.
pub fn sources(artifacts: &Artifacts, repo: &Path, set: Set) -> Result<Vec<TestResult>> {
    let (cache, root) = artifacts.tools();
    let known = KnownVersions::read(repo)?;
    let compiler = root.version("rustc")?;
    let strict = known.rustc.contains(&compiler);
    let mut tried = Vec::new();
    for (name, check) in cross::lints((cache, root), repo, strict, set)? {
        let name = format!("{name}, {compiler}");
        let one = check.carry_out((cache, root), repo);
        tried.extend(judged(&name, strict, one));
    }
    if set == Set::Short {
        tried.push(publish::tried(cache, repo)?);
    }
    if set == Set::Long {
        tried.extend(machine_lints(&known, repo)?);
        tried.extend(supply::dependencies(cache, repo)?);
        tried.extend(monitoring::checks(cache, root, repo)?);
    }
    tried.iter().for_each(tell);
    Ok(tried)
}

/// What a lint found. That of a compiler that isn't known decides nothing, but what can't be tried is
/// told all the same.
fn judged(name: &str, strict: bool, found: Result<PassedCheck>) -> Option<TestResult> {
    let verdict = match &found {
        Ok(held) => held.verdict(),
        Err(error) => not_held(error),
    };
    if strict || matches!(verdict, Verdict::Skipped(_)) {
        let name = name.to_owned();
        return Some(TestResult { name, verdict });
    }
    note(
        name,
        &found.map_or_else(|error| format!("{error:#}"), |held| held.text),
    );
    None
}

/// clippy of this machine, where it has one. That of another version than those which the project is
/// kept clean with has other lints: it is heard, and decides nothing.
fn machine_lints(known: &KnownVersions, repo: &Path) -> Result<Option<TestResult>> {
    let mut version = machine_cargo();
    let (there, text) = output(version.args(["clippy", "--version"]).current_dir(repo))?;
    if !there {
        return Ok(None);
    }
    // `clippy 0.1.95 (59807616e1 2026-04-14)` is that of Rust 1.95.
    let version = text.split_whitespace().nth(1).unwrap_or_default();
    let version = version.strip_prefix("0.").unwrap_or(version).to_owned();
    let strict = known
        .rustc
        .iter()
        .any(|one| version.starts_with(one) || one.starts_with(&version));
    let name = format!("clippy of this machine, {version}");
    let step = Step::start(&*name);
    let mut lint = machine_cargo();
    lint.args(["clippy", "--workspace", "--all-targets", "--locked"])
        .args(HOST_FEATURES)
        .envs(CARGO_BAR)
        .current_dir(repo);
    if strict {
        lint.args(["--", "-D", "warnings"]);
    }
    let (held, text) = child_output::cargo(&mut lint, &step)?;
    step.done();
    if strict {
        return Ok(Some(TestResult::new(name, held, || text)));
    }
    note(&name, &text);
    Ok(None)
}

/// Shows the warnings of a compiler that isn't among those of `lab/known.toml`, and their number.
fn note(name: &str, text: &str) {
    let count = findings(text);
    above(|| {
        if count > 0 {
            println!("{}", text.trim_end());
        }
        println!("note     {name}: {count} warnings, which decide nothing (lab/known.toml)");
    });
}

/// Warnings, and lints that the workspace denies. Cargo ends each crate's with a line that counts them.
fn findings(text: &str) -> usize {
    let begins = ["warning: ", "error: ", "error["];
    let counts = [" generated ", "could not compile", "build failed"];
    let lines = text.lines();
    let lines = lines.filter(|line| begins.iter().any(|one| line.starts_with(one)));
    let own = lines.filter(|line| !counts.iter().any(|one| line.contains(one)));
    own.count()
}

/// The crates' own tests: the long set's are those marked `#[ignore]`, which take long. A test that
/// prints `SKIP: reason` is a skipped one.
pub fn crates(artifacts: &Artifacts, repo: &Path, set: Set) -> Result<Vec<TestResult>> {
    let step = Step::start("tests of the crates");
    let mut test = machine_cargo();
    if set == Set::Long {
        let (variable, value) = match browser::program(&artifacts.cache, &artifacts.root) {
            Ok(program) => ("VCPUFREQ_CHROMIUM", program.display().to_string()),
            Err(error) if error.is::<Unfetched>() => ("VCPUFREQ_NO_CHROMIUM", error.to_string()),
            Err(error) => return Err(error),
        };
        test.env(variable, value);
    }
    test.args(["test", "--workspace", "--locked", "--no-fail-fast"])
        .args(HOST_FEATURES)
        .args(["--", "--show-output"])
        .args((set == Set::Long).then_some("--ignored"))
        .current_dir(repo)
        // The device tree's tests compile and check it with these.
        .env("VCPUFREQ_LAB_ROOT", artifacts.root.dir())
        .envs(CARGO_BAR);
    match kernel_source::bindings(&artifacts.cache, &artifacts.root) {
        Ok(bindings) => test.env("VCPUFREQ_BINDINGS", bindings),
        // They skip what needs them.
        Err(error) if error.is::<Unfetched>() => &mut test,
        Err(error) => return Err(error),
    };
    let (held, text) = child_output::cargo(&mut test, &step)?;
    step.done();
    let mut tried = parse(&text);
    // They belong to the other set, which runs and counts them.
    tried.retain(|one| one.verdict != Verdict::Skipped(IGNORED.to_owned()));
    let failed = tried
        .iter()
        .any(|one| matches!(one.verdict, Verdict::Failed(_)));
    if !held && !failed {
        tried.push(TestResult::new("cargo test", false, || text.clone()));
    } else if failed {
        above(|| println!("{text}"));
    }
    println!("         {} tests of the crates", tried.len());
    Ok(tried)
}

/// How the test harness begins the result of a test that it was told to ignore; a reason may follow.
const IGNORED: &str = "ignored";

/// Reads what the test harness printed: `test NAME ... ok`, and the output
/// of each test under `---- NAME stdout ----`.
fn parse(text: &str) -> Vec<TestResult> {
    let mut tried: Vec<TestResult> = Vec::new();
    let mut shown = String::new();
    for line in text.lines() {
        if let Some((name, result)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        {
            let verdict = match result {
                "ok" => Verdict::Passed,
                ignored if ignored.starts_with(IGNORED) => Verdict::Skipped(IGNORED.to_owned()),
                other => Verdict::Failed(other.to_owned()),
            };
            tried.push(TestResult {
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
    //! Promises: what a test run printed is counted as what it was, and so are a compiler's warnings;
    //! those of a compiler that isn't known decide nothing.
    use super::*;

    #[test]
    fn warnings_of_an_unknown_compiler_decide_nothing() {
        let warns = || Err(anyhow::anyhow!("error: a new lint"));
        let of = |strict, found| judged("clippy, 1.99.0", strict, found).map(|one| one.verdict);
        let failed = Verdict::Failed("error: a new lint".to_owned());
        assert_eq!(of(true, warns()), Some(failed));
        assert_eq!(of(false, warns()), None);
        // What can't be tried is told with any.
        let lacks = || Err(Unfetched("rust-clippy:amd64: trixie lacks it".to_owned()).into());
        for strict in [true, false] {
            assert!(matches!(of(strict, lacks()), Some(Verdict::Skipped(_))));
        }
    }

    #[test]
    fn findings_are_counted_once() {
        let text = "    Checking a v1\nwarning: unneeded `return`\n  --> a.rs:1\n\nwarning: two\n\n\
                    error: a lint that is denied\n\nwarning: `a` (lib) generated 2 warnings\n\
                    error: could not compile `a` (lib) due to 1 previous error; 2 warnings emitted\n\
                    warning: build failed, waiting for other jobs to finish...\n";
        assert_eq!(findings(text), 3);
    }

    #[test]
    fn outcomes_are_told_apart() {
        let text = "test a::one ... ok\ntest a::two ... FAILED\ntest three ... ok\n\
                    test four ... ignored, takes long\nsuccesses:\n---- three stdout ----\nSKIP: no KVM\n";
        let verdicts: Vec<Verdict> = parse(text).into_iter().map(|one| one.verdict).collect();
        let expected = [
            Verdict::Passed,
            Verdict::Failed("FAILED".into()),
            Verdict::Skipped("no KVM".into()),
            Verdict::Skipped(IGNORED.into()),
        ];
        assert_eq!(verdicts, expected);
    }
}
