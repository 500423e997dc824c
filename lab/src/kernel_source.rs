// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The few files of the kernel's source that the lab uses, from Debian's
//! linux-source package: the kernel's own driver for the same device, the
//! bindings, checkpatch, and the patterns of coccicheck.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::cache::{Cache, key};
use crate::progress::Step;
use crate::root::Root;

/// What is unpacked.
const FILES: &[&str] = &[
    "drivers/cpufreq/virtual-cpufreq.c",
    "Documentation/devicetree/bindings",
    "scripts/checkpatch.pl",
    "scripts/coccinelle",
    "scripts/spelling.txt",
    "scripts/const_structs.checkpatch",
];

/// The folder with those files.
pub fn unpacked(cache: &Cache, root: &Root) -> Result<PathBuf> {
    root.require(&[&root.source_package()])?;
    let mut parts = vec![root.id()];
    parts.extend(FILES.iter().map(|&file| file.to_owned()));
    let key = key(parts.iter().map(String::as_bytes));
    cache.entry("linux-source", &key, |to| {
        let step = Step::start("files of the kernel's source (30 s)");
        let packed = packed(root)?;
        // Paths in the archive begin with its name.
        let top = packed.trim_end_matches(".tar.xz");
        let inside = root.inside(to)?;
        let archive = format!("/usr/src/{packed}");
        let mut args = vec![
            "-xJf".to_owned(),
            archive,
            "-C".into(),
            inside,
            "--strip-components=1".into(),
        ];
        args.extend(FILES.iter().map(|file| format!("{top}/{file}")));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        root.run("unpacking the kernel's source", "tar", &args)?;
        step.done();
        Ok(())
    })
}

/// The folder of the kernel's device-tree bindings.
pub fn bindings(cache: &Cache, root: &Root) -> Result<PathBuf> {
    Ok(unpacked(cache, root)?.join("Documentation/devicetree/bindings"))
}

/// Name of the archive: `linux-source-7.2.tar.xz`.
pub fn packed(root: &Root) -> Result<String> {
    let folder = root.dir().join("usr/src");
    fs::read_dir(&folder)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find(|name| name.starts_with("linux-source-") && name.ends_with(".tar.xz"))
        .with_context(|| format!("no linux-source archive in {}", folder.display()))
}
