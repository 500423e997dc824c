// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which versions the lab takes of a moving archive.
//!
//! Backports come before stable. They are built for each architecture by itself, so that for hours or
//! days one architecture has a version that the other lacks; libraries of both exclude one another
//! then. What is for all architectures is built by itself, too, and packages depend on it in their own
//! version. So of each source package that backports have for both, the lab takes the newest version
//! that is whole for both, else stable's, which is in step because it is released at once.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::process::Command;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::archive::{ARCHITECTURES, Archive, Listed, of};

/// Source packages that are taken from stable whatever backports have: the product builds with the
/// Rust of Debian stable.
const STABLE: [&str; 1] = ["rustc"];

/// What boots the guest for x86-64.
const X86_EMULATOR: &str = "qemu-system-x86:amd64";

/// A suite, as a code name; its backports have this end.
const BACKPORTS: &str = "-backports";

/// What the lab does without if the archive lacks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RootPart {
    /// The kernel with PREEMPT_RT.
    RtKernel,
    /// The guest for x86-64, of the guest driver's tests.
    X86Guest,
    /// Stable's own kernel, which has no uclamp.
    OldKernel,
    /// The modules of the kernel for x86-64, which its hosts need.
    X86Host,
    /// The kernel for x86-64 with PREEMPT_RT.
    X86Rt,
}

/// Packages (`NAME:ARCHITECTURE`) whose versions have to agree.
#[derive(Debug, Clone, Default)]
pub struct WantedPackages {
    /// Without them nothing can be set up.
    pub by_all: Vec<String>,
    /// What only tests need, installed beside those.
    pub by_tests: Vec<String>,
    /// What only tests need, unpacked with all that it depends on where nothing is: programs for arm64.
    pub unpacked: Vec<String>,
}

impl WantedPackages {
    fn all(&self) -> impl Iterator<Item = &str> {
        let packages = self.by_all.iter().chain(&self.by_tests);
        packages.chain(&self.unpacked).map(String::as_str)
    }
}

/// What is taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Apt's preferences.
    pub preferences: String,
    /// The kernel without architecture: `7.3.4+deb13`.
    pub kernel: String,
    /// Stable's.
    pub old_kernel: Option<String>,
    /// What can't agree, and what is taken instead: a line each.
    pub differences: Vec<String>,
    /// Why a part isn't there.
    pub lacks: BTreeMap<RootPart, String>,
    /// Why a package that only tests need isn't there: what needs it is skipped.
    #[serde(default)]
    pub absent: BTreeMap<String, String>,
}

impl Choice {
    /// Decides for these packages (`NAME:ARCHITECTURE`) and the kernels. The error names what the
    /// archive lacks of those that everything needs.
    pub fn of(archive: &Archive, suite: &str, wanted: &WantedPackages) -> Result<Self> {
        let mut choice = Self {
            preferences: String::new(),
            kernel: String::new(),
            old_kernel: None,
            differences: Vec::new(),
            lacks: BTreeMap::new(),
            absent: BTreeMap::new(),
        };
        let backports = format!("{suite}{BACKPORTS}");
        let mut lists = Lists::sorted(archive, (suite, &backports), wanted);
        lists.agreed = choice.pin(&lists)?;
        choice.preferences += &record("*", &format!("release n={backports}"), 600);
        choice.kernels(&lists)?;
        let source = choice.source_package();
        let of_tests = wanted.by_tests.iter().chain(&wanted.unpacked);
        for package in of_tests.chain([&source]) {
            if lists.named(package).is_empty() {
                choice.leave_out(package, &format!("{suite} and {backports} lack it"));
            }
        }
        if let Some([other, kernel]) = lists.apart(&choice.kernel) {
            let why = format!("{backports} has it in {other} and Linux for arm64 in {kernel}");
            choice.leave_out(&source, &why);
        }
        Ok(choice)
    }

