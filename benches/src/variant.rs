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
}

impl Variant {
    /// In the order in which they are measured.
    pub const ALL: [Self; 3] = [Self::Host, Self::Vm, Self::VmBridge];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Vm => "vm",
            Self::VmBridge => "vm+bridge",
        }
    }
}
