// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make packages`: Debian's packages of this checkout, by dpkg-buildpackage in the toolchain root,
//! and archives of the same files for machines without Debian's package manager.
//!
//! It builds a copy of the checkout, in a place that is the same for each checkout and user as
//! seen from inside the root: packages of one commit are the same to the byte. What cargo makes
//! stays there for the next time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::arch::Arch;
use crate::cache::{Cache, remove_tree};
use crate::child_output::{self, quietly};
use crate::cross;
use crate::debian_check;
use crate::install_check;
use crate::progress::{Step, above};
use crate::publish;
use crate::root::Root;
use crate::supply;
use crate::tree::RootUse;
use crate::verdict::{Counts, TestResult, Verdict, tell};

/// Measured, in MiB.
const NEEDED_MIB: u64 = 1_600;

/// Debian's name of an architecture, and what is built for it.
const BUILDS: [(&str, &str); 2] = [("arm64", "--build=any,all"), ("amd64", "--build=any")];

/// From the unpacked packages to an archive; the same input gives the same bytes.
const ARCHIVE: &str = r#"
    set -e
    packages=$1 name=$2 program=$3 modules=$4
    cd "$packages"
    date=$(dpkg-parsechangelog --file source/debian/changelog --show-field Timestamp)
    mkdir -p "/tmp/$name"
    dpkg-deb --extract "$program" "/tmp/$name"
    dpkg-deb --extract "$modules" "/tmp/$name"
    rm -r "/tmp/$name/usr/share/lintian"
    doc=/tmp/$name/usr/share/doc/vcpufreq
    cp -r source/LICENSES "$doc/"
    # Debian's copyright files name texts that other distributions don't have there.
    texts=$(grep -o '/usr/share/common-licenses/[A-Z][A-Za-z]*-[0-9.]*[0-9]' "$doc/third-party-licences")
    for text in $texts; do
        [ ! -e "$text" ] || cp "$text" "$doc/LICENSES/"
    done
    # Without folders: those of the machine keep their modes, and stay links.
    (cd /tmp && find "$name" ! -type d -o -empty) | LC_ALL=C sort >"/tmp/$name.list"
    tar --create --file "/tmp/$name.tar" --directory /tmp --no-recursion --format=gnu \
        --mtime="@$date" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
        --files-from "/tmp/$name.list"
    xz --threads=1 --stdout "/tmp/$name.tar" >"$name.tar.xz"
"#;

/// The program is smaller than 10 MB, and its line tables are in the other package under its build ID.
/// The licences of what it is linked with are there. The program itself names each crate of
/// the list for programs, for `cargo audit bin`.
const CONTENTS: &str = r#"
    set -e
    packages=$1 program=$2 lines=$3
    at=$(mktemp -d)
    dpkg-deb --extract "$packages/$program" "$at"
    dpkg-deb --extract "$packages/$lines" "$at"
    size=$(stat --format=%s "$at/usr/bin/vcpufreq")
    id=$(readelf --notes "$at/usr/bin/vcpufreq" | sed -n 's/^ *Build ID: \(..\)/\1\//p')
    echo "$size bytes, build ID $id"
    [ "$size" -lt 10000000 ]
    readelf --sections --wide "$at/usr/lib/debug/.build-id/$id.debug" | grep ' \.debug_line '
    for part in 'libelf: ' 'glibc: ' 'libbpf-sys v' 'serde_json v'; do
        grep "^$part" "$at/usr/share/doc/vcpufreq/third-party-licences"
    done
    architecture=$(dpkg-deb --field "$packages/$program" Architecture)
    machine=$(dpkg-architecture --host-arch "$architecture" --query DEB_HOST_GNU_TYPE)
    "$machine-objcopy" --dump-section .dep-v0="$at/noted" "$at/usr/bin/vcpufreq" "$at/copy"
    perl -MCompress::Zlib -MJSON::PP -e '
        my ($noted, $list) = map { local (@ARGV, $/) = $_; <> } @ARGV;
        my %noted = map { ("$_->{name} $_->{version}" => 1) } @{decode_json(uncompress($noted))->{packages}};
        my @listed = grep { $_->{purl} =~ m{^pkg:cargo/} } @{decode_json($list)->{components}};
        my @missing = grep { !$noted{$_} } map { "$_->{name} $_->{version}" } @listed;
        print scalar @listed, " crates; not noted: @missing\n";
        exit 1 if @missing || @listed < 20;
    ' "$at/noted" "$at/usr/share/doc/vcpufreq/vcpufreq.cdx.json"
    rm -r "$at"
"#;

/// Version of cargo-auditable <https://github.com/rust-secure-code/cargo-auditable>.
const AUDITABLE: &str = "0.7.7";

