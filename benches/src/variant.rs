// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a load is measured.

/// Where the load runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Variant {
    /// On the host: the reference.
    Host,
    /// In a guest that has the host's topology and no bridge.
    Vm,
    /// In one with both.
    #[value(name = "vm+bridge")]
    VmBridge,
    /// The same, without what else runs on a vCPU's pCPU added to its requests.
    Max,
    /// The same, with requests by the service `vcpufreq scx`.
    Scx,
    /// As `vm+bridge`; the guest reads its own requests, and nothing of the pCPU's frequency.
    Request,
}

/// A variant's row in the table below.
struct VariantRow {
    name: &'static str,
    /// Whether it is measured where no variant is asked for.
    by_default: bool,
    /// More options of the VMM for a guest with the bridge.
    bridge: Option<&'static [&'static str]>,
}

const fn row(
    name: &'static str,
    by_default: bool,
    bridge: Option<&'static [&'static str]>,
) -> VariantRow {
    VariantRow {
        name,
        by_default,
        bridge,
    }
}

impl Variant {
    /// In the order in which they are measured.
    pub const ALL: [Self; 6] = [
        Self::Host,
        Self::Vm,
        Self::VmBridge,
        Self::Max,
        Self::Scx,
        Self::Request,
    ];

    fn row(self) -> VariantRow {
        match self {
            Self::Host => row("host", true, None),
            Self::Vm => row("vm", true, None),
            Self::VmBridge => row("vm+bridge", true, Some(&[])),
            Self::Max => row("max", false, Some(&["--sum=false"])),
            Self::Scx => row("scx", false, Some(&["--actuator", "scx"])),
            Self::Request => row("request", false, Some(&["--cur-perf", "request"])),
        }
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Whether it is measured where so many are asked for.
    pub fn is_asked(self, asked: &[Self]) -> bool {
        match asked {
            [] => self.row().by_default,
            asked => asked.contains(&self),
        }
    }

    /// More options of the VMM for a guest with the bridge; `None` without the bridge.
    pub fn bridge(self) -> Option<&'static [&'static str]> {
        self.row().bridge
    }
}