    /// Leaves out what apt can't install for the tests. `installed` is what every run installs.
    pub fn solve_tests(
        &mut self,
        archive: &Archive,
        mut installed: Vec<String>,
        wanted: &WantedPackages,
    ) {
        let of_tests = [wanted.by_tests.clone(), vec![self.source_package()]].concat();
        let of_tests = self.present(of_tests);
        for (package, why) in archive.unsolved(&mut installed, of_tests, "amd64") {
            self.leave_out(&package, &why);
        }
        let with_rt = [installed, self.rt_packages()].concat();
        if let Err(why) = archive.solve(&with_rt) {
            let why = format!("no kernel with PREEMPT_RT for arm64: {why}");
            self.differences.push(why.clone());
            self.lacks.insert(RootPart::RtKernel, why);
        }
        let programs = self.present(wanted.unpacked.clone());
        for (package, why) in archive.unsolved(&mut Vec::new(), programs, "arm64") {
            self.leave_out(&package, &why);
        }
    }

    fn leave_out(&mut self, package: &str, why: &str) {
        let why = format!("{package}: {why}");
        if package == X86_EMULATOR {
            self.lacks.insert(RootPart::X86Guest, why.clone());
        }
        let line = format!("{why}; tests that need it are skipped");
        self.differences.push(line);
        self.absent.insert(package.to_owned(), why);
    }

    /// Those of these packages that aren't left out.
    pub fn present(&self, mut packages: Vec<String>) -> Vec<String> {
        packages.retain(|package| !self.absent.contains_key(package));
        packages
    }

    /// The package of the kernel's source: bindings, checkpatch and the kernel's own driver.
    pub fn source_package(&self) -> String {
        source_package(&self.kernel)
    }

    /// The packages of the kernel that the lab boots, and of its headers.
    pub fn kernel_packages(&self) -> Vec<String> {
        names(ARM64_KERNEL, &self.kernel, "arm64")
    }

    /// The same with PREEMPT_RT.
    pub fn rt_packages(&self) -> Vec<String> {
        let lacks = self.lacks.contains_key(&RootPart::RtKernel);
        match lacks {
            true => Vec::new(),
            false => names(RT_KERNEL, &self.kernel, "arm64"),
        }
    }

    /// Stable's own kernel.
    pub fn old_packages(&self) -> Vec<String> {
        let release = self.old_kernel.iter();
        release
            .flat_map(|release| names(ARM64_KERNEL, release, "arm64"))
            .collect()
    }

    /// The kernel for x86-64, of the same version.
    pub fn x86_packages(&self) -> Vec<String> {
        match self.lacks.contains_key(&RootPart::X86Guest) {
            true => Vec::new(),
            false => names(X86_KERNEL, &self.kernel, "amd64"),
        }
    }

