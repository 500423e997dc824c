// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The archive as it is today: an apt of the lab's own, its package lists of both architectures, and
//! its solver. Of the machine's apt it takes how to reach the archive, and changes nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::child_output::output;

/// The emulator's machine and the emulated one.
pub const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];

/// A package as a list has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Of the binary package.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The source package that it is built from.
    pub source: String,
    /// And that one's version.
    pub source_version: String,
    /// Whose list it is in.
    pub architecture: String,
    /// Whether it is for all architectures: then it is in each list.
    pub for_all: bool,
    /// Code name of the suite.
    pub suite: String,
    /// The packages that it depends on in one version, each with that.
    pub exact: Vec<(String, String)>,
    /// Names that it stands for.
    pub provides: Vec<String>,
}

/// An apt with lists of its own.
#[derive(Debug)]
pub struct Archive {
    dir: PathBuf,
    /// All packages of all lists.
    pub listed: Vec<Listed>,
}

impl Archive {
    /// Fetches the package lists of these sources (lines of a sources.list) into the folder `dir`,
    /// which apt may fill.
    pub fn fetch(dir: &Path, sources: &[String]) -> Result<Self> {
        for folder in ["lists/partial", "cache/archives/partial", "log"] {
            fs::create_dir_all(dir.join(folder))?;
        }
        let mut lines = sources.join("\n");
        lines.push('\n');
        fs::write(dir.join("sources.list"), lines)?;
        fs::write(dir.join("preferences"), "")?;
        configure(dir)?;
        let mut archive = Self {
            dir: dir.to_owned(),
            listed: Vec::new(),
        };
        // Its exit code doesn't tell of a list that didn't come.
        let (held, text) = output(archive.apt("apt-get").args(["update", "--error-on=any"]))?;
        ensure!(
            held,
            "cannot fetch the package lists ({})",
            first_error(&text)
        );
        archive.listed = archive.read()?;
        ensure!(!archive.listed.is_empty(), "the package lists are empty");
        Ok(archive)
    }

    /// The lists that an earlier run left in this folder, wherever that was then.
    pub fn kept(dir: &Path) -> Result<Self> {
        configure(dir)?;
        let mut archive = Self {
            dir: dir.to_owned(),
            listed: Vec::new(),
        };
        archive.listed = archive.read()?;
        Ok(archive)
    }

    /// A command of apt's with these lists and the preferences of [`Archive::prefer`].
    pub fn apt(&self, program: &str) -> Command {
        let mut apt = Command::new(program);
        apt.env("APT_CONFIG", self.configuration())
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .current_dir(&self.dir);
        apt
    }

    /// What makes apt this one.
    pub fn configuration(&self) -> PathBuf {
        self.dir.join("apt.conf")
    }

    /// Which versions apt takes from now on, as of apt_preferences(5).
    pub fn prefer(&self, preferences: &str) -> Result<()> {
        Ok(fs::write(self.dir.join("preferences"), preferences)?)
    }

    /// Whether apt's solver can install these on an empty system, at once; if not, the error is what
    /// it says, in one line.
    pub fn solve(&self, packages: &[String]) -> Result<()> {
        self.solve_for(packages, ARCHITECTURES[0])
    }

    /// The same on a system of this architecture.
    fn solve_for(&self, packages: &[String], architecture: &str) -> Result<()> {
        let mut solve = self.apt("apt-get");
        let of_system = format!("APT::Architecture={architecture}");
        solve.args(["--option", &of_system, "--simulate", "--quiet", "install"]);
        let (held, text) = output(solve.args(packages))?;
        ensure!(held, "apt can't install what was chosen: {}", unmet(&text));
        Ok(())
    }

