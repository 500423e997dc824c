// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the paths of a bridge know: its device, and facts of the guest.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vcpufreq_device::Device;
use vcpufreq_host::{HostActuator, HostRoot, SysfsSource, present_pcpus};

use crate::embedder::Embedder;
use crate::event_stats::EventStats;
use crate::offload::OffloadState;

/// The device as a bridge serves it.
pub type BridgeDevice = Device<HostActuator, Arc<SysfsSource>, Arc<EventStats>>;

/// What paths know of their guest.
pub struct GuestFacts {
    /// Guest address of the first register.
    pub base: u64,
    /// The pCPUs that vCPUs are pinned to.
    pub pcpus_of_vcpus: Vec<u32>,
    /// Whether all of them are pinned.
    pub all_pinned: bool,
    /// The pCPUs of real-time vCPUs.
    pub rt_pcpus: Vec<u32>,
    /// Which vCPUs have threads.
    pub threads: Arc<[AtomicBool]>,
    /// What KVM answers itself.
    pub state: Arc<OffloadState>,
    /// The signal that makes KVM_RUN return, if the vCPUs are this process'.
    pub kick: Option<c_int>,
    /// The program that has the bridge.
    pub embedder: Arc<dyn Embedder>,
}

impl GuestFacts {
    /// The pCPUs whose frequency counts: each event there wakes a worker.
    #[must_use]
    pub fn watched_pcpus(&self, host: &HostRoot) -> Vec<u32> {
        let mut pcpus: Vec<_> = present_pcpus(host).into_iter().collect();
        if self.all_pinned {
            pcpus.retain(|pcpu| self.pcpus_of_vcpus.contains(pcpu));
        }
        // To wake it, PREEMPT_RT runs a thread of that pCPU (irq_work/N): not beside a real-time
        // vCPU, whose page is looked after each 4 ms anyway.
        pcpus.retain(|pcpu| !self.rt_pcpus.contains(pcpu));
        pcpus
    }
}
