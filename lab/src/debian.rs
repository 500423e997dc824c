// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's programs in an initial file system, with the libraries that `readelf` lists. The toolchain
//! root keeps those for arm64 apart, and runs those for x86-64 itself; others are unpacked beside it.

use std::collections::BTreeSet;
use std::iter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::arch::Arch;
use crate::initramfs::Initramfs;
use crate::root::Root;

/// pthread_exit opens it.
const OPENED: &str = "libgcc_s.so.1";

/// The programs' `/usr`.
pub fn tree(root: &Path, arch: Arch) -> PathBuf {
    root.join(match arch {
        Arch::Arm64 => "opt/arm64/usr",
        Arch::X86_64 => "usr",
    })
}

/// Where a tree has its libraries; all are in one folder of the host.
fn folders(arch: Arch) -> [String; 3] {
    let machine = arch.machine();
    ["", "/ceph", "/systemd"].map(|end| format!("lib/{machine}-linux-gnu{end}"))
}

/// Adds programs, each at its path below `/usr`, and the libraries of all; what the root's own tree
/// lacks is `more`'s.
pub fn add(
    archive: &mut Initramfs,
    root: &Root,
    (arch, more): (Arch, Option<&Path>),
    programs: &[&str],
) -> Result<()> {
    let trees: Vec<PathBuf> = iter::once(tree(root.dir(), arch))
        .chain(more.map(Path::to_owned))
        .collect();
    let find = |path: &str| {
        trees
            .iter()
            .map(|usr| usr.join(path))
            .find(|it| it.exists())
    };
    if arch == Arch::X86_64 && !programs.is_empty() {
        // Where programs name their loader.
        archive.link("lib64", "lib")?;
    }
    let folders = folders(arch);
    let mut files = Vec::new();
    for path in programs {
        let file =
            find(path).with_context(|| format!("no {} package has {path}", arch.debian()))?;
        archive.program(path, &file)?;
        files.push(file);
    }
    let mut libraries = BTreeSet::new();
    let mut wanted = BTreeSet::from([OPENED.to_owned()]);
    while !files.is_empty() {
        wanted.extend(linked(root, &files)?);
        files.clear();
        for name in wanted.difference(&libraries) {
            let mut places = folders.iter().map(|folder| format!("{folder}/{name}"));
            let file = places.find_map(|path| find(&path));
            let file = file.with_context(|| format!("no {} package has {name}", arch.debian()))?;
            archive.program(&format!("lib/{name}"), &file)?;
            files.push(file);
        }
        libraries.append(&mut wanted);
    }
    Ok(())
}

/// The libraries that these files name; readelf reads files of any machine.
fn linked(root: &Root, files: &[PathBuf]) -> Result<BTreeSet<String>> {
    let mut args = vec!["-d".to_owned()];
    for file in files {
        args.push(root.inside(file)?);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let text = root.run("reading programs", "aarch64-linux-gnu-readelf", &args)?;
    Ok(text.lines().filter_map(needed).map(str::to_owned).collect())
}

/// `0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]`
fn needed(line: &str) -> Option<&str> {
    let (_, name) = line.split_once("(NEEDED)")?;
    name.split_once('[')?.1.strip_suffix(']')
}

#[cfg(test)]
mod tests {
    //! Promise: only a line of a library that is needed names one.
    use super::*;

    #[test]
    fn libraries_are_found_in_readelfs_lines() {
        for (line, library) in [
            (
                " 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]",
                Some("libc.so.6"),
            ),
            (
                " 0x000000000000000e (SONAME)             Library soname: [libm.so.6]",
                None,
            ),
            ("File: /opt/arm64/usr/bin/dtc", None),
        ] {
            assert_eq!(needed(line), library, "{line}");
        }
    }
}
