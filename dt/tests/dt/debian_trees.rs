// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device trees that Debian's kernels bring. They are in the lab's toolchain root
//! (VCPUFREQ_LAB_ROOT).

use std::fs;
use std::path::{Path, PathBuf};

/// The files of the newest kernel's, or none and a line that says so.
pub fn debian_trees() -> Option<Vec<PathBuf>> {
    let found = of_kernel().filter(|trees| !trees.is_empty());
    if found.is_none() {
        println!(
            "SKIP: VCPUFREQ_LAB_ROOT has to be the lab's toolchain root, with trees of boards"
        );
    }
    found
}

fn of_kernel() -> Option<Vec<PathBuf>> {
    let root = std::env::var_os("VCPUFREQ_LAB_ROOT")?;
    let folders = fs::read_dir(Path::new(&root).join("usr/lib")).ok()?;
    let folders = folders.flatten().map(|entry| entry.path());
    let of_kernel = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.is_dir() && name.is_some_and(|name| name.starts_with("linux-image-"))
    };
    Some(trees(&folders.filter(of_kernel).max()?))
}

/// All trees below a folder.
fn trees(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.path()) {
        if path.is_dir() {
            found.extend(trees(&path));
        } else if path.extension().is_some_and(|end| end == "dtb") {
            found.push(path);
        }
    }
    found.sort();
    found
}
