// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `out/`: what a run leaves for programs and people.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cache::CacheState;
use crate::taken::TakenPackage;

/// The packages of Debian that this run's results come with.
static TAKEN: OnceLock<Vec<TakenPackage>> = OnceLock::new();

/// Those of trees beside its root.
static FETCHED: Mutex<Vec<TakenPackage>> = Mutex::new(Vec::new());

/// Tells which packages the results of this run come with.
pub fn taken(packages: Vec<TakenPackage>) {
    // A process has one root.
    let _ = TAKEN.set(packages);
}

/// Tells which packages a tree beside the root has, of which a host of this run is made.
pub fn fetched(packages: Vec<TakenPackage>) {
    // Nothing panics with this lock.
    let Ok(mut all) = FETCHED.lock() else { return };
    for one in packages {
        if !all.contains(&one) {
            all.push(one);
        }
    }
}

/// All of them; none before the root's are known.
fn packages() -> Option<Vec<TakenPackage>> {
    let mut all = TAKEN.get()?.clone();
    all.extend(FETCHED.lock().ok()?.iter().cloned());
    Some(all)
}

/// Writes an object as JSON, with the build that it is of (`make figures` takes those of one build)
/// and the packages of Debian that it was made with.
pub fn write(repo: &Path, name: &str, mut object: Value) -> Result<()> {
    object["build"] = build(repo).into();
    object["packages"] = serde_json::to_value(packages())?;
    text(repo, name, &format!("{object:#}\n"))
}

/// Writes a page, with the packages of Debian that its figures were measured with at its end.
pub fn page(repo: &Path, name: &str, html: &str) -> Result<()> {
    let line = |one: &TakenPackage| {
        let TakenPackage { name, version, .. } = one;
        format!("{name} {version} ({}, {})", one.suite, one.architecture)
    };
    let Some(packages) = packages() else {
        return text(repo, name, html);
    };
    let lines: Vec<String> = packages.iter().map(line).collect();
    let body = html.strip_suffix("</html>\n").unwrap_or(html);
    let packages = lines.join("; ");
    let html = format!("{body}<p>Packages of Debian: {packages}.</p>\n</html>\n");
    text(repo, name, &html)
}

/// Notes how long a command of the README took on this machine; `make figures` makes a table of it.
/// `found` is what was in its caches.
pub fn time(repo: &Path, command: &str, found: CacheState, took: Duration) -> Result<()> {
    const FILE: &str = "times.json";
    let run = json!({
        "command": command, "caches": found, "machine": machine(), "s": took.as_secs(),
        "build": build(repo),
    });
    let before = fs::read_to_string(repo.join("out").join(FILE)).unwrap_or_default();
    let mut runs: Vec<Value> = serde_json::from_str(&before).unwrap_or_default();
    runs.retain(|one| one["command"] != command || one["caches"] != run["caches"]);
    runs.push(run);
    text(repo, FILE, &format!("{:#}\n", Value::from(runs)))
}

/// This machine's processors.
fn machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cpus = available_parallelism().map_or(1, usize::from);
    format!(
        "{cpus} CPUs of {}",
        model.map_or("an unknown model", |(_, model)| model)
    )
}

/// Writes a text.
pub fn text(repo: &Path, name: &str, text: &str) -> Result<()> {
    let out = repo.join("out");
    fs::create_dir_all(&out)?;
    let path = out.join(name);
    fs::write(&path, text).with_context(|| path.display().to_string())
}

/// The commit, and whether there are changes to it but for pages, which have the figures of earlier
/// measurements; `unknown` outside of a repository. To be asked before anything is compiled: later
/// answers are the first one.
pub fn build(repo: &Path) -> &'static str {
    static BUILD: OnceLock<String> = OnceLock::new();
    BUILD.get_or_init(|| describe(repo))
}

