// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One run of mmdebstrap: how far it is, and why it failed.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};

use crate::progress::{Step, above};

/// Else dpkg syncs the files of each package: the demo's tree took 94 s, and 82 s without. The tree
/// keeps it for packages that come later.
const NO_SYNC: &str = "--dpkgopt=force-unsafe-io";

/// Runs mmdebstrap with `--verbose`, shows how far it is and keeps what it
/// prints in `log`. The error is one line with the cause; where that is
/// unknown, all that was printed goes to stderr first.
pub fn run(command: &mut Command, log: &Path, step: &Step) -> Result<()> {
    let mut child = command
        .arg(NO_SYNC)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let lines = child
        .stderr
        .take()
        .map(BufReader::new)
        .context("no output")?;
    let mut kept = String::new();
    let mut stage = Stage::default();
    for line in lines.split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        match stage.read(&line) {
            LineKind::Stage => step.tell(&stage.to_string()),
            LineKind::Count => step.note(&stage.to_string()),
            LineKind::Nothing => {}
        }
        writeln!(kept, "{line}")?;
    }
    let status = child.wait()?;
    if status.success() {
        return fs::write(log, &kept).context("cannot keep mmdebstrap's log");
    }
    if let Some(cause) = cause(&kept) {
        bail!(cause);
    }
    above(|| eprint!("{kept}"));
    Err(anyhow!(
        "mmdebstrap failed ({status}); its messages are above"
    ))
}

/// The meaning of a line.
#[derive(Debug, PartialEq, Eq)]
enum LineKind {
    Stage,
    Count,
    Nothing,
}

/// Where mmdebstrap is, from what it and apt print.
#[derive(Debug, Default)]
struct Stage {
    name: String,
    packages: usize,
    fetched: usize,
    unpacked: usize,
    set_up: usize,
}

impl Stage {
    fn read(&mut self, line: &str) -> LineKind {
        if let Some(name) = stage_name(line) {
            *self = Self {
                name: name.replace(" inside the chroot", "").replace("...", ""),
                ..Self::default()
            };
            return LineKind::Stage;
        }
        if let Some(count) = newly_installed(line) {
            self.packages = count;
            return LineKind::Nothing;
        }
        let count = if line.starts_with("Get:") {
            &mut self.fetched
        } else if line.starts_with("Unpacking ") {
            &mut self.unpacked
        } else if line.starts_with("Setting up ") {
            &mut self.set_up
        } else {
            return LineKind::Nothing;
        };
        *count += 1;
        // Without a number of packages it isn't packages that are fetched.
        if self.packages == 0 {
            LineKind::Nothing
        } else {
            LineKind::Count
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        let Self {
            packages,
            fetched,
            unpacked,
            set_up,
            ..
        } = self;
        if *packages == 0 {
            Ok(())
        } else if *unpacked == 0 {
            write!(f, ": fetched {fetched} of {packages} packages")
        } else {
            write!(
                f,
                ": unpacked {unpacked}, set up {set_up} of {packages} packages"
            )
        }
    }
}

/// mmdebstrap's own lines, without a hook's script; install scripts print
/// such lines about files.
fn stage_name(line: &str) -> Option<&str> {
    let name = line.strip_prefix("I: ")?;
    let own = name.starts_with(|first: char| first.is_ascii_lowercase());
    own.then(|| name.split(" in shell:").next()).flatten()
}

/// N of "0 upgraded, N newly installed, 0 to remove and 0 not upgraded."
fn newly_installed(line: &str) -> Option<usize> {
    let (before, _) = line.split_once(" newly installed")?;
    before.rsplit(' ').next()?.parse().ok()
}

/// Known causes, the more telling ones first: a full disk or a missing
/// network make other messages follow.
const CAUSES: &[(&[&str], &str)] = &[
    (
        &[
            "No space left on device",
            "You don't have enough free space",
        ],
        "the disk is full: free some, or set VCPUFREQ_CACHE to a folder on a larger disk",
    ),
    (
        &["is not valid yet", "Release file is expired"],
        "its files are of another time than this machine's clock: set the clock",
    ),
    (
        &["NO_PUBKEY", "is not signed", "Missing key"],
        "its signature can't be checked: upgrade the package debian-archive-keyring",
    ),
    (
        &[
            "Temporary failure resolving",
            "Could not resolve",
            "Could not connect",
            "Cannot initiate the connection",
            "Connection failed",
            "connection timed out",
        ],
        "it can't be reached: the first run needs the network, later ones don't",
    ),
    (
        &[
            "Unable to locate package",
            "has no installation candidate",
            "does not have a Release file",
            "404  Not Found",
        ],
        "it lacks what the lab needs: use a mirror of all of Debian trixie, amd64 and arm64, \
         with trixie-backports, as the first of apt's sources",
    ),
    (
        &["Failed to fetch"],
        "not everything could be fetched: try again, or use another mirror",
    ),
];

fn cause(printed: &str) -> Option<String> {
    let (words, advice) = CAUSES
        .iter()
        .find(|(words, _)| words.iter().any(|word| printed.contains(word)))?;
    let proof = printed
        .lines()
        .find(|line| words.iter().any(|word| line.contains(word)))?;
    Some(format!("{advice} ({})", proof.trim()))
}

#[cfg(test)]
mod tests {
    //! Promises: progress counts packages of the stage that runs; a known
    //! failure is one line with the next step, the cause before what follows
    //! from it.
    use super::*;

