// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! This machine's apt: which mirror it uses, and how to get a tool from it
//! without installing anything.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};

use crate::child_output;
use crate::progress::Step;

/// Trixie has the new name, and the old one as a link to it.
const KEYRINGS: &[&str] = &[
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
];
/// The end of a line about what another distribution doesn't have.
const ELSEWHERE: &str = "on another distribution use the Containerfile";

/// apt with this machine's sources; its package lists are the machine's, or
/// freshly fetched ones in a folder of ours.
#[derive(Debug)]
pub struct Apt {
    dir: PathBuf,
    own_lists: bool,
    mirror: String,
}

impl Apt {
    /// Finds this machine's mirror of Debian. `dir` is an empty folder for
    /// what has to be fetched.
    ///
    /// Fails when this is no Debian machine, or its package lists were never
    /// fetched and can't be now.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut apt = Self {
            dir: dir.to_path_buf(),
            own_lists: false,
            mirror: String::new(),
        };
        let mirror = match apt.find_mirror()? {
            Some(mirror) => mirror,
            None => {
                let said = apt.fetch_lists()?;
                apt.find_mirror()?.with_context(|| no_mirror(&said))?
            }
        };
        apt.mirror = resolve(&mirror)?;
        Ok(apt)
    }

    /// The mirror's address.
    pub fn mirror(&self) -> &str {
        &self.mirror
    }

    /// Lines of a suite and its backports for an own list of sources.
    pub fn sources(&self, suite: &str) -> Result<[String; 2]> {
        let (keys, mirror) = (keyring(KEYRINGS)?, &self.mirror);
        let line = |suite: &str| format!("deb [signed-by={keys}] {mirror} {suite} main");
        Ok([line(suite), line(&format!("{suite}-backports"))])
    }

    /// mmdebstrap: this machine's, or the package unpacked into the folder.
    pub fn mmdebstrap(&mut self) -> Result<PathBuf> {
        let installed = PathBuf::from("/usr/bin/mmdebstrap");
        if installed.exists() {
            return Ok(installed);
        }
        let step = Step::start("mmdebstrap");
        let mut output = self.download("mmdebstrap")?;
        let mut said = "with fresh lists".to_owned();
        if !output.status.success() && !self.own_lists {
            // The machine's lists may name a version that is gone.
            said = self.fetch_lists()?;
            output = self.download("mmdebstrap")?;
        }
        ensure!(
            output.status.success(),
            "cannot fetch the package mmdebstrap from {} ({}; {said}): the first run needs the \
             network, later ones don't",
            self.mirror,
            complaint(&output)
        );
        let package = fs::read_dir(&self.dir)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|end| end == "deb"))
            .context("apt-get downloaded no package")?;
        let unpacked = self.dir.join("mmdebstrap");
        child_output::quietly(
            Command::new("dpkg-deb")
                .arg("-x")
                .arg(package)
                .arg(&unpacked),
            "unpacking mmdebstrap",
        )?;
        step.done();
        Ok(unpacked.join("usr/bin/mmdebstrap"))
    }

    fn command(&self) -> Command {
        let mut command = Command::new("apt-get");
        if self.own_lists {
            for (option, name) in [("Dir::State::lists", "lists"), ("Dir::Cache", "cache")] {
                command.arg(format!("-o{option}={}", self.dir.join(name).display()));
            }
        }
        command
            .current_dir(&self.dir)
            .env("LC_ALL", "C.UTF-8")
            .stdin(Stdio::null());
        command
    }

    fn download(&self, package: &str) -> Result<Output> {
        self.command()
            .args(["download", package])
            .output()
            .context("cannot run apt-get")
    }

    /// Fetches the package lists into the folder; the machine's own stay as
    /// they are. Gives what apt complained about: its exit code doesn't tell
    /// whether the lists that count have come.
    fn fetch_lists(&mut self) -> Result<String> {
        let step = Step::start("package lists of this machine's apt sources");
        self.own_lists = true;
        fs::create_dir_all(self.dir.join("lists/partial"))?;
        fs::create_dir_all(self.dir.join("cache/archives/partial"))?;
        let output = self.command().arg("update").output()?;
        step.done();
        Ok(complaint(&output))
    }

    fn find_mirror(&self) -> Result<Option<String>> {
        let output = self
            .command()
            .args([
                "indextargets",
                "--format",
                "$(REPO_URI) $(LABEL) $(CODENAME)",
            ])
            .arg("Created-By: Packages")
            .output()
            .with_context(|| {
                format!("cannot run apt-get: the lab's set-up needs Debian 12 or 13; {ELSEWHERE}")
            })?;
        Ok(debian_mirror(&String::from_utf8_lossy(&output.stdout)))
    }
}

