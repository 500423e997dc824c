// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The toolchain root: a Debian tree with the emulator, cross compilers and
//! the kernels that the lab boots.
//!
//! Made by mmdebstrap from the mirror that this machine's own apt uses.
//! mmdebstrap is itself taken from there, and nothing is installed on the
//! machine. Commands run in the root in a mount namespace of their own, with
//! this checkout at `/src` and the cache at `/cache`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::cache::{Cache, key};
use crate::progress::Step;

/// What the root holds, and why.
const PACKAGES: &[&str] = &[
    // The emulated host.
    "qemu-system-arm",
    // Modules and static programs for arm64.
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "make",
    "rustc",
    "libstd-rust-dev:arm64",
    "libbpf-dev",
    "clang",
    "bpftool",
    "sparse",
    "perl",
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

const SUITE: &str = "trixie";
/// Measured: a root takes 3 GiB, and as much again is touched on the way.
const NEEDED_MIB: u64 = 6_000;
/// mmdebstrap's own package list is part of what a root is made of; this
/// number is for all else (hooks, options).
const RECIPE: &str = "4";

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
        let name = key([SUITE.as_bytes(), recipe.as_bytes(), RECIPE.as_bytes()]);
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
        // Everything is exec'd in turn, so the child's process id is that of
        // the program, and killing the child kills the program.
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
            exec chroot "$root" /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 \
                PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
        "#;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount"]);
        if !is_root() {
            command.arg("--map-root-user");
        }
        command
            .args(["/bin/sh", "-c", ENTER, "sh"])
            .arg(&self.dir)
            .arg(&self.repo)
            .arg(&self.cache)
            .arg(cargo_toolchain().unwrap_or_default())
            .arg(cargo_home().unwrap_or_default())
            .arg(program)
            .stdin(Stdio::null());
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
        run_quietly(self.command(program).args(args), what)
    }
}

/// Runs a command to its end; on failure its whole output goes to stderr and
/// the error names `what` was being done.
pub fn run_quietly(command: &mut Command, what: &str) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("{what}: cannot start {:?}", command.get_program()))?;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        eprint!("{out}{}", String::from_utf8_lossy(&output.stderr));
        bail!("{what} failed ({}); its output is above", output.status);
    }
    Ok(out)
}

fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
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
    cache.require_free(NEEDED_MIB)?;
    let mirror = mirror()?;
    let mmdebstrap = mmdebstrap(cache)?;
    let step = Step::start("toolchain root (about 700 MB to fetch, 2 minutes)");
    let mut command = Command::new(&mmdebstrap);
    command
        .arg(if is_root() { "--mode=root" } else { "--mode=unshare" })
        .args(["--variant=apt", "--architectures=amd64,arm64"])
        .arg(format!("--include={}", PACKAGES.join(",")))
        .args([
            "--aptopt=APT::Install-Recommends \"false\"",
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-exclude=/usr/share/man/*",
            "--dpkgopt=path-exclude=/usr/share/locale/*",
            // Nothing here boots by an initrd of Debian's.
            "--essential-hook=mkdir -p $1/etc/initramfs-tools/conf.d $1/etc/kernel/postinst.d; ln -sf /bin/true $1/etc/kernel/postinst.d/initramfs-tools",
            "--setup-hook=mkdir -p $1/etc/apt/preferences.d; printf 'Package: *\\nPin: release n=trixie-backports\\nPin-Priority: 600\\n' > $1/etc/apt/preferences.d/backports",
            // The kernel's own driver, bindings and checkpatch, of the same
            // version as the image: the archive's newest may be another.
            "--customize-hook=v=$(ls $1/boot | sed -n 's/^vmlinuz-\\([0-9]*\\.[0-9]*\\)\\..*/\\1/p' | head -n 1); chroot $1 apt-get install --yes linux-source-$v",
            "--customize-hook=mkdir -p $1/src $1/cache $1/opt/cargo $1/opt/cargo-home; chmod a+r $1/boot/vmlinuz-*",
        ])
        .arg(SUITE)
        .arg(to.join("tree"));
    let signed = signed_by()?;
    command
        .arg(format!("deb [signed-by={signed}] {mirror} {SUITE} main"))
        .arg(format!(
            "deb [signed-by={signed}] {mirror} {SUITE}-backports main"
        ));
    let log = to.join("mmdebstrap.log");
    run_logged(&mut command, &log, &step).with_context(|| explain(&log))?;
    step.done();
    Ok(())
}

