// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `out/`: what a run leaves for programs and people.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use serde_json::Value;

/// Writes an object as JSON, with the build that it is of: `make figures` takes those of one build.
pub fn write(repo: &Path, name: &str, mut object: Value) -> Result<()> {
    object["build"] = build(repo).into();
    text(repo, name, &format!("{object:#}\n"))
}

/// Writes a text.
pub fn text(repo: &Path, name: &str, text: &str) -> Result<()> {
    let out = repo.join("out");
    fs::create_dir_all(&out)?;
    let path = out.join(name);
    fs::write(&path, text).with_context(|| path.display().to_string())
}

/// The commit, and whether there are changes to it; `unknown` outside of a repository. To be asked
/// before anything is compiled: later answers are the first one.
pub fn build(repo: &Path) -> &'static str {
    static BUILD: OnceLock<String> = OnceLock::new();
    BUILD.get_or_init(|| describe(repo))
}

fn describe(repo: &Path) -> String {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--abbrev=9"]);
    let output = git.current_dir(repo).output().ok();
    let output = output.filter(|output| output.status.success());
    output.map_or("unknown".to_owned(), |output| {
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    })
}
