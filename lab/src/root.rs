// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The toolchain root: a Debian tree with the emulator, cross compilers and
//! the kernels that the lab boots.
//!
//! Made by mmdebstrap from the mirror that this machine's own apt uses.
//! mmdebstrap is itself taken from there, and nothing is installed on the
//! machine. It is made, and commands run in it, in namespaces of their own;
//! commands see this checkout at `/src` and the cache at `/cache`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt::Apt;
use crate::bootstrap;
use crate::cache::{Cache, key, remove_tree};
use crate::child_output;
use crate::namespace::{self, Users};
use crate::progress::Step;

/// What the root holds, and why.
const PACKAGES: &[&str] = &[
    // The emulated host.
    "qemu-system-arm",
    // The emulated guest for x86-64, of the guest driver's tests.
    "qemu-system-x86",
    // Modules and static programs for arm64.
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "make",
    "rustc",
    "rust-clippy",
    "libstd-rust-dev:arm64",
    "libbpf-dev",
    "clang",
    "bpftool",
    // Kernels of the lab's own.
    "bc",
    "bison",
    "flex",
    // BTF of modules; what libbpf is linked with, statically.
    "pahole",
    "libelf-dev:arm64",
    "zlib1g-dev:arm64",
    "libzstd-dev:arm64",
    "pkg-config",
    // Checks of the C code.
    "sparse",
    "coccinelle",
    // Of its patterns.
    "libpython3-dev",
    "perl",
    // Makes modules as an installed system does.
    "dkms",
    // Makes and checks packages.
    "debhelper",
    "dh-dkms",
    "lintian",
    // The kernels, and what is built against them.
    "linux-image-arm64:arm64",
    "linux-image-rt-arm64:arm64",
    "linux-headers-arm64:arm64",
    "linux-headers-rt-arm64:arm64",
    // Device trees and archives.
    "device-tree-compiler",
    "dt-schema",
    "xz-utils",
    "zstd",
    // The shell of the emulated host.
    "busybox-static:arm64",
];

pub const SUITE: &str = "trixie";
/// Measured, in MiB: a root takes 3,490, and some 4,510 while it is made. The rest of a newly
/// filled cache takes 1,420: 950 for the arm64 programs and clippy's files, 350 for two runs. The
/// checkout's target folder takes 2,340 after `make test`, of which some is there already.
const NEEDED_MIB: u64 = 7_400;
/// mmdebstrap's own package list and the hooks are part of what a root is made of; this
/// number is for all else (options).
const RECIPE: &str = "11";

/// Backports come before the suite's own packages.
pub const BACKPORTS: &str = "--setup-hook=mkdir -p $1/etc/apt/preferences.d; printf 'Package: *\\nPin: release n=trixie-backports\\nPin-Priority: 600\\n' > $1/etc/apt/preferences.d/backports";

const HOOKS: &[&str] = &[
    BACKPORTS,
    // Not as an option of mmdebstrap, which would need its tarfilter, and
    // that Python, for the few packages before this. The copyright files go into the project's own packages.
    "--essential-hook=printf 'path-exclude=/usr/share/%s/*\\n' doc man locale > $1/etc/dpkg/dpkg.cfg.d/lab; echo 'path-include=/usr/share/doc/*/copyright' >> $1/etc/dpkg/dpkg.cfg.d/lab",
    // The kernel's own driver, bindings and checkpatch, of the same version
    // as the image: the archive's newest may be another. By this machine's
    // apt, as all else: the root has neither resolver nor certificates.
    "--customize-hook=v=$(ls $1/boot | sed -n 's/^vmlinuz-\\([0-9]*\\.[0-9]*\\)\\..*/\\1/p' | head -n 1); APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -o Dir::Bin::dpkg=env -o DPkg::Options::=--unset=TMPDIR -o DPkg::Options::=dpkg -o DPkg::Chroot-Directory=$1 --yes install linux-source-$v",
    // Debian stable's own kernel, which has no uclamp. Its release is in the
    // name of the package that the unversioned one depends on. Unpacked and
    // not installed: its headers want a compiler that is an arm64 program,
    // which would replace the cross compiler.
    "--customize-hook=set -e; export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG; v=$(apt-cache show linux-image-arm64:arm64 | sed -n 's/^Depends: linux-image-\\(6\\.12\\.[^ ]*\\)-arm64.*/\\1/p' | sort -V | tail -n 1); mkdir $1/old; cd $1/old; apt-get -o APT::Sandbox::User=root download linux-image-$v-arm64:arm64 linux-headers-$v-arm64:arm64 linux-headers-$v-common linux-kbuild-$v; for p in *.deb; do dpkg-deb -x $p $1; done; cd /; rm -r $1/old",
    // A guest for x86-64, of the same version: its kernel, headers and shell. Unpacked only: the
    // packages would replace those for arm64, or bring a boot loader.
    "--customize-hook=set -e; export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG; v=$(ls $1/boot | sed -n 's/^vmlinuz-\\(.*\\)-arm64$/\\1/p' | grep -v -e -rt$ | sort -V | tail -n 1); mkdir $1/opt/amd64; cd $1/opt/amd64; apt-get -o APT::Sandbox::User=root download linux-binary-$v-amd64:amd64 linux-headers-$v-amd64:amd64 busybox-static:amd64; dpkg-deb -x linux-headers-*.deb $1; dpkg-deb --fsys-tarfile linux-binary-*.deb | tar xO ./usr/lib/modules/$v-amd64/vmlinuz > vmlinuz-$v-amd64; dpkg-deb --fsys-tarfile busybox-*.deb | tar xO ./usr/bin/busybox > busybox; chmod +x busybox; rm *.deb",
    // Programs for the emulated host, with all that they depend on, as apt installs them where
    // nothing is. They depend on the python3 of their own architecture, beside which dt-schema's
    // can't be installed: unpacked only. Without what nothing here is linked with: that, and what
    // stress-ng draws by.
    "--customize-hook=set -e; mkdir $1/opt/arm64; cd $1/opt/arm64; export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG; alone='-o Dir::State::status=/dev/null -o APT::Architecture=arm64 -o APT::Sandbox::User=root'; apt-get $alone -s install qemu-system-arm device-tree-compiler rt-tests stress-ng rt-app systemd | sed -n 's/^Inst \\([^ ]*\\) .*/\\1/p' | grep -Ev '^(libllvm|libz3|mesa|.*python)' | xargs apt-get $alone download; for p in *.deb; do dpkg-deb -x $p .; done; rm -r *.deb usr/share/doc usr/share/man usr/share/locale",
    "--customize-hook=mkdir -p $1/src $1/cache $1/opt/cargo $1/opt/cargo-home; chmod a+r $1/boot/vmlinuz-*",
];

