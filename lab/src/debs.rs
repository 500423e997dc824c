// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make packages`: Debian's packages of this checkout, by dpkg-buildpackage in the toolchain root.
//!
//! It builds a copy of what git tracks, in a place that is the same for each checkout and user as
//! seen from inside the root: packages of one commit are the same to the byte. What cargo makes
//! stays there for the next time.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{Cache, remove_tree};
use crate::child_output::{self, quietly};
use crate::cross;
use crate::progress::{Step, above};
use crate::root::Root;

/// Measured, in MiB.
const NEEDED_MIB: u64 = 1_600;

/// Debian's name of an architecture, and what is built for it.
const BUILDS: [(&str, &str); 2] = [("arm64", "--build=any,all"), ("amd64", "--build=any")];

/// Makes them in `out/packages`, and has lintian look at them; whether it finds nothing.
pub fn make(repo: &Path) -> Result<bool> {
    let cache = Cache::open()?;
    let root = Root::prepare(&cache, repo)?;
    cross::fetch_crates(repo)?;
    let _lock = cache.lock("packages")?;
    cache.require_free(NEEDED_MIB)?;
    let place = cache.folder("packages", "tree")?;
    let source = place.join("source");
    remove_tree(&source)?;
    copy(repo, &source)?;
    let inside = root.inside(&source)?;
    let target = root.inside(&place.join("target"))?;
    for (architecture, what) in BUILDS {
        let step = Step::start(format!("packages for {architecture}"));
        let mut build = root.command("env");
        build
            .args(["-C", &inside])
            .args(cross::settings(&target))
            .args([
                "CARGO_NET_OFFLINE=true",
                "DEB_BUILD_OPTIONS=nocheck",
                "dpkg-buildpackage",
            ])
            // The cargo that compiles is none of Debian's: no package to depend on.
            .args(["--no-check-builddeps", "--no-sign", what])
            .args(["--host-arch", architecture]);
        let (built, text) = child_output::cargo(&mut build, &step)?;
        if !built {
            above(|| eprint!("{text}"));
            anyhow::bail!("building the packages for {architecture} failed; its output is above");
        }
        step.done();
    }
    collect(&place, &repo.join("out/packages"))?;
    let mut lintian = root.command("lintian");
    lintian.args(["--allow-root", "--fail-on", "error,warning"]);
    for (architecture, _) in BUILDS {
        let name = format!("vcpufreq_{}_{architecture}.changes", version());
        lintian.arg(root.inside(&place.join(name))?);
    }
    let (held, text) = child_output::output(&mut lintian)?;
    print!("{text}");
    Ok(held)
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Copies what git tracks.
fn copy(repo: &Path, to: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z"]).current_dir(repo);
    let names = quietly(&mut git, "listing the files of this checkout")?;
    for name in names.split_terminator('\0') {
        let target = to.join(name);
        fs::create_dir_all(target.parent().context("a file's folder")?)?;
        fs::copy(repo.join(name), &target).with_context(|| format!("cannot copy {name}"))?;
    }
    Ok(())
}

/// Puts the packages of this version into a folder, in the place of what is there.
fn collect(from: &Path, to: &Path) -> Result<()> {
    remove_tree(to)?;
    fs::create_dir_all(to)?;
    let ours = format!("_{}_", version());
    for file in fs::read_dir(from)? {
        let name = file?.file_name().into_string().unwrap_or_default();
        if name.ends_with(".deb") && name.contains(&ours) {
            fs::copy(from.join(&name), to.join(&name))?;
            println!("out/packages/{name}");
        }
    }
    Ok(())
}
