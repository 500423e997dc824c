// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How the tree of the toolchain root is made: the archive's lists are read, versions are chosen, and
//! mmdebstrap makes what every run needs; what only the tests need is added when they first run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};

use crate::apt::Apt;
use crate::archive::Archive;
use crate::bootstrap;
use crate::cache::{Cache, CacheState, key, remove_tree};
use crate::choice::{Choice, WantedPackages};
use crate::namespace::{self, Users};
use crate::progress::{Step, above};

/// The suite whose packages the tree is made of, with its backports.
pub const SUITE: &str = "trixie";

/// What the tree holds for every run, and why. Kernels come beside these.
const PACKAGES: &[&str] = &[
    // The emulated host.
    "qemu-system-arm:amd64",
    // Modules and static programs for arm64.
    "gcc-aarch64-linux-gnu:amd64",
    "libc6-dev-arm64-cross:amd64",
    "make:amd64",
    "cargo:amd64",
    "rustc:amd64",
    "libstd-rust-dev:amd64",
    "libstd-rust-dev:arm64",
    "libbpf-dev:amd64",
    "clang:amd64",
    // BTF of modules; what libbpf is linked with, statically.
    "pahole:amd64",
    "libelf-dev:arm64",
    "zlib1g-dev:arm64",
    "libzstd-dev:arm64",
    "pkg-config:amd64",
    // Device trees and archives.
    "device-tree-compiler:amd64",
    "xz-utils:amd64",
    "zstd:amd64",
    // The shell of the emulated host.
    "busybox-static:arm64",
];

/// What only tests, packages and kernels of the lab's own need.
const TESTS: &[&str] = &[
    "rust-clippy:amd64",
    "rustfmt:amd64",
    // The emulated guest for x86-64, of the guest driver's tests.
    "qemu-system-x86:amd64",
    // Kernels of the lab's own.
    "bc:amd64",
    "bison:amd64",
    "flex:amd64",
    // Checks of the C code.
    "sparse:amd64",
    "coccinelle:amd64",
    // Of its patterns.
    "libpython3-dev:amd64",
    "perl:amd64",
    // Makes modules as an installed system does.
    "dkms:amd64",
    // Makes and checks packages.
    "debhelper:amd64",
    "dh-dkms:amd64",
    "lintian:amd64",
    // Bindings.
    "dt-schema:amd64",
];

/// Programs for the emulated host, with all that they depend on, as apt installs them where nothing
/// is. They depend on the python3 of their own architecture, beside which dt-schema's can't be
/// installed: unpacked only, into `/opt/arm64`.
const PROGRAMS: &[&str] = &[
    "qemu-system-arm:arm64",
    "device-tree-compiler:arm64",
    "rt-tests:arm64",
    "stress-ng:arm64",
    "rt-app:arm64",
    "systemd:arm64",
];

/// Measured, in MiB: a tree for the demo takes 2,050, with what the tests need 3,490, and 1,000 more
/// while it is made. The rest of a newly filled cache takes 1,420: 950 for the arm64 programs and
/// clippy's files, 350 for two runs. The checkout's target folder takes 2,340 after `make test`, of
/// which some is there already.
const NEEDED_MIB: u64 = 7_400;
/// The lists of packages above are part of what a tree is made of; this number is for all else.
const RECIPE: &str = "12";

/// Not as an option of mmdebstrap, which would need its tarfilter, and that Python, for the few
/// packages before this. The copyright files go into the project's own packages.
const EXCLUDE: &str = "--essential-hook=printf 'path-exclude=/usr/share/%s/*\\n' doc man locale > $1/etc/dpkg/dpkg.cfg.d/lab; echo 'path-include=/usr/share/doc/*/copyright' >> $1/etc/dpkg/dpkg.cfg.d/lab";
const FOLDERS: &str =
    "--customize-hook=mkdir -p $1/src $1/cache $1/opt; chmod a+r $1/boot/vmlinuz-*";

