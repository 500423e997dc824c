// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hypercalls when nothing else is left to the programs: KVM's filter can't be changed once a VM
//! has run, so nobody but the program that sees them can tell what a guest asks for.

#![forbid(unsafe_code)]

use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use vcpufreq_device::VcpuId;

use super::HostBpf;
use crate::error::BpfError;
use crate::policy::{ActuateBy, VcpuPolicy};

impl HostBpf {
    /// Detaches all programs but the one on hypercalls, which from now on tells of each request
    /// ([`Event::Told`](crate::Event::Told)) and does nothing else. The rest is as by
    /// [`Self::detach`].
    ///
    /// # Errors
    /// What the kernel said, or that no program sees hypercalls; then all are detached.
    pub fn leave_calls(&self) -> Result<(), BpfError> {
        // No write of a register is told of from now on.
        self.programs().stub = None;
        let told = self.tell_only();
        if told.is_err() {
            self.detach();
            return told;
        }
        // The one on switches, which knows whose thread is where, goes with the others.
        if let Some(vm) = self.vm.get(0) {
            vm.calls_only.store(1, SeqCst);
        }
        self.programs().loaded.detach();
        Ok(())
    }

    fn tell_only(&self) -> Result<(), BpfError> {
        if self.programs().calls.is_none() {
            return Err(BpfError::Refused {
                what: "keeping the BPF program on hypercalls",
                why: "it isn't attached".to_owned(),
            });
        }
        let policies = self.policies.read();
        let policies = policies.unwrap_or_else(PoisonError::into_inner).clone();
        for (vcpu, policy) in (0..=u16::MAX).map(VcpuId).zip(policies) {
            let policy = VcpuPolicy {
                actuate: ActuateBy::Nobody,
                limit: None,
                tell: true,
                ..policy
            };
            self.set_policy(vcpu, policy)?;
        }
        Ok(())
    }
}