/// Makes them in `out/packages`, has lintian look at them, installs and purges them in clean
/// Debian trees, and with `twice` builds them once more from nothing; whether all held. For a
/// `release` it makes none of crates with a known vulnerability, or that a registry would refuse.
pub fn make(repo: &Path, twice: bool, release: bool) -> Result<bool> {
    let cache = Cache::open()?;
    let mut tried = Vec::new();
    if release {
        tried.push(supply::release(&cache, repo)?);
        tried.extend(publish::release(&cache, repo)?);
        tried.iter().for_each(tell);
        let is_failure = |one: &TestResult| matches!(one.verdict, Verdict::Failed(_));
        if tried.iter().any(is_failure) {
            return Ok(false);
        }
    }
    let root = Root::prepare(&cache, repo, RootUse::Tests)?;
    root.require(&["debhelper:amd64", "dh-dkms:amd64", "lintian:amd64"])?;
    let crates = cross::crates(&cache, &root, repo)?;
    install_check::prepare(&cache)?;
    debian_check::prepare(&cache, &root, repo)?;
    let _lock = cache.lock("packages")?;
    cache.require_free(NEEDED_MIB)?;
    let place = cache.folder("packages", "tree")?;
    let auditable = supply::tool(&cache, "cargo-auditable", AUDITABLE)?;
    let builder = Builder {
        repo,
        root,
        place,
        auditable,
        crates,
    };
    builder.build()?;
    let lintian = builder.lintian()?;
    tell(&lintian);
    tried.push(lintian);
    let first = builder.collect()?;
    for one in builder.contents(&first)? {
        tell(&one);
        tried.push(one);
    }
    let packages = repo.join("out/packages");
    tried.extend(install_check::check(&cache, &packages)?);
    tried.extend(debian_check::check(&cache, &builder.root, repo, &packages)?);
    if twice || release {
        remove_tree(&builder.place.join("target"))?;
        builder.build()?;
        let same = same(&first, &builder.made()?);
        tell(&same);
        tried.push(same);
    }
    let counts = Counts::of(&tried);
    println!("{counts}");
    Ok(counts.failed == 0)
}

/// Tries the packages that are there on the emulated Debian of this architecture; whether all held.
pub fn only_try(repo: &Path, arch: Arch) -> Result<bool> {
    let cache = Cache::open()?;
    let root = Root::prepare(&cache, repo, RootUse::Tests)?;
    let packages = repo.join("out/packages");
    let counts = Counts::of(&debian_check::check_on(
        (&cache, &root),
        repo,
        arch,
        &packages,
    )?);
    println!("{counts}");
    Ok(counts.failed == 0)
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// One checkout's packages.
struct Builder<'a> {
    repo: &'a Path,
    root: Root,
    /// Where the copy of the sources, cargo's target folder and the packages are.
    place: PathBuf,
    /// The folder of cargo-auditable.
    auditable: PathBuf,
    /// The sources of all crates, as the root sees them.
    crates: String,
}

