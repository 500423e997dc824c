// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A made-up archive of dummy packages in a folder, which the real apt reads: for tests.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::archive::ARCHITECTURES;
use crate::child_output::quietly;
use crate::choice::WantedPackages;

pub const SUITES: [&str; 2] = ["trixie", "trixie-backports"];
/// Its kernel.
pub const KERNEL: &str = "7.3.4+deb13";

/// A dummy package: suite, name, version, architecture, fields beside these.
pub type Dummy = (usize, String, &'static str, &'static str, String);

/// An archive in a folder that is removed with it.
pub struct MadeUp {
    pub dir: PathBuf,
    pub dummies: Vec<Dummy>,
    pub wanted: WantedPackages,
}

impl MadeUp {
    /// One with a whole kernel, and a library of version 1 in stable.
    pub fn new(name: &str) -> Self {
        let name = format!("vcpufreq-archive-{name}-{}", std::process::id());
        let mut archive = Self {
            dir: std::env::temp_dir().join(name),
            dummies: Vec::new(),
            wanted: WantedPackages {
                by_all: libraries(),
                by_tests: Vec::new(),
                unpacked: Vec::new(),
            },
        };
        archive.kernel(1, KERNEL, "7.3.4-1", &ARCHITECTURES);
        archive.library(0, "1", &ARCHITECTURES);
        archive
    }

    pub fn add(
        &mut self,
        suite: usize,
        name: &str,
        version: &'static str,
        architecture: &'static str,
    ) {
        let dummy = (suite, name.to_owned(), version, architecture, String::new());
        self.dummies.push(dummy);
    }

