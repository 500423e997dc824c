// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine that is measured, and whether its latencies are a machine's.

use serde::Serialize;

use vcpufreq_host::undo::ReadHost;

/// The host that is measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MeasuredHost {
    /// Its kernel's release.
    pub kernel: String,
    /// Its kernel's command line.
    pub cmdline: String,
    /// The device tree's compatible, or the board's name.
    pub board: String,
    /// Why its latencies are no hardware's: it is emulated, or a guest itself.
    pub emulated: Option<String>,
}

/// The host that `look` sees.
#[must_use]
pub fn machine(look: &dyn ReadHost) -> MeasuredHost {
    let text = |path: &str| look.read(path).unwrap_or_default();
    let tree = text("/proc/device-tree/compatible");
    let tree = tree.replace('\0', " ").trim().to_owned();
    let product = text("/sys/class/dmi/id/product_name");
    let flags = text("/proc/cpuinfo");
    let hypervisor = flags
        .lines()
        .filter_map(|line| line.strip_prefix("flags"))
        .any(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"));
    let emulated = if tree.split(' ').any(|name| name == "linux,dummy-virt") {
        Some("this is the virt board, emulated or a guest".to_owned())
    } else if hypervisor || product.contains("Virtual") || product.contains("KVM") {
        Some("this host is itself a guest".to_owned())
    } else {
        None
    };
    MeasuredHost {
        kernel: text("/proc/sys/kernel/osrelease"),
        cmdline: text("/proc/cmdline"),
        board: if tree.is_empty() { product } else { tree },
        emulated,
    }
}
