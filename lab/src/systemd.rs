// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's systemd as the host's init system, for the scenarios about services: the manager,
//! systemctl, the targets that a service needs, and the unit that this project ships.

use std::path::Path;

use anyhow::{Context, Result};

use crate::initramfs::Initramfs;

/// The scenario that needs it.
const SCENARIO: &str = "systemd";

const PROGRAMS: [&str; 3] = [
    "bin/systemctl",
    "lib/systemd/systemd",
    "lib/systemd/systemd-executor",
];
/// Found by the run path of the programs.
const OWN_LIBRARIES: [&str; 2] = ["libsystemd-core-257.so", "libsystemd-shared-257.so"];
const LIBRARIES: [&str; 13] = [
    "libacl.so.1",
    "libapparmor.so.1",
    "libaudit.so.1",
    "libblkid.so.1",
    "libcap-ng.so.0",
    "libcap.so.2",
    "libcrypt.so.1",
    "libcrypto.so.3",
    "libmount.so.1",
    "libpam.so.0",
    "libpcre2-8.so.0",
    "libseccomp.so.2",
    "libselinux.so.1",
];
/// Of the root itself.
const ROOT_LIBRARIES: [&str; 2] = ["libz.so.1", "libzstd.so.1"];
const TARGETS: [&str; 6] = [
    "basic.target",
    "paths.target",
    "shutdown.target",
    "sockets.target",
    "sysinit.target",
    "timers.target",
];
const FOLDERS: [&str; 10] = [
    "usr",
    "usr/bin",
    "usr/lib",
    "usr/lib/systemd",
    "usr/lib/systemd/system",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu/systemd",
    "etc",
    "etc/systemd",
    "etc/systemd/system",
];
/// The agent as a service. All of its scenarios' own processes are its children.
const AGENT: &str = "[Unit]
DefaultDependencies=no
[Service]
ExecStart=/init
StandardOutput=file:/dev/console
StandardError=file:/dev/console
";
const DEFAULT_TARGET: &str = "[Unit]
DefaultDependencies=no
Requires=lab.service
AllowIsolate=yes
";
/// Without one, systemd takes each boot for the first.
const MACHINE_ID: &str = "76637075667265716c61620000000001\n";

/// Whether a run of these scenarios needs it.
pub fn needed(scenarios: &[String]) -> bool {
    scenarios.iter().any(|name| name == SCENARIO)
}

/// Adds it to a host's initial file system.
pub fn add(archive: &mut Initramfs, root: &Path, repo: &Path) -> Result<()> {
    let own = root.join("opt/rt-tools/usr");
    let libraries = own.join("lib/aarch64-linux-gnu");
    for folder in FOLDERS {
        archive.folder(folder)?;
    }
    for name in PROGRAMS {
        archive.program(&format!("usr/{name}"), &own.join(name))?;
    }
    for name in OWN_LIBRARIES {
        let path = libraries.join("systemd").join(name);
        let name = format!("usr/lib/aarch64-linux-gnu/systemd/{name}");
        archive.program(&name, &path)?;
    }
    for name in LIBRARIES {
        archive.program(&format!("lib/{name}"), &libraries.join(name))?;
    }
    for name in ROOT_LIBRARIES {
        let path = root.join("usr/lib/aarch64-linux-gnu").join(name);
        archive.program(&format!("lib/{name}"), &path)?;
    }
    for name in TARGETS {
        copy(archive, &own.join("lib/systemd/system").join(name))?;
    }
    copy(archive, &repo.join("docs/vcpufreq@.service"))?;
    archive.link("usr/bin/vcpufreq", "/bin/vcpufreq")?;
    archive.file("etc/machine-id", MACHINE_ID.as_bytes())?;
    for (name, text) in [("lab.service", AGENT), ("default.target", DEFAULT_TARGET)] {
        archive.file(&format!("etc/systemd/system/{name}"), text.as_bytes())?;
    }
    Ok(())
}

/// Adds a unit.
fn copy(archive: &mut Initramfs, path: &Path) -> Result<()> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("the unit {}", path.display()))?;
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    archive.file(&format!("usr/lib/systemd/system/{name}"), &text)
}