    #[test]
    fn progress_counts_packages() {
        let mut stage = Stage::default();
        for (line, told, shown) in [
            (
                "I: running apt-get update...",
                LineKind::Stage,
                "running apt-get update",
            ),
            (
                "Get:1 http://a.example trixie InRelease",
                LineKind::Nothing,
                "running apt-get update",
            ),
            ("I: installing...", LineKind::Stage, "installing"),
            (
                "0 upgraded, 12 newly installed, 0 to remove and 3 not upgraded.",
                LineKind::Nothing,
                "installing: fetched 0 of 12 packages",
            ),
            (
                "Get:1 http://a.example x",
                LineKind::Count,
                "installing: fetched 1 of 12 packages",
            ),
            (
                "Unpacking x (1) ...",
                LineKind::Count,
                "installing: unpacked 1, set up 0 of 12 packages",
            ),
            (
                "I: /vmlinuz is now a symlink",
                LineKind::Nothing,
                "installing: unpacked 1, set up 0 of 12 packages",
            ),
            (
                "Selecting y",
                LineKind::Nothing,
                "installing: unpacked 1, set up 0 of 12 packages",
            ),
            (
                "Setting up x (1) ...",
                LineKind::Count,
                "installing: unpacked 1, set up 1 of 12 packages",
            ),
        ] {
            assert_eq!(stage.read(line), told, "{line}");
            assert_eq!(stage.to_string(), shown);
        }
    }

    #[test]
    fn known_failure_is_one_line() {
        for (printed, expected) in [
            (
                "Err:1 http://a.example\n  Temporary failure resolving 'a.example'\n\
                 E: Failed to fetch x\nE: Unable to locate package y\n",
                "needs the network",
            ),
            (
                "tar: x: Cannot write: No space left on device\n",
                "larger disk",
            ),
            (
                "E: Unable to locate package linux-image-rt-arm64\n",
                "trixie-backports",
            ),
            (
                "E: The repository 'x' does not have a Release file.\n",
                "trixie-backports",
            ),
            (
                "W: NO_PUBKEY 1234\nE: The repository is not signed.\n",
                "debian-archive-keyring",
            ),
        ] {
            let line = cause(printed).unwrap();
            assert!(line.contains(expected), "{line}");
            assert_eq!(line.lines().count(), 1);
        }
        assert_eq!(cause("E: something else\n"), None);
    }
}
