// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the C code: what compiler, sparse and checkpatch say of the
//! kernel modules for each kernel, the guest driver's own tests, and the
//! register header as plain C.
//!
//! They run on copies. One that passed is kept in the cache with what it
//! printed, under a key of everything that went into it, and isn't repeated
//! until that changes. A failure is never kept.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::cache::{key, remove_tree};
use crate::kernel::{Flavor, Kernel, ModuleSource};
use crate::kernel_source;
use crate::parts::Parts;
use crate::progress::Step;
use crate::suite::{Tried, Verdict, output};

const GUEST_DRIVER: ModuleSource = ModuleSource {
    name: "guest-driver",
    folders: &["guest-driver", "abi"],
};
const LAB_MODULES: ModuleSource = ModuleSource {
    name: "lab-modules",
    // The second has what sparse needs to know.
    folders: &["lab/modules", "guest-driver/tests"],
};
const HOST_MODULE: ModuleSource = ModuleSource {
    name: "host-module",
    folders: &["host-module", "guest-driver/tests"],
};
const RT_MODULE: ModuleSource = ModuleSource {
    name: "rt-module",
    folders: &["rt-module", "guest-driver/tests"],
};
const ABI: ModuleSource = ModuleSource {
    name: "abi",
    folders: &["abi"],
};

/// Includes the header twice and uses each of its values, without a library's
/// headers; with no value found, `-pedantic` refuses the empty file.
const ABI_SCRIPT: &str = r#"
    {
        echo '#include "vcpufreq-abi.h"'
        echo '#include "vcpufreq-abi.h"'
        sed -nE 's/^#define[ \t]+([A-Z0-9_]+)[ \t]+[^ \t].*/enum { use_\1 = sizeof(\1) };/p' \
            abi/vcpufreq-abi.h
    } > use.c
    clang --target="$1" -ffreestanding -nostdinc -Iabi -std=c89 -pedantic \
        -Wall -Wextra -Werror -fsyntax-only use.c
"#;

/// Every test of the C code.
pub fn all(parts: &Parts, repo: &Path) -> Result<Vec<Tried>> {
    let checkpatch = kernel_source::unpacked(&parts.cache, &parts.root)?;
    let checkpatch = format!(
        "CHECKPATCH={}/scripts/checkpatch.pl",
        parts.root.inside(&checkpatch)?
    );
    let mut tried = Vec::new();
    for flavor in [Flavor::Standard, Flavor::Rt] {
        let release = Kernel::find(&parts.root, flavor)?.release;
        for source in [GUEST_DRIVER, LAB_MODULES, HOST_MODULE, RT_MODULE] {
            let check = Check::make("check", source, &release, &[&checkpatch]);
            let name = format!("{}: W=1, sparse, checkpatch, {release}", source.name);
            tried.push(verdict(name, check.carry_out(parts, repo)));
        }
    }
    for machine in ["aarch64-linux-gnu", "x86_64-linux-gnu"] {
        let check = Check {
            name: format!("abi-{machine}"),
            source: ABI,
            command: ["sh", "-ec", ABI_SCRIPT, "sh", machine]
                .map(Into::into)
                .into(),
        };
        let name = format!("abi: the header is C for {machine}");
        tried.push(verdict(name, check.carry_out(parts, repo)));
    }
    tried.extend(driver_tests(parts, repo)?);
    Ok(tried)
}

fn verdict(name: String, result: Result<String>) -> Tried {
    let verdict = match result {
        Ok(_) => Verdict::Passed,
        Err(error) => Verdict::Failed(format!("{error:#}")),
    };
    Tried { name, verdict }
}

/// The guest driver on an emulated guest, with memory or a module as host.
fn driver_tests(parts: &Parts, repo: &Path) -> Result<Vec<Tried>> {
    let release = Kernel::find(&parts.root, Flavor::Standard)?.release;
    let kernel = format!("KERNEL=/boot/vmlinuz-{release}");
    // In memory, and gone with the command.
    let check = Check::make("test", GUEST_DRIVER, &release, &[&kernel, "MO=/tmp/out"]);
    let result = check.carry_out(parts, repo);
    let text = match &result {
        Ok(text) => text.clone(),
        Err(error) => format!("{error:#}"),
    };
    let mut tried = results(&text);
    let failed = |one: &Tried| matches!(one.verdict, Verdict::Failed(_));
    if tried.is_empty() || (result.is_err() && !tried.iter().any(failed)) {
        tried.push(Tried::new("guest-driver: make test", false, || text));
    }
    Ok(tried)
}

