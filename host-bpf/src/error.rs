// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why there is no BPF here: each with what to do about it.

#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;

/// Why the programs don't run.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The kernel doesn't describe its types.
    #[error(
        "no {}: the kernel has no BTF; it needs CONFIG_DEBUG_INFO_BTF=y",
        .0.display()
    )]
    NoBtf(PathBuf),
    /// The process may not load such programs.
    #[error("this process lacks {0}; run as root, or give it to the program by setcap")]
    NotPermitted(&'static str),
    /// The kernel protects itself from its administrator.
    #[error("kernel lockdown is '{0}', in which BPF may not read kernel memory")]
    Lockdown(String),
    /// The kernel has no bpf system call, or it is blocked.
    #[error(
        "the system call bpf fails ({0}): CONFIG_BPF_SYSCALL=n, or a seccomp filter forbids it"
    )]
    NoSyscall(io::Error),
    /// An object whose maps differ from those in use, or from this program's.
    #[error("the BPF object has layout {found}, this program {wanted}: take those of one version")]
    Layout {
        /// Of the object.
        found: u32,
        /// Of this crate.
        wanted: u32,
    },
    /// A program would hang the host.
    #[error("BPF object: {program} on {hook} calls a function of the kernel's; build it anew")]
    Hook {
        /// The program.
        program: String,
        /// What it would be attached to.
        hook: String,
    },
    /// The kernel module isn't there.
    #[error("the module vcpufreq_host is not loaded; see host-bpf/module/README.md")]
    NoModule,
    /// The kernel refused something.
    #[error("{what}: {why}")]
    Refused {
        /// What was being done.
        what: &'static str,
        /// The error of kernel or libbpf, as text.
        why: String,
    },
    /// An operator's policy isn't put into force.
    #[error("the policy is refused: {0}")]
    Policy(String),
    /// A VMM has no programs that ask a policy, or they can't be opened.
    #[error(
        "process {0} has no programs that ask a policy: its guest isn't on the path bpf, or this \
         user may not see them; run as root"
    )]
    NoPrograms(u32),
    /// Each slot is taken.
    #[error("1,024 VMs of this host use the path bpf, the most there may be; use another --path")]
    TooManyVms,
    /// There is no such vCPU.
    #[error("no vCPU {vcpu}: the VM has {vcpus}")]
    NoVcpu {
        /// The one that was asked for.
        vcpu: u16,
        /// How many there are.
        vcpus: usize,
    },
    /// No vCPUs, or more than a device has.
    #[error("{0} vCPUs; a device has 1 to 512")]
    VcpuCount(usize),
}
