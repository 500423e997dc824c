// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a load is measured. From `plain` to `vm+bridge` each guest has one ingredient more than the
//! one before it, `scx` aside, which is in the place of `sum`.

/// Where the load runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Variant {
    /// On the host: the reference.
    Host,
    /// In a guest as QEMU starts it: no capacities, and the host chooses where its vCPUs run.
    Plain,
    /// The same, with each vCPU pinned to a pCPU.
    Pinned,
    /// In one that also has the host's capacities and topology, and no bridge.
    Vm,
    /// With OPPs and the energy model too; requests change nothing, and it reads its own.
    Opps,
    /// The same, and it reads the frequency that it gets.
    #[value(name = "cur_perf")]
    CurPerf,
    /// With requests that exit to the VMM, as a floor.
    Exit,
    /// With requests that need no exit to the VMM.
    #[value(name = "no_exit")]
    NoExit,
    /// The same, with what else runs on a vCPU's pCPU added to its requests.
    Sum,
    /// The same, with requests by the service `vcpufreq scx`.
    Scx,
    /// With ceilings too: all of the bridge.
    #[value(name = "vm+bridge")]
    VmBridge,
    /// The same, without what else runs on a vCPU's pCPU added to its requests.
    Max,
    /// As `vm+bridge`; the guest reads its own requests, and nothing of the pCPU's frequency.
    Request,
    /// With the bridge, and vCPUs that the host places anywhere.
    Unpinned,
    /// As `vm+bridge`, but that the host places each vCPU within a cluster.
    Clustered,
}

/// Where a guest's vCPUs may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VcpuPins {
    /// Where the host chooses.
    Anywhere,
    /// Within a cluster.
    Cluster,
    /// Each on a pCPU of its own.
    Own,
}

/// A variant's guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestShape {
    /// Where its vCPUs run.
    pub pins: VcpuPins,
    /// Whether it has the capacities and the topology of its pCPUs.
    pub topology: bool,
    /// More options of the VMM for the bridge; `None` without the bridge.
    pub bridge: Option<&'static [&'static str]>,
}

/// A guest that mirrors its pCPUs, with these options of the bridge.
pub const fn mirror(bridge: Option<&'static [&'static str]>) -> GuestShape {
    GuestShape {
        pins: VcpuPins::Own,
        topology: true,
        bridge,
    }
}

impl Variant {
    /// In the order in which they are measured.
    pub const ALL: [Self; 15] = [
        Self::Host,
        Self::Plain,
        Self::Pinned,
        Self::Vm,
        Self::Opps,
        Self::CurPerf,
        Self::Exit,
        Self::NoExit,
        Self::Sum,
        Self::Scx,
        Self::VmBridge,
        Self::Max,
        Self::Request,
        Self::Unpinned,
        Self::Clustered,
    ];

    /// The host, and guests of which each has one ingredient more.
    pub const ABLATION: &[Self] = &[
        Self::Host,
        Self::Plain,
        Self::Pinned,
        Self::Vm,
        Self::Opps,
        Self::CurPerf,
        Self::Exit,
        Self::NoExit,
        Self::Sum,
        Self::Scx,
        Self::VmBridge,
    ];

    /// Whether `vcpufreq qemu` has it: its requests have one path, and no sum unless one is wanted.
    pub fn is_for_qemu(self) -> bool {
        !matches!(self, Self::Exit | Self::NoExit | Self::Scx | Self::Max)
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Plain => "plain",
            Self::Pinned => "pinned",
            Self::Vm => "vm",
            Self::Opps => "opps",
            Self::CurPerf => "cur_perf",
            Self::Exit => "exit",
            Self::NoExit => "no_exit",
            Self::Sum => "sum",
            Self::Scx => "scx",
            Self::VmBridge => "vm+bridge",
            Self::Max => "max",
            Self::Request => "request",
            Self::Unpinned => "unpinned",
            Self::Clustered => "clustered",
        }
    }

    /// Whether it is measured where so many are asked for; where none is, the host, and the guest
    /// with and without the bridge.
    pub fn is_asked(self, asked: &[Self]) -> bool {
        match asked {
            [] => matches!(self, Self::Host | Self::Vm | Self::VmBridge),
            asked => asked.contains(&self),
        }
    }

    /// Its guest; `None` of the host. Options here go before those that the user gives for all.
    pub fn guest(self) -> Option<GuestShape> {
        let unlike = |pins| GuestShape {
            pins,
            topology: false,
            bridge: None,
        };
        Some(match self {
            Self::Host => return None,
            Self::Plain => unlike(VcpuPins::Anywhere),
            Self::Pinned => unlike(VcpuPins::Own),
            Self::Vm => mirror(None),
            Self::Opps => mirror(Some(&["--actuator", "none", "--cur-perf", "request"])),
            Self::CurPerf => mirror(Some(&["--actuator", "none"])),
            Self::Exit => mirror(Some(&["--clamp", "floor", "--path", "exit"])),
            Self::NoExit => mirror(Some(&["--clamp", "floor", "--sum=false"])),
            Self::Sum => mirror(Some(&["--clamp", "floor", "--sum"])),
            Self::Scx => mirror(Some(&["--actuator", "scx"])),
            Self::VmBridge => mirror(Some(&[])),
            Self::Max => mirror(Some(&["--sum=false"])),
            Self::Request => mirror(Some(&["--cur-perf", "request"])),
            Self::Unpinned => GuestShape {
                bridge: Some(&[]),
                ..unlike(VcpuPins::Anywhere)
            },
            Self::Clustered => GuestShape {
                pins: VcpuPins::Cluster,
                ..mirror(Some(&[]))
            },
        })
    }

    /// More options of the VMM for a guest with the bridge; `None` without the bridge.
    pub fn bridge(self) -> Option<&'static [&'static str]> {
        self.guest()?.bridge
    }

    /// Whether each vCPU stays on one pCPU, so that what runs on one shows on the other.
    pub fn stays(self) -> bool {
        let pins = self.guest().map(|guest| guest.pins);
        pins.is_none_or(|pins| pins == VcpuPins::Own)
    }
}