/// Reads `NAME (3 s): ok`, and `NAME (3 s): FAILED` with why in the lines
/// that follow.
fn results(text: &str) -> Vec<Tried> {
    let mut tried: Vec<Tried> = Vec::new();
    for line in text.lines() {
        let ended = line.rsplit_once(" s): ");
        let named = ended.and_then(|(front, end)| Some((front.rsplit_once(" (")?.0, end)));
        let verdict = match named {
            Some((_, "ok")) => Verdict::Passed,
            Some((_, "FAILED")) => Verdict::Failed(String::new()),
            _ => {
                if let Some(Verdict::Failed(why)) = tried.last_mut().map(|one| &mut one.verdict) {
                    why.push('\n');
                    why.push_str(line);
                }
                continue;
            }
        };
        let name = named.map_or("", |(name, _)| name);
        tried.push(Tried {
            name: format!("guest-driver: {name}"),
            verdict,
        });
    }
    tried
}

/// A command on a copy of a part of the checkout.
struct Check {
    /// Of the cache's entry.
    name: String,
    source: ModuleSource,
    /// Runs in the folder that has the copy, in the toolchain root.
    command: Vec<String>,
}

impl Check {
    /// A target of the makefile in the first of the source's folders.
    fn make(target: &str, source: ModuleSource, release: &str, variables: &[&str]) -> Self {
        let folder = source.folders.first().copied().unwrap_or_default();
        let mut command = ["make", "--silent", "-C", folder, target]
            .map(String::from)
            .to_vec();
        command.extend([
            format!("KDIR=/usr/src/linux-headers-{release}"),
            "ARCH=arm64".to_owned(),
            "CROSS_COMPILE=aarch64-linux-gnu-".to_owned(),
        ]);
        command.extend(variables.iter().map(|&variable| variable.to_owned()));
        Self {
            name: format!("{}-{target}-{release}", source.name),
            source,
            command,
        }
    }

    /// What the command printed when it succeeded, now or earlier on the same
    /// input. When it doesn't, what it printed is the error.
    fn carry_out(&self, parts: &Parts, repo: &Path) -> Result<String> {
        let Parts { cache, root, .. } = parts;
        let mut input = self.source.content(repo)?;
        input.push(root.id().into_bytes());
        input.extend(self.command.iter().map(|word| word.clone().into_bytes()));
        let key = key(input.iter().map(Vec::as_slice));
        let dir = cache.entry(&format!("passed-{}", self.name), &key, |to| {
            let step = Step::start(format!("{} (up to 2 minutes)", self.name));
            let work = to.join("work");
            self.source.copy(repo, &work)?;
            let inside = root.inside(&work)?;
            let mut command = root.command("env");
            command.args(["-C", &inside]).args(&self.command);
            let (held, text) = output(&mut command)?;
            step.done();
            if !held {
                bail!("{text}");
            }
            remove_tree(&work)?;
            Ok(fs::write(to.join("output"), text)?)
        })?;
        Ok(fs::read_to_string(dir.join("output"))?)
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what the driver's tests printed is counted as what it was.
    use super::*;

    #[test]
    fn driver_tests_are_told_apart() {
        let text = "make: noise\nfirst one (4 s): ok\nsecond (0 s): FAILED\nTraceback\n  why\n\
                    third (36 s): ok\n3 tests, 1 failed, 0 skipped\n";
        let tried: Vec<(String, Verdict)> = results(text)
            .into_iter()
            .map(|one| (one.name, one.verdict))
            .collect();
        let expected = [
            ("guest-driver: first one", Verdict::Passed),
            (
                "guest-driver: second",
                Verdict::Failed("\nTraceback\n  why".into()),
            ),
            ("guest-driver: third", Verdict::Passed),
        ];
        assert_eq!(
            tried,
            expected.map(|(name, verdict)| (name.to_owned(), verdict))
        );
    }
}