/// Fetches all packages first, by an apt of the machine's. Then installs those for the tests into
/// the tree, and unpacks the others: stable's own kernel, whose headers want a compiler that is an
/// arm64 program and would replace the cross compiler; the kernel for x86-64, which would replace
/// those for arm64 or bring a boot loader; the host's programs, without what nothing here is linked
/// with: Python, and what stress-ng draws by. The lines that begin with `I:` are read as
/// mmdebstrap's.
const ADD: &str = r#"
    set -e
    exec 1>&2
    dir=$1 install=$2 old=$3 x86=$4 programs=$5
    tree=$dir/tree archives=$dir/tree/var/cache/apt/archives fetched=$dir/fetched
    export APT_CONFIG=$dir/apt/apt.conf LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive INITRD=No
    rm -rf "$fetched"
    mkdir -p "$archives/partial" "$fetched/old" "$fetched/x86" "$fetched/arm64"
    into_tree() {
        apt-get -o Dir::State::status="$tree/var/lib/dpkg/status" -o Dir::Cache::archives="$archives" \
            -o Dir::State::extended_states="$tree/var/lib/apt/extended_states" \
            -o Dir::Bin::dpkg=env -o DPkg::Options::=--unset=TMPDIR -o DPkg::Options::=dpkg \
            -o DPkg::Chroot-Directory="$tree" -o DPkg::Use-Pty=false --yes "$@" install $install
    }
    echo 'I: fetching...'
    into_tree --download-only
    if [ "$old" ]; then
        cd "$fetched/old"
        apt-get download "linux-image-$old-arm64:arm64" "linux-headers-$old-arm64:arm64" \
            "linux-headers-$old-common" "linux-kbuild-$old"
    fi
    if [ "$x86" ]; then
        cd "$fetched/x86"
        apt-get download "linux-binary-$x86-amd64:amd64" "linux-headers-$x86-amd64:amd64" \
            busybox-static:amd64
    fi
    cd "$fetched/arm64"
    alone='-o APT::Architecture=arm64'
    apt-get $alone --simulate install $programs > ../simulated
    apt-get $alone download $(sed -n 's/^Inst \([^ ]*\) .*/\1/p' ../simulated |
        grep -Ev '^(libllvm|libz3|mesa|.*python)')
    touch "$dir/begun"
    echo 'I: installing...'
    mount --rbind /proc "$tree/proc"
    mount --rbind /dev "$tree/dev"
    mount -t tmpfs tmpfs "$tree/tmp"
    into_tree
    unpack() { # folder to
        mkdir -p "$2"
        for package in "$fetched/$1"/*.deb; do dpkg-deb -x "$package" "$2"; done
    }
    [ -z "$old" ] || unpack old "$tree"
    if [ "$x86" ]; then
        cd "$fetched/x86"
        to=$tree/opt/amd64
        mkdir -p "$to"
        dpkg-deb -x linux-headers-*.deb "$tree"
        dpkg-deb --fsys-tarfile linux-binary-*.deb |
            tar xO "./usr/lib/modules/$x86-amd64/vmlinuz" > "$to/vmlinuz-$x86-amd64"
        dpkg-deb --fsys-tarfile busybox-*.deb | tar xO ./usr/bin/busybox > "$to/busybox"
        chmod +x "$to/busybox"
    fi
    unpack arm64 "$tree/opt/arm64"
    cd "$tree/opt/arm64/usr/share"
    rm -rf doc man locale "$fetched" "$archives"/*.deb
    chmod a+r "$tree"/boot/vmlinuz-*
    touch "$dir/complete"
    rm "$dir/begun"
"#;

/// The file with the key of a tree's package lists.
const LISTS: &str = "lists";

/// What a root is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootUse {
    /// The demo, and what boots as it does.
    Demo,
    /// All.
    Tests,
}

/// The hook of mmdebstrap that takes apt's preferences from this file.
pub fn prefer(preferences: &Path) -> String {
    let folder = "$1/etc/apt/preferences.d";
    format!(
        "--setup-hook=mkdir -p {folder}; cp '{}' {folder}/lab",
        preferences.display()
    )
}

/// A tree's name in the cache.
pub fn id() -> String {
    let lists = [PACKAGES, TESTS, PROGRAMS].map(|list| list.join(" "));
    let parts = [
        SUITE, &lists[0], &lists[1], &lists[2], EXCLUDE, FOLDERS, ADD, RECIPE,
    ];
    key(parts.map(str::as_bytes))
}

/// How trees come about.
struct TreeMaker<'a> {
    /// Makes one in an empty folder.
    make: &'a dyn Fn(&Path) -> Result<()>,
    /// Takes the line about one that is made anew.
    say: &'a dyn Fn(&str),
}

/// Makes or completes the tree for this use: its folder, and what was there before.
pub fn prepare(cache: &Cache, for_use: RootUse) -> Result<(PathBuf, CacheState)> {
    let maker = TreeMaker {
        make: &|to| make(cache, to),
        say: &|line| above(|| eprintln!("{line}")),
    };
    prepare_by(&maker, cache, for_use)
}

fn prepare_by(
    maker: &TreeMaker<'_>,
    cache: &Cache,
    for_use: RootUse,
) -> Result<(PathBuf, CacheState)> {
    let name = id();
    let mut before = CacheState::Filled;
    let dir = cache.entry("root", &name, |to| {
        before = CacheState::Empty;
        (maker.make)(to)
    })?;
    if for_use == RootUse::Demo || dir.join("complete").exists() {
        return Ok((dir, before));
    }
    let _lock = cache.lock("root-tests")?;
    if dir.join("complete").exists() {
        return Ok((dir, before));
    }
    if before == CacheState::Filled {
        before = CacheState::Partly;
    }
    // An interrupted run may have left half a package.
    let broken = dir.join("begun").exists();
    let added = match broken {
        true => Err(anyhow!("an earlier run was interrupted")),
        false => complete(&dir),
    };
    if let Err(error) = added {
        // Packages of an archive of another day can't be had any more.
        (maker.say)(&format!("the toolchain root is made anew ({error:#})"));
        let old = dir.with_extension("before");
        remove_tree(&old)?;
        fs::rename(&dir, &old)?;
        if let Err(error) = cache.entry("root", &name, |to| (maker.make)(to)) {
            if !broken {
                fs::rename(&old, &dir)?;
            }
            return Err(error);
        }
        remove_tree(&old)?;
        complete(&dir)?;
    }
    Ok((dir, before))
}

/// What was chosen for the tree in this folder.
pub fn choice(dir: &Path) -> Result<Choice> {
    let path = dir.join("choice.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(serde_json::from_str(&text)?)
}

/// What [`ADD`] unpacks and doesn't install.
pub fn unpacked(choice: &Choice) -> Vec<String> {
    let mut packages = choice.present(owned(PROGRAMS));
    packages.extend(choice.old_packages());
    packages.extend(choice.x86_packages());
    packages
}

fn owned(packages: &[&str]) -> Vec<String> {
    packages.iter().map(|&package| package.to_owned()).collect()
}

/// What each command needs.
fn needed(choice: &Choice) -> Vec<String> {
    [owned(PACKAGES), choice.kernel_packages()].concat()
}

/// All that is installed for the tests.
pub fn wanted(choice: &Choice) -> Vec<String> {
    let of_tests = [owned(TESTS), vec![choice.source_package()]].concat();
    let of_tests = choice.present(of_tests);
    [needed(choice), of_tests, choice.rt_packages()].concat()
}

fn make(cache: &Cache, to: &Path) -> Result<()> {
    namespace::require(Users::All)?;
    cache.require_free(NEEDED_MIB)?;
    let of_machine = to.join("machine");
    fs::create_dir(&of_machine)?;
    let mut apt = Apt::open(&of_machine)?;
    let mmdebstrap = apt.mmdebstrap()?;
    make_of(&apt.sources(SUITE)?, &mmdebstrap, to)
        .with_context(|| format!("cannot make the toolchain root from {}", apt.mirror()))?;
    remove_tree(&of_machine)
}

/// Makes a tree of the packages of these sources.
fn make_of(sources: &[String], mmdebstrap: &Path, to: &Path) -> Result<()> {
    let wanted = WantedPackages {
        by_all: owned(PACKAGES),
        by_tests: owned(TESTS),
        unpacked: owned(PROGRAMS),
    };
    let order = PackageOrder {
        sources,
        wanted: &wanted,
        installed: &needed,
    };
    let choice = settle(&to.join("apt"), &order, |archive, choice| {
        let listed = format!("{:?}", archive.listed);
        fs::write(to.join(LISTS), key([listed.as_bytes()]))?;
        let step = Step::start("toolchain root");
        step.tell("about 500 MB to fetch, 2 to 4 minutes");
        let tree = to.join("tree");
        remove_tree(&tree)?;
        let mut command = namespace::command(Users::All);
        let packages = needed(choice);
        command
            .arg(mmdebstrap)
            // In the namespace every user is root.
            .args(["--mode=root", "--verbose"])
            .args(["--variant=apt", "--architectures=amd64,arm64"])
            .arg(format!("--include={}", packages.join(",")))
            .arg("--aptopt=APT::Install-Recommends \"false\"")
            .arg(prefer(&to.join("apt/preferences")))
            .args([EXCLUDE, FOLDERS])
            // Nothing here boots by an initrd of Debian's; making them takes a third of the time.
            // The kernel's install scripts heed this.
            .env("INITRD", "No")
            .arg(SUITE)
            .arg(&tree)
            .args(sources);
        bootstrap::run(&mut command, &to.join("mmdebstrap.log"), &step)?;
        step.done();
        Ok(())
    })?;
    let choice = serde_json::to_string_pretty(&choice)?;
    Ok(fs::write(to.join("choice.json"), choice)?)
}

/// Which package lists the tree in this folder was made from: what was built with a tree of others,
/// in the same folder, isn't this one's.
pub fn lists_key(dir: &Path) -> String {
    // A tree without this file has an id without lists.
    fs::read_to_string(dir.join(LISTS)).unwrap_or_default()
}

/// What is to be chosen from where.
pub struct PackageOrder<'a> {
    /// Lines of a sources.list.
    pub sources: &'a [String],
    /// Packages whose versions have to agree.
    pub wanted: &'a WantedPackages,
    /// What is installed by it.
    pub installed: &'a dyn Fn(&Choice) -> Vec<String>,
}

/// How apt tells that a file of its lists is gone, or is another one.
const GONE: [&str; 5] = [
    "404  Not Found",
    // Of a mirror that is a folder.
    "File not found",
    "Failed to stat - stat (2: No such file or directory)",
    "Hash Sum mismatch",
    "File has unexpected size",
];

fn is_gone(error: &anyhow::Error) -> bool {
    let text = format!("{error:#}");
    GONE.iter().any(|words| text.contains(words))
}

/// Reads the archive, chooses, and does the work; once more if the archive has changed between list and
/// fetch, as it does several times a day. What fails for another reason would fail again.
pub fn settle(
    dir: &Path,
    order: &PackageOrder<'_>,
    mut work: impl FnMut(&Archive, &Choice) -> Result<()>,
) -> Result<Choice> {
    let (before, failed) = match attempt(dir, order, &mut work)? {
        (_, choice, Ok(())) => return Ok(choice),
        (_, _, Err(error)) if !is_gone(&error) => return Err(error),
        (archive, _, Err(error)) => (archive, error),
    };
    let (archive, choice, result) = attempt(dir, order, &mut work)?;
    match result {
        Ok(()) => Ok(choice),
        Err(_) if before.listed == archive.listed => Err(failed),
        Err(error) => Err(error.context("the archive changes while it is read: try again later")),
    }
}

/// The lists, what was chosen by them, and how the work with it ended.
type Attempt = (Archive, Choice, Result<()>);

fn attempt(
    dir: &Path,
    order: &PackageOrder<'_>,
    work: &mut impl FnMut(&Archive, &Choice) -> Result<()>,
) -> Result<Attempt> {
    remove_tree(dir)?;
    fs::create_dir_all(dir)?;
    let step = Step::start("the archive's package lists");
    let archive = Archive::fetch(dir, order.sources)?;
    step.done();
    let mut choice = Choice::of(&archive, SUITE, order.wanted)?;
    archive.prefer(&choice.preferences)?;
    let installed = (order.installed)(&choice);
    let solved = archive.solve(&installed);
    if solved.is_ok() {
        choice.solve_tests(&archive, installed, order.wanted);
    }
    for line in &choice.differences {
        above(|| eprintln!("archive: {line}"));
    }
    let result = solved.and_then(|()| work(&archive, &choice));
    Ok((archive, choice, result))
}

/// Adds what the tests need, of the versions that were chosen for the tree.
fn complete(dir: &Path) -> Result<()> {
    let choice = choice(dir)?;
    let step = Step::start("toolchain root, for the tests");
    step.tell("about 400 MB to fetch, 2 to 4 minutes");
    let x86 = match choice.x86_packages().is_empty() {
        true => "",
        false => &choice.kernel,
    };
    let programs = choice.present(owned(PROGRAMS));
    let programs: Vec<&str> = programs
        .iter()
        .filter_map(|name| name.strip_suffix(":arm64"))
        .collect();
    Archive::kept(&dir.join("apt"))?;
    let mut command = namespace::command(Users::All);
    command
        .args(["/bin/sh", "-c", ADD, "sh"])
        .arg(dir)
        .arg(wanted(&choice).join(" "))
        .arg(choice.old_kernel.as_deref().unwrap_or_default())
        .args([x86, &programs.join(" ")]);
    bootstrap::run(&mut command, &dir.join("add.log"), &step)?;
    step.done();
    Ok(())
}

#[cfg(test)]
mod tests;
