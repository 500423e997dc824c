// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: one line names what a machine lacks to compile the lab, and the
//! next step; the exit code is 2.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but not in what they share"
)]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What every Debian has that the script calls.
const ESSENTIAL: &[&str] = &[
    "cut", "date", "dirname", "echo", "find", "head", "printf", "sed", "sort", "tail",
];

/// A folder with programs, to be the whole PATH.
struct Programs(PathBuf);

impl Programs {
    fn essential(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("vcpufreq-start-{name}-{}", process()));
        fs::create_dir_all(&dir).unwrap();
        let programs = Self(dir);
        for name in ESSENTIAL {
            programs.link(name, &found(name));
        }
        programs
    }

    fn link(&self, name: &str, to: &Path) {
        symlink(to, self.0.join(name)).unwrap();
    }

    /// The cargo that runs this test, not one that chooses a cargo.
    fn cargo(self) -> Self {
        let cargo = Path::new(env!("CARGO"));
        self.link("cargo", cargo);
        self.link("rustc", &cargo.with_file_name("rustc"));
        self
    }

    /// A cargo that does this, in shell.
    fn cargo_that(self, does: &str) -> Self {
        let path = self.0.join("cargo");
        fs::write(&path, format!("#!/bin/sh\n{does}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// A compiler, and whatever it calls by its own way.
    fn cc(self) -> Self {
        for name in ["cc", "as", "ld"] {
            self.link(name, &found(name));
        }
        self
    }

    /// The output of the script, with this in the environment.
    fn said(&self, command: &str, name: &str, value: impl AsRef<OsStr>) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("start");
        let output = Command::new("/bin/sh")
            .arg(script)
            .arg(command)
            .env_clear()
            .env("PATH", &self.0)
            .env(name, value)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn process() -> u32 {
    std::process::id()
}

fn found(name: &str) -> PathBuf {
    ["/usr/bin", "/bin"]
        .map(|dir| Path::new(dir).join(name))
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("no {name} on this machine"))
}

fn assert_line(said: &str, expected: &str) {
    assert!(said.contains(expected), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn without_cargo() {
    let programs = Programs::essential("cargo");
    assert_line(&programs.said("setup", "A", ""), "apt install cargo");
}

#[test]
fn with_an_old_cargo() {
    let programs = Programs::essential("old").cargo_that("echo 'cargo 1.84.1 (abc 2025-01-01)'");
    assert_line(&programs.said("setup", "A", ""), "1.85 or later is needed");
}

#[test]
fn without_a_linker() {
    let programs = Programs::essential("cc").cargo();
    assert_line(
        &programs.said("setup", "A", ""),
        "install a C compiler (Debian: apt install gcc libc6-dev)",
    );
}

#[test]
fn without_a_network() {
    let programs = Programs::essential("network").cargo().cc();
    let home = programs.0.join("home");
    // Nowhere a crate, and the only way to one leads nowhere.
    fs::create_dir(&home).unwrap();
    fs::write(
        home.join("config.toml"),
        "[net]\nretry = 0\n[http]\nproxy = \"127.0.0.1:9\"\n",
    )
    .unwrap();
    let said = programs.said("setup", "CARGO_HOME", &home);
    let said = said.strip_prefix("lab: fetching the crates (once, about a minute)\n");
    assert_line(said.unwrap(), "needs the network");
}