    /// Adds to `installed`, which can be installed on a system of this architecture, those of these
    /// packages that can be installed beside it, in turn. The others, each with what apt says.
    pub fn unsolved(
        &self,
        installed: &mut Vec<String>,
        packages: Vec<String>,
        architecture: &str,
    ) -> Vec<(String, String)> {
        let all = [&installed[..], &packages].concat();
        if self.solve_for(&all, architecture).is_ok() {
            *installed = all;
            return Vec::new();
        }
        let mut unsolved = Vec::new();
        for package in packages {
            installed.push(package.clone());
            if let Err(why) = self.solve_for(installed, architecture) {
                installed.pop();
                unsolved.push((package, why.to_string()));
            }
        }
        unsolved
    }

    /// The version of each of these packages (`NAME:ARCHITECTURE`) that apt would take.
    pub fn candidates(&self, packages: &[String]) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        for package in packages {
            let mut policy = self.apt("apt-cache");
            let (held, text) = output(policy.args(["policy", package]))?;
            let mut lines = text.lines();
            let version = lines.find_map(|line| line.trim().strip_prefix("Candidate: "));
            let version = version.filter(|_| held);
            let version = version.with_context(|| format!("apt knows no {package}"))?;
            found.push((package.clone(), version.to_owned()));
        }
        Ok(found)
    }

    fn read(&self) -> Result<Vec<Listed>> {
        let mut targets = self.apt("apt-get");
        targets.args(["indextargets", "--format"]);
        targets.args([
            "$(CODENAME) $(ARCHITECTURE) $(FILENAME)",
            "Created-By: Packages",
        ]);
        let (held, text) = output(&mut targets)?;
        ensure!(held, "cannot list apt's files ({})", first_error(&text));
        let mut listed = Vec::new();
        for line in text.lines() {
            let mut words = line.splitn(3, ' ');
            let mut word = || words.next().context("a line of apt-get indextargets");
            let (suite, architecture, file) = (word()?, word()?, word()?);
            let text = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
            listed.extend(
                text.split("\n\n")
                    .filter_map(|one| parse(one, suite, architecture)),
            );
        }
        Ok(listed)
    }
}

/// Names a package for apt, with its architecture.
pub fn of(name: &str, architecture: &str) -> String {
    format!("{name}:{architecture}")
}

fn configure(dir: &Path) -> Result<()> {
    Ok(fs::write(
        dir.join("apt.conf"),
        machines()? + &configuration(dir),
    )?)
}

/// How this machine's apt fetches: proxies, certificates, time limits.
fn machines() -> Result<String> {
    let mut dump = Command::new("apt-config");
    dump.args(["dump", "--no-empty", "--format", "%F \"%v\";%n", "Acquire"]);
    let (held, text) = output(&mut dump)?;
    ensure!(
        held,
        "cannot read apt's configuration ({})",
        first_error(&text)
    );
    Ok(text)
}