    /// Decides on each source package; the versions of those whose newest isn't taken.
    fn pin<'a>(&mut self, lists: &Lists<'a>) -> Result<BTreeMap<&'a str, Option<&'a str>>> {
        let mut all_agreed = BTreeMap::new();
        for (source, built) in lists.sources() {
            if STABLE.contains(&source) {
                self.preferences += &lists.without(&built);
                continue;
            }
            let newest = ARCHITECTURES.map(|architecture| built.newest(lists, architecture));
            // What only one architecture has needs no agreement. But if stable has it for both, the
            // other one may get stable's, by name or as a dependency.
            let of_one = newest.contains(&None)
                && !lists.both_want(&built)
                && !lists.stable_has_for_both(&built)
                && built.is_complete(lists, newest[0].or(newest[1]));
            if of_one || newest[0] == newest[1] && built.whole(lists, newest[0]) {
                continue;
            }
            let agreed = built.agreed(lists);
            all_agreed.insert(source, agreed);
            if let Some(version) = agreed {
                self.preferences += &built.pinned(version);
            }
            self.preferences += &lists.without(&built);
            let is_wanted = built.names().any(|name| lists.wants(name));
            if is_wanted {
                self.differences
                    .push(lists.difference(source, newest, agreed, &built)?);
            }
        }
        Ok(all_agreed)
    }

    fn kernels(&mut self, lists: &Lists<'_>) -> Result<()> {
        let releases = lists.releases(lists.backports, "arm64", "linux-image-");
        let has = |release: &str, (pattern, architecture): (&[&str], &str)| {
            lists.has_all(&names(pattern, release, architecture))
        };
        let boots = |release: &&String| {
            has(release, (ARM64_KERNEL, "arm64")) && has(release, (KBUILD, "amd64"))
        };
        let whole = |release: &&String| {
            let in_step = lists.apart(release).is_none();
            in_step && PARTS.iter().all(|(_, part, _)| has(release, *part))
        };
        let mut bootable = releases.iter().filter(boots);
        let newest = bootable.clone().next();
        let Some(kernel) = bootable.find(whole).or(newest) else {
            let amd64 = lists.releases(lists.backports, "amd64", "linux-headers-");
            let newest = [&releases, &amd64].map(|all| all.first().map_or("none", String::as_str));
            bail!(
                "{} has no kernel for arm64 that is whole (image, headers, what these share, and their \
                 programs for amd64; newest for arm64: {}, for amd64: {}): try again later, or use \
                 another mirror",
                lists.backports,
                newest[0],
                newest[1]
            );
        };
        self.kernel.clone_from(kernel);
        for (part, packages, what) in PARTS {
            if !has(kernel, packages) {
                let newest = releases.iter().find(|release| has(release, packages));
                let newest = newest.map_or("none", String::as_str);
                let why = format!(
                    "{} has Linux {kernel} for arm64, {what} {newest}",
                    lists.backports
                );
                self.lacks.insert(part, why);
            }
        }
        let amd64 = lists.releases(lists.backports, "amd64", "linux-headers-");
        let newest = [&amd64, &releases].map(|all| all.first().map_or("none", String::as_str));
        if newest.iter().any(|release| release != kernel) {
            self.differences.push(format!(
                "linux: {} has {} for amd64 and {} for arm64; taken: {kernel}",
                lists.backports, newest[0], newest[1]
            ));
        }
        let old = lists.releases(lists.suite, "arm64", "linux-image-");
        self.old_kernel = old.iter().find(boots).cloned();
        if self.old_kernel.is_none() {
            let why = format!("{} has no kernel for arm64 that is whole", lists.suite);
            self.lacks.insert(RootPart::OldKernel, why);
        }
        self.differences.extend(self.lacks.values().cloned());
        Ok(())
    }
}

/// With the release in the place of `{}`.
const ARM64_KERNEL: &[&str] = &["linux-image-{}-arm64", "linux-headers-{}-arm64"];
const RT_KERNEL: &[&str] = &["linux-image-{}-rt-arm64", "linux-headers-{}-rt-arm64"];
const X86_KERNEL: &[&str] = &["linux-binary-{}-amd64", "linux-headers-{}-amd64"];
const X86_MODULES: &[&str] = &["linux-modules-{}-amd64"];
const X86_RT: &[&str] = &[
    "linux-binary-{}-rt-amd64",
    "linux-headers-{}-rt-amd64",
    "linux-modules-{}-rt-amd64",
];
/// The headers' own programs, which run here.
const KBUILD: &[&str] = &["linux-kbuild-{}"];

/// What a kernel may be without: its packages and their architecture, and what they are called.
type KernelPart = (
    RootPart,
    (&'static [&'static str], &'static str),
    &'static str,
);
const PARTS: [KernelPart; 4] = [
    (
        RootPart::RtKernel,
        (RT_KERNEL, "arm64"),
        "with PREEMPT_RT for arm64",
    ),
    (RootPart::X86Guest, (X86_KERNEL, "amd64"), "for amd64"),
    (
        RootPart::X86Host,
        (X86_MODULES, "amd64"),
        "with modules for amd64",
    ),
    (
        RootPart::X86Rt,
        (X86_RT, "amd64"),
        "with PREEMPT_RT for amd64",
    ),
];

/// The packages with the modules of the kernel for x86-64 of this release.
pub fn x86_modules(release: &str) -> Vec<String> {
    names(X86_MODULES, release, "amd64")
}

/// The packages of the one with PREEMPT_RT.
pub fn x86_rt(release: &str) -> Vec<String> {
    names(X86_RT, release, "amd64")
}

fn source_package(release: &str) -> String {
    let mut numbers = release.split('.');
    let (first, second) = (numbers.next(), numbers.next());
    let [first, second] = [first, second].map(Option::unwrap_or_default);
    of(&format!("linux-source-{first}.{second}"), "amd64")
}