impl Builder<'_> {
    /// Packages and archives for each architecture, from a fresh copy of the sources.
    fn build(&self) -> Result<()> {
        let source = self.place.join("source");
        remove_tree(&source)?;
        for name in self.made()?.keys() {
            fs::remove_file(self.place.join(name))?;
        }
        copy(self.repo, &source)?;
        for (architecture, what) in BUILDS {
            let step = Step::start(format!("packages for {architecture}"));
            let mut command = self.dpkg_buildpackage(&source, architecture, what)?;
            let (built, text) = child_output::cargo(&mut command, &step)?;
            if !built {
                above(|| eprint!("{text}"));
                bail!("building the packages for {architecture} failed; its output is above");
            }
            step.done();
        }
        for (architecture, _) in BUILDS {
            self.archive(architecture)?;
        }
        Ok(())
    }

    fn dpkg_buildpackage(&self, source: &Path, architecture: &str, what: &str) -> Result<Command> {
        let target = self.root.inside(&self.place.join("target"))?;
        let auditable = self
            .root
            .inside(&self.auditable.join("bin/cargo-auditable"))?;
        let mut build = self.root.command("env");
        build
            .args(["-C", &self.root.inside(source)?])
            .args(cross::settings(&self.crates, &target))
            .args([
                "CARGO_NET_OFFLINE=true",
                &format!("CARGO_BUILD={auditable} auditable build"),
                "DEB_BUILD_OPTIONS=nocheck",
                "dpkg-buildpackage",
            ])
            // The cargo that compiles is none of Debian's: no package to depend on.
            .args(["--no-check-builddeps", "--no-sign", what])
            .args(["--host-arch", architecture]);
        Ok(build)
    }

    /// The files of the packages for an architecture, as one archive.
    fn archive(&self, architecture: &str) -> Result<()> {
        let version = version();
        let name = format!("vcpufreq-{version}-{architecture}");
        let packages = self.root.inside(&self.place)?;
        let program = format!("vcpufreq_{version}_{architecture}.deb");
        let modules = format!("vcpufreq-dkms_{version}_all.deb");
        let args = ["-c", ARCHIVE, "sh", &packages, &name, &program, &modules];
        self.root.run("making an archive", "sh", &args).map(drop)
    }

    fn lintian(&self) -> Result<TestResult> {
        let mut lintian = self.root.command("lintian");
        lintian.args(["--allow-root", "--fail-on", "error,warning"]);
        for (architecture, _) in BUILDS {
            let name = format!("vcpufreq_{}_{architecture}.changes", version());
            lintian.arg(self.root.inside(&self.place.join(name))?);
        }
        let (held, text) = child_output::output(&mut lintian)?;
        print!("{text}");
        let seen = || "errors or warnings are above".to_owned();
        Ok(TestResult::new("packages: lintian", held, seen))
    }

    /// All files were made, and the packages for each architecture have what they are for.
    fn contents(&self, made: &BTreeMap<String, Vec<u8>>) -> Result<Vec<TestResult>> {
        let mut tried = vec![complete(made)];
        let packages = self.root.inside(&self.place)?;
        for (architecture, _) in BUILDS {
            let file = |package: &str| format!("{package}_{}_{architecture}.deb", version());
            let mut check = self.root.command("sh");
            check.args(["-c", CONTENTS, "sh", &packages]);
            check.args([file("vcpufreq"), file("vcpufreq-dbgsym")]);
            let (held, text) = child_output::output(&mut check)?;
            let name = format!("{architecture}: below 10 MB, line tables apart, all parts listed");
            tried.push(TestResult::new(format!("packages: {name}"), held, || text));
        }
        Ok(tried)
    }

    /// What was made, by name.
    fn made(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        let of_packages = format!("_{}_", version());
        let of_archives = format!("-{}-", version());
        let mut made = BTreeMap::new();
        for file in fs::read_dir(&self.place)? {
            let name = file?.file_name().into_string().unwrap_or_default();
            let package = name.ends_with(".deb") && name.contains(&of_packages);
            if package || name.ends_with(".tar.xz") && name.contains(&of_archives) {
                let bytes = fs::read(self.place.join(&name))?;
                made.insert(name, bytes);
            }
        }
        Ok(made)
    }

    /// Puts what was made into `out/packages`, in the place of what is there.
    fn collect(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        let to = self.repo.join("out/packages");
        remove_tree(&to)?;
        fs::create_dir_all(&to)?;
        let made = self.made()?;
        for (name, bytes) in &made {
            fs::write(to.join(name), bytes)?;
            println!("out/packages/{name}: {} KiB", bytes.len() / 1024);
        }
        Ok(made)
    }
}

/// What a build has to make.
fn expected() -> BTreeSet<String> {
    let version = version();
    let of_each = BUILDS.iter().flat_map(|(architecture, _)| {
        [
            format!("vcpufreq_{version}_{architecture}.deb"),
            format!("vcpufreq-dbgsym_{version}_{architecture}.deb"),
            format!("vcpufreq-{version}-{architecture}.tar.xz"),
        ]
    });
    let modules = format!("vcpufreq-dkms_{version}_all.deb");
    of_each.chain([modules]).collect()
}

/// Whether all that, and no more, was made.
fn complete(made: &BTreeMap<String, Vec<u8>>) -> TestResult {
    let (expected, made) = (expected(), made.keys().cloned().collect());
    let name = format!("packages: the {} files are there", expected.len());
    let lack: Vec<_> = expected.difference(&made).map(String::as_str).collect();
    let more: Vec<_> = made.difference(&expected).map(String::as_str).collect();
    TestResult::new(name, lack.is_empty() && more.is_empty(), || {
        format!("missing: {}; besides: {}", lack.join(", "), more.join(", "))
    })
}

/// Whether two builds made the same files with the same bytes.
fn same(first: &BTreeMap<String, Vec<u8>>, second: &BTreeMap<String, Vec<u8>>) -> TestResult {
    let names = first.keys().chain(second.keys());
    let mut differ: Vec<&str> = names
        .filter(|name| first.get(*name) != second.get(*name))
        .map(String::as_str)
        .collect();
    differ.dedup();
    let name = format!("packages: two builds give the same {} files", first.len());
    TestResult::new(name, differ.is_empty() && !first.is_empty(), || {
        format!("these differ: {}", differ.join(", "))
    })
}

