// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a virtual machine is made of, checked: the plain data that the command
//! line and the TOML file end up in, and that the VMM builds from.
//!
//! There is one way to make a [`RunConfig`]: `resolve::run_config`. Nothing
//! here reads or writes a file.

use std::{collections::BTreeSet, num::NonZeroU32, path::PathBuf};

use thiserror::Error;
use vcpufreq_device::{
    ClampMode, CurPerfVisibility, DomainId, RateLimit, Util, host::ActuatorChoice,
};
use vcpufreq_dt::Opp;

use crate::{
    console_choice::ConsoleChoice, path::PathChoice, rt_config::RtConfig, rt_options::RtPolicy,
};

/// The largest number of vCPUs: KVM's limit for arm64 with GICv3.
pub const MAX_VCPUS: u32 = 512;

/// The default memory of the guest, in MiB.
pub const DEFAULT_MEM_MIB: u64 = 512;

/// The default kernel command line: the 16550 console, which is the only one.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0";

/// The default KVM device.
pub const DEFAULT_KVM_DEVICE: &str = "/dev/kvm";

/// Where the programs of the path `bpf` are installed.
pub const DEFAULT_BPF_OBJECT: &str = "/usr/lib/vcpufreq/vcpufreq.bpf.o";

/// The default limit on requests: of a vCPU, and of a VM for each of its domains.
/// schedutil in a guest makes 1,000 a second for a domain at most, unless its
/// rate_limit_us is set.
pub const DEFAULT_RATE_LIMIT: RateLimit = RateLimit {
    per_second: NonZeroU32::new(1000).unwrap(),
    burst: NonZeroU32::new(100).unwrap(),
};

/// One vCPU, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuConfig {
    /// The pCPUs its thread may run on; empty: any.
    pub pin: Vec<u32>,
    /// Its operating points, frequency rising, 1 to 64; one entry means no
    /// table: any frequency up to it. Empty only without the bridge, when
    /// neither the host nor the user tells frequencies.
    pub opps: Vec<Opp>,
    /// Its capacity at its highest frequency, 1..=1024 in the scale of the
    /// host's `cpu_capacity`.
    pub capacity: Util,
    /// Its performance domain: vCPUs of one domain get one frequency.
    pub domain: DomainId,
    /// Its cluster in the guest's `cpu-map`, counted from 0.
    pub cluster: u32,
    /// How its thread is scheduled, if it is a real-time one.
    pub rt: Option<RtPolicy>,
}

/// The pCPUs of the real-time ones among these.
pub fn rt_pcpus(vcpus: &[VcpuConfig]) -> Vec<u32> {
    let rt = vcpus.iter().filter(|vcpu| vcpu.rt.is_some());
    rt.flat_map(|vcpu| vcpu.pin.clone()).collect()
}

/// A virtual machine, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunConfig {
    /// An arm64 `Image`, uncompressed.
    pub kernel: PathBuf,
    /// An initramfs.
    pub initrd: Option<PathBuf>,
    /// The kernel command line.
    pub cmdline: String,
    /// Memory of the guest, in MiB.
    pub mem_mib: u64,
    /// Its vCPUs, 1..=[`MAX_VCPUS`].
    pub vcpus: Vec<VcpuConfig>,
    /// What its vCPUs were made like, and why, in a line.
    pub likeness: String,
    /// Whether the guest gets PSCI's standby as an idle state: only a
    /// `PREEMPT_RT` kernel is better off with it ([`vcpufreq_dt::MachineFacts`]).
    pub standby: bool,
    /// Whether the guest gets the virtual cpufreq device.
    pub bridge: bool,
    /// What a request limits: the floor alone, or the ceiling as well.
    pub clamp: ClampMode,
    /// How requests reach the host's scheduler.
    pub actuator: ActuatorChoice,
    /// The cgroup in which its own are made, if the user names one.
    pub cgroup_parent: Option<PathBuf>,
    /// How accesses reach the device.
    pub path: PathChoice,
    /// The programs of the path `bpf`, [`DEFAULT_BPF_OBJECT`] unless told.
    pub bpf_object: PathBuf,
    /// Whether to say why.
    pub explain: bool,
    /// What cur_perf tells.
    pub visibility: CurPerfVisibility,
    /// How often a vCPU's requests reach the host.
    pub rate_limit: Option<RateLimit>,
    /// Where to write the events, one JSON object a line.
    pub events: Option<PathBuf>,
    /// Where to write the guest's device tree, as a dtb.
    pub dump_dtb: Option<PathBuf>,
    /// What is at the other end of the guest's console.
    pub console: ConsoleChoice,
    /// Whether the guest is told its stolen time (`KVM_ARM_VCPU_PVTIME`).
    pub pvtime: bool,
    /// Its real-time side.
    pub rt: RtConfig,
    /// The KVM device, [`DEFAULT_KVM_DEVICE`] unless told.
    pub kvm_device: PathBuf,
}