/// All else is the lab's own: of the machine's files, apt reads none.
fn configuration(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
APT::Architecture "{}";
APT::Architectures {{ "{}"; "{}"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::GzipIndexes "false";
#clear Acquire::Languages;
Acquire::Languages "none";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Dir::State::lists "{dir}/lists";
Dir::State::status "/dev/null";
Dir::State::extended_states "{dir}/extended_states";
Dir::Cache "{dir}/cache";
Dir::Log "{dir}/log";
Dir::Etc::sourcelist "{dir}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "{dir}/preferences";
Dir::Etc::preferencesparts "/dev/null";
"#,
        ARCHITECTURES[0], ARCHITECTURES[0], ARCHITECTURES[1]
    )
}

/// A paragraph of a Packages file.
fn parse(paragraph: &str, suite: &str, architecture: &str) -> Option<Listed> {
    let field = |name: &str| {
        let mut lines = paragraph.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    };
    let (name, version) = (field("Package")?, field("Version")?);
    // `Source: NAME (VERSION)`, with what differs from the binary package's.
    let source = field("Source").unwrap_or(name);
    let (source, source_version) = match source.split_once(" (") {
        Some((source, version)) => (source, version.trim_end_matches(')')),
        None => (source, version),
    };
    let relations = ["Pre-Depends", "Depends"].into_iter().filter_map(field);
    let exact = relations.flat_map(|all| all.split(", ").filter_map(exact));
    let provides = field("Provides").into_iter();
    let provides = provides.flat_map(|all| all.split(", ").filter_map(|one| one.split(' ').next()));
    Some(Listed {
        exact: exact.collect(),
        provides: provides.map(str::to_owned).collect(),
        name: name.to_owned(),
        version: version.to_owned(),
        source: source.to_owned(),
        source_version: source_version.to_owned(),
        architecture: architecture.to_owned(),
        for_all: field("Architecture") == Some("all"),
        suite: suite.to_owned(),
    })
}

/// `NAME (= VERSION)`, or `NAME:any (= VERSION)`, without alternative.
fn exact(relation: &str) -> Option<(String, String)> {
    let (name, version) = relation.split_once(" (= ")?;
    let version = version.strip_suffix(')')?;
    let name = name.split(':').next().unwrap_or(name);
    let is_one = !relation.contains('|');
    is_one.then(|| (name.to_owned(), version.to_owned()))
}

/// The first error that apt printed.
fn first_error(text: &str) -> &str {
    let mut lines = text.lines();
    let error = lines.find_map(|line| line.strip_prefix("E: "));
    error.unwrap_or("apt-get named no error").trim()
}

/// The packages that can't be installed and why, of apt's output, else its first error.
fn unmet(text: &str) -> String {
    let lines = text.lines();
    let relations = ["Depends: ", "PreDepends: ", "Breaks: ", "Conflicts: "];
    let lines = lines.filter(|line| relations.iter().any(|word| line.contains(word)));
    let lines: Vec<String> = lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    match lines.is_empty() {
        true => first_error(text).to_owned(),
        false => lines.join("; "),
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a list's paragraph is read with its source package; what apt can't install is one
    //! line.
    use super::*;

    #[test]
    fn a_paragraph_names_its_source() {
        let text = "Package: bpftool\nSource: linux (7.3.4-1~bpo13+1)\n\
                    Version: 7.8.0+7.3.4-1~bpo13+1\nArchitecture: amd64\n";
        let listed = parse(text, "trixie-backports", "amd64").unwrap();
        assert_eq!(listed.source, "linux");
        assert_eq!(listed.source_version, "7.3.4-1~bpo13+1");
        assert_eq!(listed.version, "7.8.0+7.3.4-1~bpo13+1");
        let listed = parse(
            "Package: make\nVersion: 4.4\nArchitecture: all\n",
            "trixie",
            "arm64",
        );
        let listed = listed.unwrap();
        assert_eq!((&*listed.source, &*listed.source_version), ("make", "4.4"));
        assert!(listed.for_all);
        assert_eq!(parse("\n", "trixie", "arm64"), None);
    }

    #[test]
    fn a_paragraph_names_what_it_needs_in_one_version() {
        let text = "Package: linux-headers\nVersion: 1\nArchitecture: arm64\n\
                    Pre-Depends: dpkg (>= 1)\nProvides: headers (= 1), other\n\
                    Depends: gcc, common:any (= 1-2), a (= 1) | b, kbuild (>= 1)\n";
        let listed = parse(text, "trixie", "arm64").unwrap();
        assert_eq!(listed.exact, [("common".to_owned(), "1-2".to_owned())]);
        assert_eq!(listed.provides, ["headers", "other"]);
    }

    #[test]
    fn what_cannot_be_installed_is_one_line() {
        let text = "The following packages have unmet dependencies:\n \
                    a : Depends: b (= 2)\n     Breaks: c (< 1)\nE: Unable to correct problems\n";
        assert_eq!(unmet(text), "a : Depends: b (= 2); Breaks: c (< 1)");
        assert_eq!(
            unmet("E: Unable to locate package a\n"),
            "Unable to locate package a"
        );
    }
}
