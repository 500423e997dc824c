// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest is made of, checked: what the options end up in, and what `run` builds from.
//!
//! There is one way to make a [`RunConfig`]: [`resolve::run_config`].

pub mod likeness;
pub mod resolve;
pub mod rt;
pub mod topology;

use std::collections::BTreeSet;

use thiserror::Error;
use vcpufreq_device::{DomainId, Util, host::ActuatorChoice};
use vcpufreq_dt::Opp;

use crate::{
    options::{RunArgs, rt_values::RtPolicy},
    vm::VmSpec,
};

/// The largest number of vCPUs: KVM's limit for arm64 with GICv3.
pub const MAX_VCPUS: u32 = 512;

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

/// A guest, checked.
#[derive(Debug)]
pub struct RunConfig {
    /// What the user asks for.
    pub options: RunArgs,
    /// The virtual machine.
    pub vm: VmSpec,
    /// Its vCPUs, 1..=[`MAX_VCPUS`].
    pub vcpus: Vec<VcpuConfig>,
    /// A lower bound for each vCPU's requests.
    pub floors: Vec<Util>,
    /// What its vCPUs were made like, and why, in a line.
    pub likeness: String,
    /// Whether the guest gets PSCI's standby as an idle state: only a
    /// `PREEMPT_RT` kernel is better off with it ([`vcpufreq_dt::MachineFacts`]).
    pub standby: bool,
    /// How requests reach the host's scheduler.
    pub actuator: ActuatorChoice,
}

impl RunConfig {
    /// Whether the guest gets the virtual cpufreq device.
    pub fn bridge(&self) -> bool {
        !self.options.vcpus.no_bridge
    }

    /// Whether a clamp has a lower bound.
    pub fn has_floor(&self) -> bool {
        self.floors.iter().any(|floor| *floor > Util::ZERO)
    }

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
}
