// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's measuring programs for host and guest: cyclictest, hackbench and stress-ng, with the
//! libraries that they are linked with. 25 MB, so only where a scenario runs them, or a person may.

use std::path::Path;

use anyhow::Result;

use crate::initramfs::Initramfs;

/// Scenarios that run them, and the shell.
const SCENARIOS: [&str; 3] = ["rt-latency", "rt-loop", SHELL];

/// Instead of a scenario: a person at the console.
pub const SHELL: &str = "shell";

const PROGRAMS: [&str; 3] = ["cyclictest", "hackbench", "stress-ng"];
/// Of the packages that the root keeps apart for them.
const OWN_LIBRARIES: [&str; 20] = [
    "libEGL.so.1",
    "libGLESv2.so.2",
    "libGLdispatch.so.0",
    "libJudy.so.1",
    "libacl.so.1",
    "libapparmor.so.1",
    "libbsd.so.0",
    "libcrypt.so.1",
    "libcrypto.so.3",
    "libdrm.so.2",
    "libexpat.so.1",
    "libgbm.so.1",
    "libgmp.so.10",
    "libjpeg.so.62",
    "libkmod.so.2",
    "libmd.so.0",
    "libmpfr.so.6",
    "libnuma.so.1",
    "libsctp.so.1",
    "libxxhash.so.0",
];
/// Of the root itself.
const LIBRARIES: [&str; 7] = [
    "ld-linux-aarch64.so.1",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libstdc++.so.6",
    "libz.so.1",
    "libzstd.so.1",
];
/// Of busybox, by the names that scripts call them by.
const APPLETS: [&str; 4] = ["head", "setsid", "sleep", "taskset"];

/// Whether a run of these scenarios needs them.
pub fn needed(scenarios: &[String]) -> bool {
    let scenarios = scenarios.iter().map(String::as_str);
    scenarios.into_iter().any(|name| SCENARIOS.contains(&name))
}

/// Adds what host and guest have.
pub fn add(archive: &mut Initramfs, root: &Path) -> Result<()> {
    let own = root.join("opt/rt-tools/usr");
    for name in PROGRAMS {
        archive.program(&format!("bin/{name}"), &own.join("bin").join(name))?;
    }
    let folders = [
        (own, OWN_LIBRARIES.as_slice()),
        (root.join("usr"), &LIBRARIES),
    ];
    for (usr, names) in folders {
        for name in names {
            let path = usr.join("lib/aarch64-linux-gnu").join(name);
            archive.program(&format!("lib/{name}"), &path)?;
        }
    }
    for name in APPLETS {
        archive.link(&format!("bin/{name}"), "busybox")?;
    }
    Ok(())
}
