// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest is made of, checked: what the options end up in, and what `run` builds from.
//!
//! There is one way to make a [`RunConfig`]: [`resolve::run_config`].

pub mod no_frequencies;
pub mod ram_place;
pub mod resolve;
pub mod rt;
pub mod served_vm;
pub mod topology;
pub mod topology_source;

use std::collections::BTreeSet;

use anyhow::bail;
use vcpufreq_device::{DomainId, Khz, RatedCapacity, Util};
use vcpufreq_dt::{CpuPlace, Opp};
use vcpufreq_host::ActuatorChoice;

use crate::options::{
    RunArgs,
    rt_values::{ResumeLatency, RtPolicy},
};
use vcpufreq_vm::VmSpec;

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
    /// Its capacity at `reference_khz`, 1..=1024 in the scale of the host's
    /// `cpu_capacity`.
    pub capacity: Util,
    /// The frequency that the capacity of its pCPU refers to; `None` is its own
    /// highest one.
    pub reference_khz: Option<u32>,
    /// Its performance domain: vCPUs of one domain get one frequency.
    pub domain: DomainId,
    /// Its place in the guest's `cpu-map`; clusters are counted from 0.
    pub place: CpuPlace,
    /// How its thread is scheduled, if it is a real-time one.
    pub rt: Option<RtPolicy>,
}

impl VcpuConfig {
    /// Its capacity and frequencies. Without any the capacity is as it is.
    pub fn rated(&self) -> RatedCapacity {
        let top = self.opps.last().map_or(1, |opp| opp.khz);
        let reference = self.reference_khz.filter(|_| !self.opps.is_empty());
        RatedCapacity {
            capacity: self.capacity,
            reference: Khz(reference.unwrap_or(top)),
            top: Khz(top),
        }
    }
}

/// The pCPUs of the real-time ones among these.
pub fn rt_pcpus(vcpus: &[VcpuConfig]) -> Vec<u32> {
    let rt = vcpus.iter().filter(|vcpu| vcpu.rt.is_some());
    rt.flat_map(|vcpu| vcpu.pin.clone()).collect()
}

/// What a guest asks for of a real-time host, checked.
#[derive(Clone, Copy, Debug)]
pub struct RtWish<'a> {
    /// Its vCPUs.
    pub vcpus: &'a [VcpuConfig],
    /// A lower bound for each vCPU's requests.
    pub floors: &'a [Util],
    /// The wake-up latency of the real-time vCPUs' pCPUs.
    pub resume_latency: Option<ResumeLatency>,
}

impl RtWish<'_> {
    /// Whether it has a real-time vCPU.
    pub fn is_real_time(&self) -> bool {
        self.vcpus.iter().any(|vcpu| vcpu.rt.is_some())
    }

    /// Whether what clamps the vCPUs can keep their floors.
    ///
    /// # Errors
    /// When there are some, and nothing clamps.
    pub fn check_clamped(&self, actuator: ActuatorChoice) -> anyhow::Result<()> {
        let has_floor = self.floors.iter().any(|floor| *floor > Util::ZERO);
        if actuator == ActuatorChoice::Nothing && has_floor {
            bail!("--actuator none can't keep a --floor; leave one of them out");
        }
        Ok(())
    }
}

/// The pCPUs that these are pinned to, each once.
pub fn pinned(vcpus: &[VcpuConfig]) -> Vec<u32> {
    let pins = vcpus.iter().flat_map(|vcpu| &vcpu.pin);
    pins.copied().collect::<BTreeSet<_>>().into_iter().collect()
}

/// A guest, checked.
#[derive(Debug)]
pub struct RunConfig {
    /// The user's options.
    pub options: RunArgs,
    /// The virtual machine.
    pub vm: VmSpec,
    /// Its vCPUs, 1..=[`MAX_VCPUS`].
    pub vcpus: Vec<VcpuConfig>,
    /// A lower bound for each vCPU's requests.
    pub floors: Vec<Util>,
    /// What its vCPUs were made like, and why, in a line.
    pub topology_source: String,
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

    /// The pCPUs that vCPUs are pinned to, each once.
    pub fn pinned(&self) -> Vec<u32> {
        pinned(&self.vcpus)
    }

    /// What it asks for of a real-time host.
    pub fn rt(&self) -> RtWish<'_> {
        RtWish {
            vcpus: &self.vcpus,
            floors: &self.floors,
            resume_latency: self.options.bounds.resume_latency_us,
        }
    }
}
