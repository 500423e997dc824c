// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The architectures that the lab emulates, and what each tool calls them.

/// An emulated host's architecture, which is its guests' too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Arch {
    /// An Arm board with EL2, whose guests `vcpufreq run` or QEMU starts.
    Arm64,
    /// A PC with AMD's virtualization, whose guests are QEMU's.
    #[value(name = "x86-64")]
    X86_64,
}

impl Arch {
    /// In its kernels' releases and packages.
    pub fn debian(self) -> &'static str {
        match self {
            Self::Arm64 => "arm64",
            Self::X86_64 => "amd64",
        }
    }

    /// As QEMU, Rust and the compilers name the machine.
    pub fn machine(self) -> &'static str {
        match self {
            Self::Arm64 => "aarch64",
            Self::X86_64 => "x86_64",
        }
    }

    /// As the kernel's makefile takes it.
    pub fn make_variables(self) -> [&'static str; 2] {
        match self {
            Self::Arm64 => ["ARCH=arm64", "CROSS_COMPILE=aarch64-linux-gnu-"],
            Self::X86_64 => ["ARCH=x86", "CROSS_COMPILE="],
        }
    }

    /// Rust's target for static programs.
    pub fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.machine())
    }

    /// QEMU's program.
    pub fn qemu(self) -> String {
        format!("qemu-system-{}", self.machine())
    }

    /// The topology of a host, unless another one is asked for: two sizes of CPUs, or equal ones.
    pub fn topology(self) -> &'static str {
        match self {
            Self::Arm64 => "2+2",
            Self::X86_64 => PC,
        }
    }
}

/// The topology of an x86-64 host.
pub const PC: &str = "pc";
