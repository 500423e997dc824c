// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The toolchain root: a Debian tree with the emulator, cross compilers and
//! the kernels that the lab boots.
//!
//! Made by mmdebstrap from the mirror that this machine's own apt uses.
//! mmdebstrap is itself taken from there, and nothing is installed on the
//! machine. It is made, and commands run in it, in namespaces of their own;
//! commands see this checkout at `/src` and the cache at `/cache`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{Cache, CacheState};
use crate::child_output;
use crate::choice::{Choice, RootPart};
use crate::namespace::{self, Users};
use crate::taken::{self, TakenPackage};
use crate::tree::{self, RootUse};
use crate::unfetched::Unfetched;

/// A toolchain root that is ready.
#[derive(Debug, Clone)]
pub struct Root {
    dir: PathBuf,
    cache: PathBuf,
    repo: PathBuf,
    choice: Choice,
    /// By [`tree::lists_key`].
    lists_key: String,
    found: CacheState,
}

impl Root {
    /// The root for this use; makes or completes it.
    pub fn prepare(cache: &Cache, repo: &Path, for_use: RootUse) -> Result<Self> {
        let (dir, found) = tree::prepare(cache, for_use)?;
        Ok(Self {
            found,
            choice: tree::choice(&dir)?,
            lists_key: tree::lists_key(&dir),
            dir: dir.join("tree"),
            cache: cache.dir().to_path_buf(),
            repo: repo.to_path_buf(),
        })
    }

    /// What of it was there before this run.
    pub fn found(&self) -> CacheState {
        self.found
    }

    /// The release of the kernel for arm64, without architecture: `7.3.4+deb13`.
    pub fn kernel(&self) -> &str {
        &self.choice.kernel
    }

    /// Stable's own, where the archive has it.
    pub fn old_kernel(&self) -> Option<&str> {
        self.choice.old_kernel.as_deref()
    }

    /// Why a part isn't there.
    pub fn lacks(&self, part: RootPart) -> Option<&str> {
        self.choice.lacks.get(&part).map(String::as_str)
    }

    /// Fails with [`Unfetched`] if one of these packages that only tests need isn't there.
    pub fn require(&self, packages: &[&str]) -> Result<()> {
        require(&self.choice, packages)
    }

    /// The package of the kernel's source.
    pub fn source_package(&self) -> String {
        self.choice.source_package()
    }

    /// The packages that the lab asks for, as they were taken.
    pub fn taken(&self) -> Result<Vec<TakenPackage>> {
        taken::taken(self.dir.parent().context("a tree's folder")?)
    }

    /// The upstream version of a package of the tree.
    pub fn version(&self, package: &str) -> Result<String> {
        let version = taken::version(&self.dir, package)?;
        Ok(taken::upstream(&version).to_owned())
    }

    /// Apt's preferences that the tree was made with.
    pub fn preferences(&self) -> &str {
        &self.choice.preferences
    }

    /// The tree, as seen from outside.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What names this root in the keys of what is built with it.
    pub fn id(&self) -> String {
        self.dir.display().to_string() + &self.lists_key
    }

    /// A command that runs in the root, ended by the kernel when this
    /// process ends.
    pub fn command(&self, program: &str) -> Command {
        const ENTER: &str = r#"
            set -e
            root=$1 src=$2 cache=$3
            shift 3
            mount --bind "$src" "$root/src"
            mount --bind "$cache" "$root/cache"
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

fn require(choice: &Choice, packages: &[&str]) -> Result<()> {
    let mut lacking = packages.iter().filter_map(|one| choice.absent.get(*one));
    match lacking.next() {
        Some(why) => Err(Unfetched(why.clone()).into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what needs a package that isn't there is told why.
    use super::*;

    #[test]
    fn a_package_that_is_absent_is_an_unfetched_one() {
        let why = "sparse:amd64: trixie lacks it";
        let choice = serde_json::json!({
            "preferences": "", "kernel": "7.3.4+deb13", "old_kernel": null, "differences": [],
            "lacks": {}, "absent": { "sparse:amd64": why },
        });
        let choice: Choice = serde_json::from_value(choice).unwrap();
        assert!(require(&choice, &["perl:amd64"]).is_ok());
        let error = require(&choice, &["perl:amd64", "sparse:amd64"]).unwrap_err();
        assert!(error.is::<Unfetched>() && error.to_string() == why);
    }
}