fn describe(repo: &Path) -> String {
    let git = |words: &[&str]| {
        let output = Command::new("git").args(words).current_dir(repo).output();
        output.ok().filter(|output| output.status.success())
    };
    let Some(commit) = git(&["describe", "--always", "--abbrev=9"]) else {
        return "unknown".to_owned();
    };
    let commit = String::from_utf8_lossy(&commit.stdout).trim().to_owned();
    let pages = [":!*.md", ":!docs/bench-figures.csv", ":!docs/times.json"];
    match git(&[&["diff", "--quiet", "HEAD", "--", "."], &pages[..]].concat()) {
        Some(_) => commit,
        None => commit + "-dirty",
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a result names its build and its packages; a command's time is kept with what was in
    //! the caches; figures name a build that is changed, and pages don't change it.
    use std::path::PathBuf;

    use super::*;

    /// A test's folder that is no repository.
    fn folder(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("vcpufreq-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn read(repo: &Path, name: &str) -> Value {
        let text = fs::read_to_string(repo.join("out").join(name)).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_result_names_its_world() {
        let repo = folder("result");
        let package = json!({
            "name": "make", "version": "4.4.1-2", "suite": "trixie", "architecture": "amd64",
        });
        taken(vec![serde_json::from_value(package.clone()).unwrap()]);
        let of_tree = json!({
            "name": "fio", "version": "3.39-1", "suite": "trixie", "architecture": "arm64",
        });
        for _ in 0..2 {
            fetched(vec![serde_json::from_value(of_tree.clone()).unwrap()]);
        }
        write(&repo, "demo.json", json!({ "wrong": 0 })).unwrap();
        let all = [package, of_tree];
        let expected = json!({ "wrong": 0, "build": build(&repo), "packages": all });
        assert_eq!(read(&repo, "demo.json"), expected);
        page(&repo, "ramp.html", "<h1>a</h1>\n</html>\n").unwrap();
        let page = fs::read_to_string(repo.join("out/ramp.html")).unwrap();
        let expected = "<p>Packages of Debian: make 4.4.1-2 (trixie, amd64); fio 3.39-1 \
                        (trixie, arm64).</p>\n</html>\n";
        assert_eq!(page, format!("<h1>a</h1>\n{expected}"));
        fs::remove_dir_all(repo).unwrap();
    }

    #[test]
    fn the_newest_time_is_kept_for_each_state_of_the_caches() {
        let repo = folder("times");
        let runs = [
            (CacheState::Empty, 300),
            (CacheState::Partly, 200),
            (CacheState::Filled, 90),
            (CacheState::Partly, 180),
        ];
        for (found, s) in runs {
            time(&repo, "make test", found, Duration::from_secs(s)).unwrap();
        }
        let all = read(&repo, "times.json");
        let all = all.as_array().unwrap().iter();
        let all: Vec<_> = all
            .map(|run| (run["caches"].as_str(), run["s"].as_u64()))
            .collect();
        let expected = [("empty", 300), ("filled", 90), ("partly", 180)];
        assert_eq!(all, expected.map(|(caches, s)| (Some(caches), Some(s))));
        fs::remove_dir_all(repo).unwrap();
    }

    #[test]
    fn pages_change_no_build() {
        let repo = folder("build");
        let repo = repo.as_path();
        let git = |words: &[&str]| {
            let name = ["-c", "user.name=a", "-c", "user.email=a@a.invalid"];
            let status = Command::new("git")
                .args(name)
                .args(words)
                .current_dir(repo)
                .status();
            assert!(status.unwrap().success(), "{words:?}");
        };
        assert_eq!(describe(repo), "unknown");
        git(&["init", "--quiet"]);
        for file in ["page.md", "source.rs"] {
            fs::write(repo.join(file), "one").unwrap();
        }
        git(&["add", "."]);
        git(&["commit", "--quiet", "--message=one"]);
        let commit = describe(repo);
        fs::write(repo.join("page.md"), "two").unwrap();
        assert_eq!(describe(repo), commit);
        fs::write(repo.join("source.rs"), "two").unwrap();
        assert_eq!(describe(repo), commit + "-dirty");
        fs::remove_dir_all(repo).unwrap();
    }
}
