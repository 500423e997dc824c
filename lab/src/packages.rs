// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's packages for the emulated hosts, with what they depend on, unpacked and not installed:
//! trees that only some scenarios need, beside the toolchain root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt::Apt;
use crate::arch::Arch;
use crate::bootstrap;
use crate::cache::{Cache, key, remove_tree};
use crate::namespace::{self, Users};
use crate::out;
use crate::progress::Step;
use crate::root::Root;
use crate::taken;
use crate::tree::{SUITE, prefer};
use crate::unfetched::Unfetched;

/// What mmdebstrap printed.
const LOG: &str = "mmdebstrap.log";

/// The tree `name` of these packages; fetches them when it isn't there.
pub fn unpacked(
    cache: &Cache,
    root: &Root,
    (arch, name): (Arch, &str),
    packages: &[&str],
) -> Result<PathBuf> {
    let list = packages.join(",");
    let id = root.id();
    let parts = [&*id, &list].map(str::as_bytes);
    let dir = cache.entry(name, &key(parts), |to| {
        let what = format!("packages for {name}");
        unpack(root, to, (arch, &what), packages, &[])
    })?;
    note(&dir, packages)?;
    Ok(dir.join("tree"))
}

/// Notes for this run's results that a tree in this folder of the cache is used, and what it has.
pub fn note(dir: &Path, packages: &[&str]) -> Result<()> {
    let log = dir.join(LOG);
    let text = fs::read_to_string(&log).with_context(|| log.display().to_string())?;
    out::fetched(taken::fetched(&text, packages));
    Ok(())
}

/// A command that runs in such a tree of this machine's architecture, with this machine's network:
/// its addresses and certificates. What the variable SHARED names is its /tmp,
/// where the command begins.
pub fn online(tree: &Path) -> Command {
    const ENTER: &str = r#"
        set -e
        cd "$1"
        shift
        # Unpacked and not installed: links that programs name their loader by are missing.
        for name in bin lib lib64; do [ -e $name ] || ln -s usr/$name $name; done
        mkdir -p dev proc tmp etc/ssl/certs
        mount --rbind /dev dev
        mount --rbind /proc proc
        mount --bind "${SHARED:-tmp}" tmp
        mount --bind /etc/ssl/certs etc/ssl/certs
        cp /etc/resolv.conf /etc/hosts etc
        certificates=/etc/ssl/certs/ca-certificates.crt
        exec env -i HOME=/tmp LC_ALL=C.UTF-8 PATH=/usr/bin:/bin NODE_EXTRA_CA_CERTS=$certificates \
            PIP_CERT=$certificates /usr/bin/unshare --root=. --wd=/tmp "$@"
    "#;
    let mut command = namespace::command(Users::Root);
    command.args(["/bin/sh", "-c", ENTER, "sh"]).arg(tree);
    command
}

/// Fetches packages, by name or apt's patterns, and unpacks them into `to/tree`, then carries out
/// mmdebstrap's extract hooks, whose `$1` is that tree. They are of the versions that `root` prefers.
pub fn unpack(
    root: &Root,
    to: &Path,
    (arch, what): (Arch, &str),
    packages: &[&str],
    hooks: &[&str],
) -> Result<()> {
    namespace::require(Users::All)?;
    let fetched = to.join("apt");
    fs::create_dir(&fetched)?;
    let mut apt = Apt::open(&fetched)?;
    let mmdebstrap = apt.mmdebstrap()?;
    let preferences = fetched.join("preferences");
    fs::write(&preferences, root.preferences())?;
    let step = Step::start(what);
    let mut command = namespace::command(Users::All);
    command
        .arg(mmdebstrap)
        .args(["--mode=root", "--verbose"])
        // Nothing in it runs here.
        .arg("--variant=extract")
        .arg(format!("--architectures={}", arch.debian()))
        .arg("--skip=check/qemu")
        .arg(prefer(&preferences))
        .args(packages.iter().map(|one| format!("--include={one}")))
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .args(hooks.iter().map(|hook| format!("--extract-hook={hook}")))
        .arg(SUITE)
        .arg(to.join("tree"))
        .args(apt.sources(SUITE)?);
    bootstrap::run(&mut command, &to.join(LOG), &step).with_context(|| {
        Unfetched(format!(
            "cannot fetch {what} from {}; if it has moved on since {} was made, remove that",
            apt.mirror(),
            root.dir().parent().unwrap_or(root.dir()).display()
        ))
    })?;
    remove_tree(&fetched)?;
    step.done();
    Ok(())
}
