// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's systemd as the host's init system, for the scenarios about services: the manager,
//! systemctl, the targets that a service needs, and the units that this project ships.

use std::path::Path;

use anyhow::{Context, Result};

use crate::arch::Arch;
use crate::debian;
use crate::initramfs::Initramfs;

/// The units that this project ships.
const SHIPPED: [&str; 4] = [
    "vcpufreq-scx.service",
    "vcpufreq-serve@.service",
    "vcpufreq-serve@.socket",
    "vcpufreq@.service",
];

/// Its programs.
pub const PROGRAMS: [&str; 3] = [
    "bin/systemctl",
    "lib/systemd/systemd",
    "lib/systemd/systemd-executor",
];
/// Where systemd looks for units, below /usr.
pub const UNITS: &str = "lib/systemd/system";
const TARGETS: [&str; 6] = [
    "basic.target",
    "paths.target",
    "shutdown.target",
    "sockets.target",
    "sysinit.target",
    "timers.target",
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

/// Adds its units and settings to a host's initial file system, and this project's from `shipped`.
pub fn add(archive: &mut Initramfs, root: &Path, shipped: &Path) -> Result<()> {
    // The same on each architecture.
    let units = debian::tree(root, Arch::Arm64).join(UNITS);
    for name in TARGETS {
        copy(archive, &units.join(name))?;
    }
    for name in SHIPPED {
        copy(archive, &shipped.join(name))?;
    }
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
    archive.file(&format!("{UNITS}/{name}"), &text)
}