fn names(patterns: &[&str], release: &str, architecture: &str) -> Vec<String> {
    let names = patterns
        .iter()
        .map(|pattern| pattern.replace("{}", release));
    names.map(|name| of(&name, architecture)).collect()
}

/// All packages of both suites, and those that are wanted.
struct Lists<'a> {
    listed: &'a [Listed],
    suite: &'a str,
    backports: &'a str,
    wanted: BTreeSet<&'a str>,
    needed: BTreeSet<&'a str>,
    /// The packages by `NAME:ARCHITECTURE`, with that of the list.
    by_name: HashMap<String, Vec<&'a Listed>>,
    /// Name and architecture of what packages stand for.
    provided: HashSet<[&'a str; 2]>,
    /// The version of backports, if any, that is taken of a source package whose newest isn't.
    agreed: BTreeMap<&'a str, Option<&'a str>>,
}

impl<'a> Lists<'a> {
    fn sorted(
        archive: &'a Archive,
        (suite, backports): (&'a str, &'a str),
        wanted: &'a WantedPackages,
    ) -> Self {
        let listed = archive.listed.iter();
        let provided = listed.clone().flat_map(|one| {
            let names = one.provides.iter();
            names.map(|name| [&**name, &one.architecture])
        });
        let provided = provided.collect();
        let mut by_name: HashMap<_, Vec<_>> = HashMap::new();
        for one in listed {
            let name = of(&one.name, &one.architecture);
            by_name.entry(name).or_default().push(one);
        }
        Self {
            listed: &archive.listed,
            suite,
            backports,
            wanted: wanted.all().collect(),
            needed: wanted.by_all.iter().map(String::as_str).collect(),
            by_name,
            provided,
            agreed: BTreeMap::new(),
        }
    }

    /// What backports have of each source package that isn't for all architectures alone.
    fn sources(&self) -> BTreeMap<&'a str, Built<'a>> {
        let mut sources: BTreeMap<&str, Built<'a>> = BTreeMap::new();
        let listed = self.listed.iter();
        for one in listed.filter(|one| one.suite == self.backports) {
            let built = sources.entry(&one.source).or_default();
            match one.for_all {
                true => built.for_all.push(one),
                false => built.packages.push(one),
            }
        }
        sources.retain(|_, built| !built.packages.is_empty());
        sources
    }

    /// Whether all that a package depends on in one version is there in that.
    fn is_complete(&self, one: &Listed) -> bool {
        one.exact.iter().all(|(name, version)| {
            let found = self.named(&of(name, &one.architecture));
            let mut versions = found.iter().map(|other| &other.version);
            let name = [&**name, &one.architecture];
            versions.any(|other| other == version) || self.provided.contains(&name)
        })
    }

    fn named(&self, package: &str) -> &[&'a Listed] {
        self.by_name.get(package).map_or(&[], Vec::as_slice)
    }

    /// Whether the preferences leave this one.
    fn is_left(&self, one: &Listed) -> bool {
        let agreed = self.agreed.get(&*one.source);
        let is_agreed = |agreed: &Option<&str>| *agreed == Some(&*one.source_version);
        one.suite != self.backports || agreed.is_none_or(is_agreed)
    }

    fn wants(&self, name: &str) -> bool {
        ARCHITECTURES
            .iter()
            .any(|architecture| self.wants_for(name, architecture))
    }

    fn wants_for(&self, name: &str, architecture: &str) -> bool {
        self.wanted.contains(&*of(name, architecture))
    }

    fn both_want(&self, built: &Built<'_>) -> bool {
        let wanted = |architecture: &str| {
            let mut names = built.names();
            names.any(|name| self.wants_for(name, architecture))
        };
        ARCHITECTURES.into_iter().all(wanted)
    }

    fn stable_has_for_both(&self, built: &Built<'_>) -> bool {
        let names: BTreeSet<&str> = built.names().collect();
        let of_stable = self.listed.iter();
        let of_stable =
            of_stable.filter(|one| one.suite == self.suite && names.contains(&*one.name));
        let has: BTreeSet<&str> = of_stable.map(|one| &*one.architecture).collect();
        has.len() == ARCHITECTURES.len()
    }

    fn has_all(&self, packages: &[String]) -> bool {
        let has = |one: &&Listed| self.is_left(one) && self.is_complete(one);
        let mut packages = packages.iter();
        packages.all(|package| self.named(package).iter().any(has))
    }

