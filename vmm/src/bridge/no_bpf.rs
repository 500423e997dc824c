// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `bpf` of a program that is built without it: there is none.

use std::sync::Arc;

use vcpufreq_device::{CounterSnapshot, PageMemory, VcpuId};

use super::{BpfPlan, BridgeDevice, Guest};
use crate::run_report::Observer;
use crate::stats::VcpuStats;
use crate::vm::bus::MmioDevice;
use crate::vm::in_kernel::InKernel;

/// Nothing makes one.
pub enum BpfPath {}

/// How the path `bpf` would work here, or why it doesn't.
///
/// # Errors
/// Always: this program is built without BPF.
pub fn offer(_plan: &BpfPlan) -> Result<String, String> {
    Err("this program is built without BPF (cargo build --features bpf)".to_owned())
}

impl BpfPath {
    pub fn start(
        _device: &Arc<BridgeDevice>,
        _guest: &Guest,
        plan: &BpfPlan,
        _observer: &Arc<Observer>,
    ) -> anyhow::Result<(Self, InKernel)> {
        Err(anyhow::Error::msg(offer(plan).unwrap_or_default()))
    }

    pub fn memory(&self) -> Box<dyn PageMemory> {
        match *self {}
    }

    pub fn region(&self, _inner: Arc<dyn MmioDevice>) -> Arc<dyn MmioDevice> {
        match *self {}
    }

    pub fn register_thread(&self, _vcpu: VcpuId) -> anyhow::Result<()> {
        match *self {}
    }

    pub fn follow_pcpus(&self) -> anyhow::Result<()> {
        match *self {}
    }

    pub fn reset(&self) {
        match *self {}
    }

    pub fn hand_over(
        &self,
        _device: &BridgeDevice,
        _hypercalls: bool,
    ) -> (String, anyhow::Result<()>) {
        match *self {}
    }

    pub fn end_calls(&self) {
        match *self {}
    }

    pub fn end(&self) {
        match *self {}
    }

    pub fn counters(&self, _vcpu: VcpuId) -> CounterSnapshot {
        match *self {}
    }

    pub fn tell(&self, _vcpu: VcpuId, _stats: &mut VcpuStats) {
        match *self {}
    }
}