/// The archive's keys on this machine.
fn keyring(places: &[&'static str]) -> Result<&'static str> {
    places
        .iter()
        .find(|path| Path::new(path).exists())
        .copied()
        .with_context(|| {
            format!(
                "no {}: install debian-archive-keyring; {ELSEWHERE}",
                places.join(" or ")
            )
        })
}

/// The first address that has a whole Debian release, from lines of address,
/// label and code name. Others' archives have other labels, security and
/// updates other names.
fn debian_mirror(targets: &str) -> Option<String> {
    targets.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (address, label, name) = (words.next()?, words.next()?, words.next()?);
        (label == "Debian" && !name.contains('-')).then(|| address.to_owned())
    })
}

/// What apt complained about, in one line.
fn complaint(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines()
        .find_map(|line| {
            line.strip_prefix("E: ")
                .or_else(|| line.strip_prefix("W: "))
        })
        .unwrap_or("apt-get complained of nothing")
        .trim()
        .to_owned()
}

fn no_mirror(said: &str) -> String {
    format!(
        "apt knows no Debian mirror ({said}): the first run needs the network, and Debian 12 or \
         13 with its archive among apt's sources; {ELSEWHERE}"
    )
}

/// An address that apt reads from a file, as Debian's cloud images have it,
/// is the first one in that file.
fn resolve(address: &str) -> Result<String> {
    let Some(path) = address.strip_prefix("mirror+file:") else {
        return Ok(address.to_owned());
    };
    let path = format!("/{}", path.trim_matches('/'));
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read apt's mirrors, {path}"))?;
    first_mirror(&text).with_context(|| format!("no mirror in {path}"))
}

fn first_mirror(text: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.split_whitespace().next())
        .find(|word| !word.starts_with('#'))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    //! Promises: the mirror is Debian's own archive, whatever else apt has;
    //! what apt complains about becomes one line; another distribution's user reads what to use.
    use super::*;

    #[test]
    fn mirror_is_a_whole_debian_release() {
        let targets = "https://other.example/debian/ Other bookworm\n\
                       http://a.example/debian-security/ Debian-Security bookworm-security\n\
                       http://b.example/debian/ Debian bookworm-updates\n\
                       http://c.example/debian/ Debian bookworm\n";
        assert_eq!(
            debian_mirror(targets).as_deref(),
            Some("http://c.example/debian/")
        );
    }

    #[test]
    fn no_mirror_without_lists() {
        for targets in ["", "\n", "http://a.example/debian/  \n"] {
            assert_eq!(debian_mirror(targets), None, "{targets:?}");
        }
    }

    // As on Ubuntu, whose apt has other archives and other keys.
    #[test]
    fn another_distribution_is_sent_to_the_containerfile() {
        let keys = keyring(&["/nonexistent"]).unwrap_err().to_string();
        for line in [no_mirror("apt-get complained of nothing"), keys] {
            assert!(line.contains("use the Containerfile"), "{line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }

    #[test]
    fn mirror_file_gives_its_first_address() {
        let text = "# mirrors\n\nhttps://a.example/debian\tpriority:1\nhttps://b.example/debian\n";
        assert_eq!(
            first_mirror(text).as_deref(),
            Some("https://a.example/debian")
        );
        assert_eq!(first_mirror("# none\n"), None);
    }

    #[test]
    fn plain_address_stays_as_it_is() {
        assert_eq!(
            resolve("http://a.example/debian/").unwrap(),
            "http://a.example/debian/"
        );
        assert!(resolve("mirror+file:/does/not/exist/").is_err());
    }

    #[test]
    fn complaint_is_one_line() {
        let output = Command::new("sh")
            .args(["-c", "printf 'N: x\\nE: Unable to fetch\\nE: more\\n' >&2"])
            .output()
            .unwrap();
        assert_eq!(complaint(&output), "Unable to fetch");
    }
}
