// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM decides of a bridge.

use std::ffi::c_int;
use std::sync::Arc;

use super::ioeventfd::IoeventfdPlan;
use crate::embedder::Embedder;

/// What a bridge is to know of its guest.
#[derive(Clone, Debug)]
pub struct BridgeConfig {
    /// Guest address of the first register.
    pub base: u64,
    /// The pCPUs that each vCPU is pinned to, by number; none: any.
    pub pins: Vec<Vec<u32>>,
    /// The pCPUs of real-time vCPUs.
    pub rt_pcpus: Vec<u32>,
    /// The signal that makes KVM_RUN return; its handler has nothing to do. `None`: the vCPUs are
    /// another process'.
    pub kick: Option<c_int>,
    /// How the path `ioeventfd` is to be, if it may be taken.
    pub ioeventfd: Option<IoeventfdPlan>,
    /// The program that has it.
    pub embedder: Arc<dyn Embedder>,
}

impl BridgeConfig {
    /// For vCPUs of another process, or of one that makes exits alone: each may run on all pCPUs.
    #[must_use]
    pub fn new(base: u64, vcpus: usize, embedder: Arc<dyn Embedder>) -> Self {
        Self {
            base,
            pins: vec![vec![]; vcpus],
            rt_pcpus: vec![],
            kick: None,
            ioeventfd: None,
            embedder,
        }
    }
}
