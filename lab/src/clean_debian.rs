// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clean Debian systems for amd64, in which packages are installed: a tree for each release in the
//! cache, of which each run takes a copy.

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

/// What the project's packages depend on, for packages are installed without a network; kernel
/// headers, for which DKMS builds; the init system that such machines have; and what a kernel's
/// image wants.
const PACKAGES: &str = "dkms,pahole,linux-headers-amd64,systemd,initramfs-tools,linux-base";
/// The packages of another kernel, which come into the tree's `/opt/kernel`. A hook of mmdebstrap.
const OTHER_KERNEL: &str = "mkdir -p $1/opt/kernel/partial; chroot $1 apt-get install --yes \
    --download-only -o Dir::Cache::archives=/opt/kernel linux-image-cloud-amd64 \
    linux-headers-cloud-amd64";
/// All else that a tree is made by.
const RECIPE: &str = "1";

/// Enters a tree. `/run` and `/tmp` are the tree's own: what is left there counts.
const ENTER: &str = r#"
    set -e
    root=$1 script=$2
    mount --rbind /dev "$root/dev"
    mount --rbind /proc "$root/proc"
    exec /usr/sbin/chroot "$root" /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 \
        DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -ec "$script"
"#;

/// A system of its own; removed at the end.
#[derive(Debug)]
pub struct CleanDebian {
    dir: PathBuf,
}

impl CleanDebian {
    /// This release's system in the cache; fetches it when it isn't there.
    pub fn prepare(cache: &Cache, release: &str) -> Result<PathBuf> {
        let parts = [release, PACKAGES, OTHER_KERNEL, RECIPE].map(str::as_bytes);
        let name = format!("debian-{release}");
        cache.entry(&name, &key(parts), |to| fetch(to, release))
    }

    /// A fresh copy of this release's system.
    pub fn copy(cache: &Cache, release: &str) -> Result<Self> {
        let from = Self::prepare(cache, release)?;
        let dir = cache
            .dir()
            .join("runs")
            .join(std::process::id().to_string());
        remove_tree(&dir)?;
        fs::create_dir_all(&dir)?;
        let copy = Self { dir };
        let mut command = namespace::command(Users::All);
        command.args(["cp", "-a"]).arg(from.join("tree"));
        child_output::quietly(command.arg(copy.tree()), "copying a Debian system")?;
        Ok(copy)
    }

    fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }

    /// Copies a file into the folder `to`, given as seen inside.
    pub fn take(&self, file: &Path, to: &str) -> Result<()> {
        let mut command = namespace::command(Users::All);
        command.args(["install", "-m", "644", "-D", "-t"]);
        command.arg(self.tree().join(to)).arg(file);
        child_output::quietly(&mut command, "copying into a Debian system").map(drop)
    }

    /// Runs a shell's script in it, as root; whether it succeeded, and its output.
    pub fn shell(&self, script: &str) -> Result<(bool, String)> {
        let mut command: Command = namespace::command(Users::All);
        command
            .args(["/bin/sh", "-c", ENTER, "sh"])
            .arg(self.tree());
        child_output::output(command.arg(script))
    }
}

impl Drop for CleanDebian {
    fn drop(&mut self) {
        // A failed removal is the lesser news; old runs are removed some day.
        let _ = remove_tree(&self.dir);
    }
}

fn fetch(to: &Path, release: &str) -> Result<()> {
    namespace::require(Users::All)?;
    let fetched = to.join("apt");
    fs::create_dir(&fetched)?;
    let mut apt = Apt::open(&fetched)?;
    let mmdebstrap = apt.mmdebstrap()?;
    let step = Step::start(format!("Debian {release} (about 200 MB to fetch)"));
    let [suite, _backports] = apt.sources(release)?;
    let mut command = namespace::command(Users::All);
    command
        .arg(mmdebstrap)
        .args(["--mode=root", "--verbose"])
        .args(["--variant=minbase", "--architectures=amd64"])
        .arg(format!("--include={PACKAGES}"))
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .arg(format!("--customize-hook={OTHER_KERNEL}"))
        .arg(release)
        .arg(to.join("tree"))
        .arg(suite);
    bootstrap::run(&mut command, &to.join("mmdebstrap.log"), &step)
        .with_context(|| format!("cannot make a Debian {release} from {}", apt.mirror()))?;
    remove_tree(&fetched)?;
    step.done();
    Ok(())
}
