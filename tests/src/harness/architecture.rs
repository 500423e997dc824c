// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is different on each architecture that the lab emulates, on the host and for its guests.

/// What the lab and a person need to know of a machine.
#[derive(Debug)]
pub struct Architecture {
    /// The host's second serial port.
    pub results: &'static str,
    /// The console of QEMU's guests.
    pub console: &'static str,
    /// Debian's QEMU, if the host was given it.
    pub qemu: &'static str,
    /// What machine QEMU's guests are.
    pub machine: &'static str,
    /// Modules beside the lab's cpufreq driver, in this order: of KVM, and the lab's own.
    pub modules: &'static [&'static str],
    /// KVM's statistic of accesses to devices that userspace has carried out.
    pub mmio_exits: &'static str,
}

/// An Arm board, whose kernel has KVM built in.
#[cfg(target_arch = "aarch64")]
pub const HERE: Architecture = Architecture {
    results: "/dev/ttyAMA1",
    console: "ttyAMA0",
    qemu: "/bin/qemu-system-aarch64",
    machine: "virt,gic-version=3",
    modules: &["lab_cpuidle"],
    mmio_exits: "mmio_exit_user",
};

/// A PC with AMD's virtualization.
#[cfg(not(target_arch = "aarch64"))]
pub const HERE: Architecture = Architecture {
    results: "/dev/ttyS1",
    console: "ttyS0",
    qemu: "/bin/qemu-system-x86_64",
    machine: "q35",
    modules: &["irqbypass", "ccp", "kvm", "kvm-amd", "lab_svm"],
    mmio_exits: "mmio_exits",
};