/// Copies what a commit of this checkout would have, and names what is in no commit yet.
fn copy(repo: &Path, to: &Path) -> Result<()> {
    let git = |args: &[&str]| {
        let mut git = Command::new("git");
        git.args(args).current_dir(repo);
        quietly(&mut git, "listing the files of this checkout")
    };
    let changed = git(&["status", "--porcelain"])?.lines().count();
    if changed > 0 {
        above(|| eprintln!("packages of no commit: {changed} files differ (git status)"));
    }
    let names = git(&[
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ])?;
    let mut copied = 0_usize;
    for name in names.split_terminator('\0') {
        copied += usize::from(copy_file(&repo.join(name), &to.join(name))?);
    }
    ensure!(copied > 0, "git lists no files in {}", repo.display());
    Ok(())
}

/// Copies a file with the mode that git gives it, whatever this user's umask is; false if it is
/// gone, as a removal that is in no commit yet leaves it.
fn copy_file(from: &Path, to: &Path) -> Result<bool> {
    if !from.is_file() {
        return Ok(false);
    }
    let failed = || format!("cannot copy {}", from.display());
    let runs = fs::metadata(from)
        .with_context(failed)?
        .permissions()
        .mode()
        & 0o100
        != 0;
    fs::create_dir_all(to.parent().context("a file's folder")?)?;
    fs::copy(from, to).with_context(failed)?;
    let mode = if runs { 0o755 } else { 0o644 };
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(failed)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    //! Promises: the source package names the cargo that it needs; an unclean checkout is packaged as
    //! it is, without what is gone or ignored, and with git's modes; files that differ, are missing
    //! or too many are named.
    use super::*;
    use crate::verdict::Verdict;

    #[test]
    fn the_source_package_needs_this_cargo() {
        let needs = concat!(" cargo:native (>= ", env!("CARGO_PKG_RUST_VERSION"), "),");
        let control = include_str!("../../debian/control");
        assert!(control.lines().any(|line| line == needs), "{needs}");
    }

    #[test]
    fn an_unclean_checkout_is_copied_as_it_is() {
        let dir = std::env::temp_dir().join(format!("vcpufreq-debs-{}", std::process::id()));
        let (repo, to) = (dir.join("repo"), dir.join("to"));
        fs::create_dir_all(&repo).unwrap();
        let git = |args: &[&str]| {
            let mut git = Command::new("git");
            quietly(git.args(args).current_dir(&repo), "git").unwrap()
        };
        git(&["init", "--quiet"]);
        for name in ["kept", "gone", ".gitignore"] {
            fs::write(repo.join(name), "ignored\n").unwrap();
        }
        git(&["add", "."]);
        fs::remove_file(repo.join("gone")).unwrap();
        for (name, mode) in [("new.sh", 0o775), ("new", 0o600), ("ignored", 0o644)] {
            fs::write(repo.join(name), "").unwrap();
            fs::set_permissions(repo.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        copy(&repo, &to).unwrap();
        let mode = |name: &str| {
            let found = fs::metadata(to.join(name)).ok()?;
            Some(found.permissions().mode() & 0o777)
        };
        assert_eq!(["gone", "ignored"].map(mode), [None, None]);
        let modes = ["kept", "new.sh", "new"].map(mode);
        assert_eq!(modes, [Some(0o644), Some(0o755), Some(0o644)]);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn missing_files_are_named() {
        let all = expected().into_iter().map(|name| (name, Vec::new()));
        let mut made: BTreeMap<String, Vec<u8>> = all.collect();
        assert_eq!(made.len(), 7);
        assert_eq!(complete(&made).verdict, Verdict::Passed);
        let gone = format!("vcpufreq-dbgsym_{}_arm64.deb", version());
        made.remove(&gone);
        made.insert("other.deb".to_owned(), Vec::new());
        let seen = format!("missing: {gone}; besides: other.deb");
        assert_eq!(complete(&made).verdict, Verdict::Failed(seen));
    }

    #[test]
    fn files_that_differ_are_named() {
        let of = |files: [(&str, &str); 2]| -> BTreeMap<String, Vec<u8>> {
            let files = files.map(|(name, text)| (name.to_owned(), text.into()));
            BTreeMap::from(files)
        };
        let first = of([("a", "1"), ("b", "1")]);
        assert_eq!(same(&first, &first).verdict, Verdict::Passed);
        for second in [of([("a", "1"), ("b", "2")]), of([("a", "1"), ("c", "1")])] {
            let Verdict::Failed(seen) = same(&first, &second).verdict else {
                panic!("they differ");
            };
            assert!(seen.starts_with("these differ: b"), "{seen}");
        }
        assert_ne!(
            same(&BTreeMap::new(), &BTreeMap::new()).verdict,
            Verdict::Passed
        );
    }
}