    /// The newest version of a package in backports, as far as the preferences leave it.
    fn newest(&self, package: &str) -> Option<&'a str> {
        let all = self.named(package).iter();
        let left = all.filter(|one| one.suite == self.backports && self.is_left(one));
        left.map(|one| &*one.version).max_by(|a, b| compare(a, b))
    }

    /// The versions of the kernel's source and of a kernel, if they differ.
    fn apart(&self, release: &str) -> Option<[&'a str; 2]> {
        let source = self.newest(&source_package(release))?;
        let headers = names(ARM64_KERNEL, release, "arm64").pop();
        let kernel = self.newest(&headers?)?;
        (source != kernel).then_some([source, kernel])
    }

    /// Releases of the kernels of which a suite has a package of this name, the newest first.
    fn releases(&self, suite: &str, architecture: &str, package: &str) -> Vec<String> {
        let flavor = format!("-{architecture}");
        let listed = self.listed.iter();
        let listed = listed.filter(|one| one.suite == suite && one.architecture == architecture);
        let releases = listed.filter_map(|one| {
            let release = one.name.strip_prefix(package)?.strip_suffix(&*flavor)?;
            // Other flavors have a word more; the unversioned package has no number.
            let plain = !release.contains('-') && release.starts_with(|c: char| c.is_ascii_digit());
            plain.then(|| release.to_owned())
        });
        let releases: BTreeSet<String> = releases.collect();
        let mut releases: Vec<String> = releases.into_iter().collect();
        releases.sort_by(|a, b| compare(b, a));
        releases
    }

    /// None of backports' versions but those that an earlier record names.
    fn without(&self, built: &Built<'_>) -> String {
        let packages = built.all().map(|one| of(&one.name, &one.architecture));
        record(
            &joined(packages),
            &format!("release n={}", self.backports),
            -1,
        )
    }

    /// Why a source package isn't taken in backports' newest version, and what is.
    fn difference(
        &self,
        source: &str,
        newest: [Option<&str>; 2],
        agreed: Option<&str>,
        built: &Built<'_>,
    ) -> Result<String> {
        let [first, second] = newest.map(|version| version.unwrap_or("none"));
        let for_all = built.for_all.iter().map(|one| &*one.source_version);
        let for_all = for_all.max_by(|a, b| compare(a, b));
        let differ = match first == second {
            true if for_all.is_some_and(|version| version != first) => format!(
                "{source}: {} has {first} for amd64 and arm64, and {} of what is for all",
                self.backports,
                for_all.unwrap_or_default()
            ),
            // A rebuild for one of them, or a package that only one has.
            true => format!(
                "{source}: {} has {first}, not whole for both",
                self.backports
            ),
            false => format!(
                "{source}: {} has {first} for amd64 and {second} for arm64",
                self.backports
            ),
        };
        if let Some(version) = agreed {
            return Ok(format!("{differ}; taken: {version}, which both have"));
        }
        let mut stable = None;
        for name in built.names() {
            for architecture in ARCHITECTURES {
                if !self.wants_for(name, architecture) {
                    continue;
                }
                let mut listed = self.listed.iter().filter(|one| one.suite == self.suite);
                let found = listed.find(|one| one.name == name && one.architecture == architecture);
                let lacks = format!(
                    "{differ}, and {} has no {name} for {architecture}",
                    self.suite
                );
                match found {
                    Some(found) => stable = Some(&found.source_version),
                    None if self.needed.contains(&*of(name, architecture)) => {
                        bail!("{lacks}: try again later, or use another mirror")
                    }
                    None => return Ok(lacks),
                }
            }
        }
        let stable = stable.map_or("none", String::as_str);
        Ok(format!("{differ}; taken: {stable} of {}", self.suite))
    }
}

/// What backports have of a source package.
#[derive(Debug, Default)]
struct Built<'a> {
    /// Of one architecture.
    packages: Vec<&'a Listed>,
    /// Of all, in the list of each.
    for_all: Vec<&'a Listed>,
}