    /// A library as Rust's: of both architectures at once only in one version.
    pub fn library(&mut self, suite: usize, version: &'static str, architectures: &[&'static str]) {
        for architecture in architectures {
            let other = match *architecture {
                "amd64" => "arm64",
                _ => "amd64",
            };
            let fields = format!(
                "Source: rusty\nMulti-Arch: same\n\
                 Breaks: libdummy:{other} (<< {version}), libdummy:{other} (>> {version})\n"
            );
            let dummy = (suite, "libdummy".to_owned(), version, *architecture, fields);
            self.dummies.push(dummy);
        }
    }

    /// The packages of a kernel for these architectures; headers' programs are amd64's always, and
    /// its source is for all.
    pub fn kernel(
        &mut self,
        suite: usize,
        release: &str,
        version: &'static str,
        architectures: &[&'static str],
    ) {
        let common = format!("linux-headers-{release}-common");
        let needs_common = format!("Depends: {common} (= {version})\n");
        self.of_kernel(suite, &common, version, ("all", "Multi-Arch: foreign\n"));
        let kbuild = format!("linux-kbuild-{release}");
        self.of_kernel(suite, &kbuild, version, ("amd64", ""));
        let numbers: Vec<&str> = release.splitn(3, '.').collect();
        let source = format!("linux-source-{}.{}", numbers[0], numbers[1]);
        self.of_kernel(suite, &source, version, ("all", ""));
        for (name, architecture) in [
            ("linux-image-{}-arm64", "arm64"),
            ("linux-headers-{}-arm64", "arm64"),
            ("linux-image-{}-rt-arm64", "arm64"),
            ("linux-headers-{}-rt-arm64", "arm64"),
            ("linux-binary-{}-amd64", "amd64"),
            ("linux-headers-{}-amd64", "amd64"),
            ("linux-modules-{}-amd64", "amd64"),
            ("linux-binary-{}-rt-amd64", "amd64"),
            ("linux-headers-{}-rt-amd64", "amd64"),
            ("linux-modules-{}-rt-amd64", "amd64"),
        ] {
            if architectures.contains(&architecture) {
                let fields = match name.starts_with("linux-headers") {
                    true => &needs_common,
                    false => "",
                };
                let name = name.replace("{}", release);
                self.of_kernel(suite, &name, version, (architecture, fields));
            }
        }
    }

    fn of_kernel(
        &mut self,
        suite: usize,
        name: &str,
        version: &'static str,
        (architecture, fields): (&'static str, &str),
    ) {
        let fields = format!("Source: linux\n{fields}");
        let dummy = (suite, name.to_owned(), version, architecture, fields);
        self.dummies.push(dummy);
    }

    /// Has the library of this version depend on its data in that, and adds that for all architectures.
    pub fn data(&mut self, suite: usize, version: &'static str, of_data: &'static str) {
        for one in &mut self.dummies {
            if one.0 == suite && one.1 == "libdummy" && one.2 == version {
                one.4 += &format!("Depends: dummy-data (= {version})\n");
            }
        }
        let fields = "Source: rusty\nMulti-Arch: foreign\n".to_owned();
        let data = (suite, "dummy-data".to_owned(), of_data, "all", fields);
        self.dummies.push(data);
    }

    /// Writes packages and lists; its [`Self::sources`].
    pub fn write(&self) -> Vec<String> {
        let _ = fs::remove_dir_all(self.dir.join("dists"));
        for (number, suite) in SUITES.iter().enumerate() {
            let mut sums = String::new();
            for architecture in ARCHITECTURES {
                let folder = format!("main/binary-{architecture}");
                let place = self.dir.join("dists").join(suite).join(&folder);
                fs::create_dir_all(&place).unwrap();
                let of_list = self.dummies.iter();
                let of_list =
                    of_list.filter(|one| one.0 == number && [architecture, "all"].contains(&one.3));
                let list: String = of_list.map(|one| self.package(one)).collect();
                fs::write(place.join("Packages"), &list).unwrap();
                let sum = hex(list.as_bytes());
                writeln!(sums, " {sum} {} {folder}/Packages", list.len()).unwrap();
            }
            let release = format!(
                "Origin: made up\nSuite: {suite}\nCodename: {suite}\nComponents: main\n\
                 Architectures: amd64 arm64\nSHA256:\n{sums}"
            );
            let place = self.dir.join("dists").join(suite).join("Release");
            fs::write(place, release).unwrap();
        }
        self.sources()
    }

    /// Lines of a sources.list for it.
    pub fn sources(&self) -> Vec<String> {
        let place = self.dir.display();
        let lines = SUITES.map(|suite| format!("deb [trusted=yes] copy:{place} {suite} main"));
        lines.into()
    }

    /// Makes a package, and its paragraph of the list.
    fn package(&self, (_, name, version, architecture, fields): &Dummy) -> String {
        let control = format!(
            "Package: {name}\nVersion: {version}\nArchitecture: {architecture}\n\
             Maintainer: a <a@a.invalid>\nDescription: dummy\n{fields}"
        );
        let file = format!("{name}_{version}_{architecture}.deb");
        let place = self.dir.join(&file);
        if !place.exists() {
            let tree = self.dir.join("tree");
            fs::create_dir_all(tree.join("DEBIAN")).unwrap();
            fs::write(tree.join("DEBIAN/control"), &control).unwrap();
            let mut build = Command::new("dpkg-deb");
            build.args(["--build", "--root-owner-group", "-Znone"]);
            quietly(build.arg(&tree).arg(&place), "dpkg-deb").unwrap();
        }
        let bytes = fs::read(&place).unwrap();
        let sum = hex(&bytes);
        format!(
            "{control}Filename: {file}\nSize: {}\nSHA256: {sum}\n\n",
            bytes.len()
        )
    }
}

impl Drop for MadeUp {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(bytes) {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

/// The library, of both architectures.
pub fn libraries() -> Vec<String> {
    ["libdummy:amd64", "libdummy:arm64"]
        .map(str::to_owned)
        .into()
}

/// Whether this machine has apt; says so if not.
pub fn has_tools() -> bool {
    let found = ["apt-get", "dpkg-deb"].iter().all(|tool| {
        let found = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&found).any(|folder: PathBuf| folder.join(tool).exists())
    });
    if !found {
        eprintln!("SKIP: no apt here");
    }
    found
}