/// A toolchain root that is ready.
#[derive(Debug, Clone)]
pub struct Root {
    dir: PathBuf,
    cache: PathBuf,
    repo: PathBuf,
}

impl Root {
    /// The root for this recipe; makes it when it isn't there.
    pub fn prepare(cache: &Cache, repo: &Path) -> Result<Self> {
        let recipe = PACKAGES.join(" ");
        let hooks = HOOKS.join("\n");
        let parts = [SUITE, &recipe, &hooks, RECIPE];
        let name = key(parts.map(str::as_bytes));
        let dir = cache.entry("root", &name, |to| make(cache, to))?;
        Ok(Self {
            dir: dir.join("tree"),
            cache: cache.dir().to_path_buf(),
            repo: repo.to_path_buf(),
        })
    }

    /// The tree, as seen from outside.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What names this root in the keys of what is built with it.
    pub fn id(&self) -> String {
        self.dir.display().to_string()
    }

    /// A command that runs in the root, ended by the kernel when this
    /// process ends.
    pub fn command(&self, program: &str) -> Command {
        const ENTER: &str = r#"
            set -e
            root=$1 src=$2 cache=$3 cargo=$4 home=$5
            shift 5
            mount --bind "$src" "$root/src"
            mount --bind "$cache" "$root/cache"
            [ -z "$cargo" ] || mount --bind "$cargo" "$root/opt/cargo"
            [ -z "$home" ] || mount --bind "$home" "$root/opt/cargo-home"
            mount --rbind /dev "$root/dev"
            mount --rbind /proc "$root/proc"
            mount -t tmpfs tmpfs "$root/tmp"
            exec /usr/sbin/chroot "$root" /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 \
                PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
        "#;
        let mut command = namespace::command(Users::Root);
        command
            .args(["/bin/sh", "-c", ENTER, "sh"])
            .arg(&self.dir)
            .arg(&self.repo)
            .arg(&self.cache)
            .arg(cargo_toolchain().unwrap_or_default())
            .arg(cargo_home().unwrap_or_default())
            .arg(program);
        command
    }

    /// Where `path`, under the cache, is seen inside the root.
    pub fn inside(&self, path: &Path) -> Result<String> {
        let rest = path
            .strip_prefix(&self.cache)
            .with_context(|| format!("{} is not in the cache", path.display()))?;
        Ok(format!("/cache/{}", rest.display()))
    }

    /// Runs a command in the root; its output is shown when it fails.
    pub fn run(&self, what: &str, program: &str, args: &[&str]) -> Result<String> {
        child_output::quietly(self.command(program).args(args), what)
    }
}

/// The folder of the Rust toolchain whose cargo runs this program.
fn cargo_toolchain() -> Option<PathBuf> {
    let cargo = PathBuf::from(std::env::var_os("CARGO")?);
    Some(cargo.parent()?.parent()?.to_path_buf())
}

fn cargo_home() -> Option<PathBuf> {
    std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")))
}

fn make(cache: &Cache, to: &Path) -> Result<()> {
    namespace::require(Users::All)?;
    cache.require_free(NEEDED_MIB)?;
    let fetched = to.join("apt");
    fs::create_dir(&fetched)?;
    let mut apt = Apt::open(&fetched)?;
    let mmdebstrap = apt.mmdebstrap()?;
    let step = Step::start("toolchain root");
    step.tell("about 700 MB to fetch, 2 to 4 minutes");
    let mut command = namespace::command(Users::All);
    command
        .arg(mmdebstrap)
        // In the namespace every user is root.
        .args(["--mode=root", "--verbose"])
        .args(["--variant=apt", "--architectures=amd64,arm64"])
        .arg(format!("--include={}", PACKAGES.join(",")))
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .args(HOOKS)
        // Nothing here boots by an initrd of Debian's; making them takes a
        // third of the time. The kernel's install scripts heed this.
        .env("INITRD", "No")
        .arg(SUITE)
        .arg(to.join("tree"))
        .args(apt.sources(SUITE)?);
    bootstrap::run(&mut command, &to.join("mmdebstrap.log"), &step)
        .with_context(|| format!("cannot make the toolchain root from {}", apt.mirror()))?;
    remove_tree(&fetched)?;
    step.done();
    Ok(())
}