impl<'a> Built<'a> {
    fn all(&self) -> impl Iterator<Item = &'a Listed> {
        self.packages.iter().chain(&self.for_all).copied()
    }

    fn names(&self) -> impl Iterator<Item = &'a str> {
        let names: BTreeSet<&str> = self.packages.iter().map(|one| &*one.name).collect();
        names.into_iter()
    }

    fn of(&self, version: &str, architecture: &str) -> BTreeMap<&'a str, &'a str> {
        let packages = self.packages.iter();
        let packages = packages
            .filter(|one| one.source_version == version && one.architecture == architecture);
        packages.map(|one| (&*one.name, &*one.version)).collect()
    }

    /// The newest version that has all that is wanted for an architecture.
    fn newest(&self, lists: &Lists<'_>, architecture: &str) -> Option<&'a str> {
        let versions = self.versions().into_iter();
        let mut versions = versions.filter(|version| {
            let packages = self.of(version, architecture);
            let mut wanted = self
                .names()
                .filter(|name| lists.wants_for(name, architecture));
            !packages.is_empty() && wanted.all(|name| packages.contains_key(name))
        });
        versions.next()
    }

    /// Whether this version is there for both architectures, with what its packages depend on for all,
    /// and the packages that both have are of one version: a rebuild changes a package's, not the
    /// source's.
    fn whole(&self, lists: &Lists<'_>, version: Option<&str>) -> bool {
        let Some(version) = version else {
            return false;
        };
        let [first, second] = ARCHITECTURES.map(|architecture| self.of(version, architecture));
        let same = first
            .iter()
            .all(|(name, version)| second.get(name).is_none_or(|other| other == version));
        let wanted = ARCHITECTURES
            .iter()
            .zip([&first, &second])
            .all(|(architecture, packages)| {
                let mut wanted = self
                    .names()
                    .filter(|name| lists.wants_for(name, architecture));
                wanted.all(|name| packages.contains_key(name))
            });
        let complete = self.is_complete(lists, Some(version));
        same && wanted && complete && !first.is_empty() && !second.is_empty()
    }

    /// Whether all that packages of this version depend on in one version is there.
    fn is_complete(&self, lists: &Lists<'_>, version: Option<&str>) -> bool {
        let packages = self.packages.iter();
        let mut of_version = packages.filter(|one| Some(&*one.source_version) == version);
        of_version.all(|one| lists.is_complete(one))
    }

    /// The newest version that is whole.
    fn agreed(&self, lists: &Lists<'_>) -> Option<&'a str> {
        let mut versions = self.versions().into_iter();
        versions.find(|version| self.whole(lists, Some(version)))
    }

    /// The newest first.
    fn versions(&self) -> Vec<&'a str> {
        let versions: BTreeSet<&str> = self
            .packages
            .iter()
            .map(|one| &*one.source_version)
            .collect();
        let mut versions: Vec<&str> = versions.into_iter().collect();
        versions.sort_by(|a, b| compare(b, a));
        versions
    }

    /// Preferences that take this version.
    fn pinned(&self, version: &str) -> String {
        let mut pins: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for one in self.all().filter(|one| one.source_version == version) {
            let package = of(&one.name, &one.architecture);
            pins.entry(&one.version).or_default().push(package);
        }
        let records = pins.into_iter().map(|(version, packages)| {
            record(&joined(packages), &format!("version {version}"), 700)
        });
        records.collect()
    }
}

fn joined(packages: impl IntoIterator<Item = String>) -> String {
    let packages: BTreeSet<String> = packages.into_iter().collect();
    packages.into_iter().collect::<Vec<_>>().join(" ")
}

/// A record of apt_preferences(5). The first one that fits a version decides.
fn record(packages: &str, pin: &str, priority: i32) -> String {
    format!("Package: {packages}\nPin: {pin}\nPin-Priority: {priority}\n\n")
}

/// The order of Debian's versions, by dpkg itself.
fn compare(a: &str, b: &str) -> Ordering {
    let is = |relation: &str| {
        let status = Command::new("dpkg")
            .args(["--compare-versions", a, relation, b])
            .status();
        status.is_ok_and(|status| status.success())
    };
    match () {
        () if a == b => Ordering::Equal,
        () if is("lt") => Ordering::Less,
        () => Ordering::Greater,
    }
}

#[cfg(test)]
mod tests;