impl RunConfig {
    /// The pCPUs that vCPUs are pinned to, each once.
    pub fn pinned(&self) -> Vec<u32> {
        let pins = self.vcpus.iter().flat_map(|vcpu| &vcpu.pin);
        pins.copied().collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// Why a configuration is no virtual machine. Each message is one line: the
/// cause, then what to do.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// No kernel was named.
    #[error("no kernel is given; name an arm64 Image with --kernel FILE")]
    NoKernel,
    /// Cgroups have a place and no use.
    #[error(
        "--cgroup-parent is where requests become clamps of cgroups; leave it or --actuator out"
    )]
    NoCgroups,
    /// The config file can't be read.
    #[error("config file {} can't be read: {source}; check the path and its permissions", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The device doesn't take these vCPUs.
    #[error("{0}; correct --table, --capacity or --domain")]
    Device(vcpufreq_device::ConfigError),
    /// No vCPU, or too many.
    #[error("{0} vCPUs; give --cpus a number from 1 to {MAX_VCPUS}")]
    VcpuCount(u32),
    /// An option for a vCPU that the guest hasn't got.
    #[error(
        "there is no vCPU {vcpu}: the guest has {count} (numbers from 0); raise --cpus or correct the option"
    )]
    NoSuchVcpu {
        /// Which one was named.
        vcpu: u32,
        /// How many there are.
        count: u32,
    },
    /// A pin to a pCPU that the host hasn't got.
    #[error(
        "vCPU {vcpu} is pinned to CPU {pcpu}, which this host doesn't have; choose from its online CPUs {online}"
    )]
    NoSuchPcpu {
        /// Which vCPU.
        vcpu: u32,
        /// Which pCPU.
        pcpu: u32,
        /// The host's online CPUs, as a list.
        online: String,
    },
    /// A pin to a pCPU that is offline.
    #[error(
        "vCPU {vcpu} is pinned to CPU {pcpu}, which is offline; bring it online (echo 1 > /sys/devices/system/cpu/cpu{pcpu}/online) or choose from {online}"
    )]
    PcpuOffline {
        /// Which vCPU.
        vcpu: u32,
        /// Which pCPU.
        pcpu: u32,
        /// The host's online CPUs, as a list.
        online: String,
    },
    /// A performance table breaks a rule.
    #[error("vCPU {vcpu}: {why}; give --table {vcpu}=KHZ,KHZ,... with 1 to 64 rising frequencies")]
    Table {
        /// Which vCPU.
        vcpu: u32,
        /// Which rule.
        why: String,
    },
    /// The capacity is out of range.
    #[error(
        "vCPU {vcpu}: capacity {capacity} isn't within 1 to 1024; correct --capacity or --ipc-ratio"
    )]
    Capacity {
        /// Which vCPU.
        vcpu: u32,
        /// Its capacity.
        capacity: u64,
    },
    /// Capacity and IPC ratio both say what a vCPU can do.
    #[error("vCPU {vcpu} has both --capacity and --ipc-ratio; give one of them")]
    CapacityAndRatio {
        /// Which vCPU.
        vcpu: u32,
    },
    /// The host doesn't tell the frequencies of the pCPU.
    #[error(
        "vCPU {vcpu} has no frequencies: {why}; give --table {vcpu}=KHZ,..., or --no-bridge to run without"
    )]
    NoFrequencies {
        /// Which vCPU.
        vcpu: u32,
        /// What the host is missing.
        why: String,
    },
    /// The TOML file is malformed or has an unknown key.
    #[error("config file {}, line {line}: {message}; correct it, the keys are the long options (see vcpufreq run --help)", path.display())]
    Toml {
        /// Which file.
        path: PathBuf,
        /// Where, counted from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
}
