// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What comes from others: rules for the crates by `cargo deny`, and the tools that crates have.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use crate::cache::Cache;
use crate::child_output::{self, CARGO_BAR, machine_cargo, output};
use crate::namespace::{self, Users};
use crate::progress::Step;
use crate::verdict::{TestResult, Verdict};

/// Version that the checks were written with; a newer one may have new rules.
const CARGO_DENY: &str = "0.20.2";
const DATABASE: &str = "https://github.com/RustSec/advisory-db";
/// Names a clone of it, for machines that can't fetch it.
const COPY: &str = "VCPUFREQ_ADVISORIES";
/// How old the newest advisory of a copy may be for a release.
const FRESH: Duration = Duration::from_secs(90 * 24 * 3600);

/// `cargo deny`: licences, sources and bans; known vulnerabilities too where their list can be had.
pub fn dependencies(cache: &Cache, repo: &Path) -> Result<Vec<TestResult>> {
    let (held, text) = deny(cache, repo, &["licenses", "bans", "sources"])?;
    let rules = TestResult::new("cargo deny: licences, bans, sources", held, || text);
    let mut advisories = advisories(cache, repo)?;
    if let Err(why) = advisories.list {
        advisories.tried.verdict = Verdict::Skipped(why);
    }
    Ok(vec![rules, advisories.tried])
}

/// For a release: no crate has a known vulnerability, by a list that isn't old.
pub fn release(cache: &Cache, repo: &Path) -> Result<TestResult> {
    let mut advisories = advisories(cache, repo)?;
    if let Err(why) = advisories.list {
        advisories.tried.verdict = Verdict::Failed(why);
    }
    Ok(advisories.tried)
}

struct Advisories {
    tried: TestResult,
    /// Why the list isn't there, or is too old for a release.
    list: Result<(), String>,
}

fn advisories(cache: &Cache, repo: &Path) -> Result<Advisories> {
    let copy = std::env::var_os(COPY).map(PathBuf::from);
    let newest = copy.as_deref().map(newest);
    let mut name = "cargo deny: advisories".to_owned();
    if let Some(Ok((_, date))) = &newest {
        name += &format!(" until {date}");
    }
    let mut list = newest.map_or(Ok(()), |newest| fresh(newest?.0, SystemTime::now()));
    let (held, text) = deny(cache, repo, &["advisories"])?;
    if !held && text.contains("failed to fetch advisory database") {
        let why = || format!("no list of advisories: fetch {DATABASE}, or set {COPY} to a clone");
        list = list.and_then(|()| Err(why()));
    }
    let tried = TestResult::new(name, held, || text);
    Ok(Advisories { tried, list })
}

/// When the newest advisory of a clone was committed: the time, and the date.
fn newest(dir: &Path) -> Result<(SystemTime, String), String> {
    let mut log = Command::new("git");
    log.arg("-C").arg(dir);
    log.args(["log", "-1", "--format=%ct %cs", "main", "--"]);
    let (_, text) = output(&mut log).map_err(|error| format!("{error:#}"))?;
    let words = text.trim().split_once(' ');
    let found = words.and_then(|(seconds, date)| Some((seconds.parse().ok()?, date.to_owned())));
    found
        .map(|(seconds, date)| (UNIX_EPOCH + Duration::from_secs(seconds), date))
        .ok_or_else(|| format!("{COPY}={} is no clone of {DATABASE}", dir.display()))
}

fn fresh(newest: SystemTime, now: SystemTime) -> Result<(), String> {
    let days = |time: Duration| time.as_secs() / (24 * 3600);
    match now.duration_since(newest) {
        Ok(age) if age > FRESH => Err(format!(
            "the newest advisory of {COPY} is {} days old, {} are allowed: fetch it anew",
            days(age),
            days(FRESH)
        )),
        _ => Ok(()),
    }
}

fn deny(cache: &Cache, repo: &Path, what: &[&str]) -> Result<(bool, String)> {
    let dir = tool(cache, "cargo-deny", CARGO_DENY)?;
    let mut deny = Command::new(dir.join("bin/cargo-deny"));
    deny.arg("check").args(what).current_dir(repo);
    if let Some(copy) = std::env::var_os(COPY) {
        // It fetches by git, which takes the copy for the database.
        let instead = format!("url.file://{}.insteadOf", Path::new(&copy).display());
        deny.env("GIT_CONFIG_COUNT", "1")
            .env("GIT_CONFIG_KEY_0", instead)
            .env("GIT_CONFIG_VALUE_0", DATABASE);
    }
    output(&mut deny)
}

/// The folder of a program that a crate of the registry has.
pub fn tool(cache: &Cache, name: &str, version: &str) -> Result<PathBuf> {
    cache.entry(name, version, |to| {
        let step = Step::start(format!("{name} (minutes, once)"));
        // In namespaces, so that it ends with this process: half an install
        // would go on writing into a folder that the next run removes.
        let mut install = namespace::command(Users::Root);
        install
            .arg(machine_cargo().get_program())
            // Without optimization: it runs for seconds, and compiles for minutes.
            .args(["install", "--debug", "--locked", "--version", version])
            .args([name, "--root"])
            .arg(to)
            .envs(CARGO_BAR);
        let (installed, text) = child_output::cargo(&mut install, &step)?;
        ensure!(
            installed,
            "cannot install {name} (is the network up?): {text}"
        );
        step.done();
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    //! Promise: a release takes no list of advisories that is old or isn't one.
    use super::*;

    #[test]
    fn an_old_list_is_refused() {
        let now = SystemTime::now();
        let of = |days: u64| fresh(now - Duration::from_secs(days * 24 * 3600), now);
        assert_eq!(of(0), Ok(()));
        assert_eq!(of(90), Ok(()));
        assert!(of(91).unwrap_err().contains("91 days old, 90 are allowed"));
    }

    #[test]
    fn what_is_no_clone_is_refused() {
        let why = newest(Path::new("/nowhere")).unwrap_err();
        assert!(why.contains("=/nowhere is no clone of"), "{why}");
    }
}