/// Runs a long command; its lines go to `log`, those that tell a stage are
/// shown.
fn run_logged(command: &mut Command, log: &Path, step: &Step) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
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
    for line in lines.lines() {
        let line = line?;
        if let Some(stage) = line.strip_prefix("I: ") {
            step.tell(stage);
        }
        kept.push_str(&line);
        kept.push('\n');
    }
    fs::write(log, &kept)?;
    let status = child.wait()?;
    if !status.success() {
        eprint!("{kept}");
        bail!("mmdebstrap failed ({status})");
    }
    Ok(())
}

/// The likely cause of a failure, from what mmdebstrap printed.
fn explain(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let cause = if text.contains("Unable to locate package") {
        "the mirror lacks a package that the lab needs: is trixie-backports on it?"
    } else if text.contains("Temporary failure resolving")
        || text.contains("Could not connect")
        || text.contains("Failed to fetch")
    {
        "the mirror can't be reached: the first run needs the network, later ones don't"
    } else if text.contains("newuidmap") || text.contains("/etc/subuid") {
        "no unprivileged namespaces: install uidmap and give this user a range in /etc/subuid and /etc/subgid, or run as root"
    } else if text.contains("No space left") {
        "the disk is full: free some, or set VCPUFREQ_CACHE to a folder on a larger disk"
    } else {
        "its messages are above"
    };
    format!("cannot make the toolchain root: {cause}")
}

/// The Debian mirror of this machine's own apt.
fn mirror() -> Result<String> {
    let output = Command::new("apt-get")
        .args([
            "indextargets",
            "--format",
            "$(REPO_URI) $(LABEL) $(CODENAME)",
        ])
        .args(["Created-By: Packages"])
        .output()
        .context("cannot run apt-get: the lab's set-up needs a Debian machine")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let main = |line: &&str| {
        let mut words = line.split(' ').skip(1);
        words.next() == Some("Debian") && words.next().is_some_and(|name| !name.contains('-'))
    };
    text.lines()
        .find(main)
        .and_then(|line| line.split(' ').next())
        .map(str::to_owned)
        .context("apt knows no Debian mirror: run 'apt-get update', or add one to its sources")
}

fn signed_by() -> Result<&'static str> {
    const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
    ensure!(
        Path::new(KEYRING).exists(),
        "no {KEYRING}: install debian-archive-keyring"
    );
    Ok(KEYRING)
}

/// mmdebstrap: this machine's, or the package unpacked into the cache.
fn mmdebstrap(cache: &Cache) -> Result<PathBuf> {
    let installed = PathBuf::from("/usr/bin/mmdebstrap");
    if installed.exists() {
        return Ok(installed);
    }
    let dir = cache.entry("mmdebstrap", "1", |to| {
        let step = Step::start("mmdebstrap");
        let fetch = |options: &[&str]| {
            Command::new("apt-get")
                .args(options)
                .args(["download", "mmdebstrap"])
                .current_dir(to)
                .output()
        };
        if !fetch(&[])?.status.success() {
            // A machine whose package lists were never fetched: fetch them
            // into the cache, and leave the machine's own as they are.
            let state = to.join("lists");
            fs::create_dir_all(state.join("partial"))?;
            let option = format!("-oDir::State::lists={}", state.display());
            run_quietly(
                Command::new("apt-get").args([&option, "update"]),
                "fetching the mirror's package lists (is the network up?)",
            )?;
            let output = fetch(&[&option])?;
            ensure!(
                output.status.success(),
                "the mirror has no package mmdebstrap: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let package = fs::read_dir(to)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|end| end == "deb"))
            .context("apt-get downloaded no package")?;
        run_quietly(
            Command::new("dpkg-deb")
                .arg("-x")
                .arg(package)
                .arg(to.join("unpacked")),
            "unpacking mmdebstrap",
        )?;
        step.done();
        Ok(())
    })?;
    Ok(dir.join("unpacked/usr/bin/mmdebstrap"))
}
